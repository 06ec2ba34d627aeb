"""fp8 as other tools keep it: torch's float8 dtypes in a file, plain or with a scale for each tensor or row.

A scale is always what the codes are multiplied by to get the weight, whatever its name:

* `X.scale_weight`: ComfyUI's first "scaled fp8" files, marked by an empty float8 tensor `scaled_fp8`.
* `X.weight_scale`: diffusers, compressed-tensors, and newer ComfyUI files, which add a JSON line `X.comfy_quant`.
* `X.weight_scale_inv`: DeepSeek and transformers' fine-grained fp8. It is the inverse of the factor used in quantizing:
  DeepSeek's `weight_dequant` and transformers' `_dequantize_fp8_weight` multiply by it.

`X.scale_input` and `X.input_scale` are hints for quantizing activations, which sdquant does not do.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import jsonline
from ._bnb_codec import Codec, bad, require, scales
from ._bnb_find import FLOAT8, HINTS, MARKER, SCALES
from ._bnb_library import FLOATS, tile
from ._chunks import by_rows
from .base import Found, Packed, PackedSpec, Part, QuantSpec, Unfit

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = {name: getattr(torch, name) for name in FLOAT8}
_LARGEST = 448.0  # of float8_e4m3fn; torch turns what is larger into NaN


class Float8(Codec):
    """The float8 packing of fp8. Parts: codes float8 [out, in...]; scale float32 [out or 1, 1...] unless plain."""

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, Part]:
        if dtype not in FLOATS:
            raise Unfit(f"fp8 is made from {', '.join(FLOATS)}, and the weight is {dtype}")
        return {
            "codes": Part(dtype="float8_e4m3fn", shape=shape),
            "scale": Part(dtype="float32", shape=(shape[0], *(1 for _ in shape[1:]))),
        }

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        dtype = str(weight.dtype).removeprefix("torch.")
        layout = self.layout(spec, tuple(weight.shape), dtype)
        return Packed(
            spec=_spec(spec.scheme.name, tuple(weight.shape), dtype), parts=by_rows(weight.detach(), layout, _encode)
        )

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        codes, scale = packed.parts["codes"], packed.parts.get("scale")
        step = max(1, tile(out.device, codes.numel()) // max(1, codes[0].numel()))
        for row in range(0, codes.shape[0], step):
            rows = slice(row, row + step)
            values = _values(codes[rows])
            if scale is not None:
                values.mul_(scale if scale.shape[0] == 1 else scale[rows])
            out[rows].copy_(values)

    def by_row(self, packed: Packed) -> bool:
        return True

    def read(self, found: Found, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        _refuse_unknown(found, get)
        key, codes = require(found, "codes", get)
        shape = tuple(codes.shape) if shape is None else shape
        if codes.dtype not in DTYPES.values() or tuple(codes.shape) != shape:
            raise bad(key, f"it is {codes.dtype} {list(codes.shape)}, and the model needs float8 {list(shape)}")
        parts = {"codes": codes}
        if "scale" in found.keys:
            key, scale = require(found, "scale", get)
            ones = (1,) * (len(shape) - 1)
            if scale.numel() == 1:
                wanted = (1, *ones)
            elif tuple(scale.shape) in {shape[:1], (shape[0], 1), (shape[0], *ones)}:
                wanted = (shape[0], *ones)
            else:
                raise bad(
                    key,
                    f"it has shape {list(scale.shape)}, and sdquant knows one scale for the whole weight or one for "
                    f"each of its {shape[0]} rows",
                )
            parts["scale"] = scales(key, scale).reshape(wanted)
        # The file does not say what was encoded; bfloat16 holds every value of float8.
        return Packed(spec=_spec(found.scheme, shape, "bfloat16"), parts=parts)


def _encode(rows: Tensor) -> dict[str, Tensor]:
    wide = rows.float()
    scale = wide.abs().amax(dim=tuple(range(1, wide.ndim)), keepdim=True) / _LARGEST
    scale = torch.where(scale == 0, 1.0, scale)  # a row of zeros; NaN stays, and shows
    codes = (wide / scale).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return {"codes": codes.contiguous(), "scale": scale}


def _values(codes: Tensor) -> Tensor:
    """Float8 codes as float32. On a CPU by table: torch's own conversion takes four times as long there."""
    if codes.device.type != "cpu":
        return codes.float()
    table = _table(codes.dtype)
    return table.index_select(0, codes.view(torch.uint8).reshape(-1).int()).view(codes.shape)


@cache
def _table(dtype: torch.dtype) -> Tensor:
    """The values of all 256 codes of a float8 dtype: float32 [256]."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def _spec(scheme: str, shape: tuple[int, ...], dtype: str) -> PackedSpec:
    return PackedSpec(scheme=scheme, shape=shape, dtype=dtype, details={"packing": "float8"})


def _refuse_unknown(found: Found, get: Callable[[str], Tensor]) -> None:
    for key in found.extra:
        last = key.rpartition(".")[2]
        if last == "comfy_quant":
            _check_comfy(key, get(key))
        elif last in SCALES:
            raise bad(key, f"the file also has {found.keys['scale']!r}, and a weight has one scale")
        elif last not in HINTS and last != MARKER:
            raise bad(key, f"it looks like a scale, and sdquant knows {', '.join('X.' + name for name in SCALES)}")


def _check_comfy(key: str, line: Tensor) -> None:
    """ComfyUI's JSON line of bytes says which format a weight is in; some of the others use float8 tensors too."""
    try:
        claims = jsonline.parse(jsonline.text(bytes(line.to(torch.uint8).flatten()[:4096].tolist())))
    except ValueError as error:
        raise bad(key, f"its JSON cannot be parsed ({error})") from error
    kind = claims.get("format") if isinstance(claims, dict) else None
    if not isinstance(kind, str) or kind not in DTYPES:
        raise bad(key, f"it says the weight is in format {kind!r}, and sdquant reads {', '.join(DTYPES)}")
