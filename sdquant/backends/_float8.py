"""fp8 as other tools keep it: torch's float8 dtypes in a file, plain or with a scale for each tensor or row.

A scale is always what the codes are multiplied by to get the weight, whatever its name:

* `X.scale_weight`: ComfyUI's first "scaled fp8" files, marked by an empty float8 tensor `scaled_fp8`.
* `X.weight_scale`: diffusers, compressed-tensors, and newer ComfyUI files, which add a JSON line `X.comfy_quant`.
* `X.weight_scale_inv`: DeepSeek and transformers' fine-grained fp8. It is the inverse of the factor used in quantizing:
  DeepSeek's `weight_dequant` and transformers' `_dequantize_fp8_weight` multiply by it.

Their shapes are in `_float8_scales`. `X.input_scale` (`X.scale_input`) is what activations are divided by to become
float8, with a scale for the whole weight or its rows: products in float8 use it (`kernels.fp8_linear`). transformers'
`X.activation_scale` is of blocks, and is not used.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import (
    BYTE_PACKINGS,
    COMPUTE_DTYPES,
    INPUT_SCALE,
    Packed,
    PackedLayout,
    PackedSpec,
    PrequantizedWeight,
    TensorSpec,
    Unfit,
    dtype_name,
    registry,
    usable_scale,
)
from ..utils import strict_json
from ..utils.tensors import divided
from ._bnb_codec import Codec, bad, require
from ._bnb_library import tile
from ._chunks import by_rows
from ._float8_find import FLOAT8, FORMATS, HINTS, INPUT_SCALES, MARKER, SCALES, WHOLE
from ._float8_scales import factors, fitted, rows_of_scales
from ._float8_values import floats_of
from ._hub_modelopt import OF_QUANTIZER

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..core import QuantSpec, Scheme

DTYPES_OF_SCALES = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = {name: getattr(torch, name) for name in FLOAT8}
_LARGEST = 448.0  # of float8_e4m3fn; torch turns what is larger into NaN


class Float8(Codec):
    """The float8 packing of fp8. Parts: codes float8 [out, in...]; scale unless plain. Details may have an input_scale.

    The scale is float32, or uint8 of exponents where details["scale"] is "e8m0": [out or 1, 1...], or, where details
    have a "block" [rows, columns], one for each block of the weight.
    """

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        if dtype not in COMPUTE_DTYPES:
            raise Unfit(f"fp8 can only quantize {', '.join(COMPUTE_DTYPES)}, but the weight is {dtype}")
        return {
            "codes": TensorSpec(dtype="float8_e4m3fn", shape=shape),
            "scale": TensorSpec(dtype="float32", shape=(shape[0], *(1 for _ in shape[1:]))),
        }

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        dtype = dtype_name(weight.dtype)
        layout = self.layout(spec, tuple(weight.shape), dtype)
        return Packed(
            spec=_spec(spec.scheme, tuple(weight.shape), dtype), parts=by_rows(weight.detach(), layout, _encode)
        )

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        codes, scale, block = packed.parts["codes"], packed.parts.get("scale"), packed.spec.details.get("block")
        step = max(1, tile(out.device, codes.numel()) // max(1, math.prod(codes.shape[1:])))
        for row in range(0, codes.shape[0], step):
            rows = slice(row, min(row + step, codes.shape[0]))
            values = floats_of(codes[rows])
            if scale is not None and block is not None:
                values.mul_(rows_of_scales(scale, rows, block, codes.shape[1]))
            elif scale is not None:
                values.mul_(factors(scale if scale.shape[0] == 1 else scale[rows]))
            out[rows].copy_(values)

    def form(self, packed: Packed) -> PackedLayout | None:
        codes, scale = packed.parts["codes"], packed.parts.get("scale")
        packing, block = dtype_name(codes.dtype), packed.spec.details.get("block")
        rows, columns = packed.spec.shape[0], math.prod(packed.spec.shape[1:])
        in_rows = block is None or (block[0] == 1 and columns % block[1] == 0)
        if packing not in BYTE_PACKINGS or not in_rows or (scale is not None and scale.dtype == torch.uint8):
            return None
        group = columns if scale is not None and scale.numel() > 1 else rows * columns
        return PackedLayout(
            rows=rows,
            columns=columns,
            codes="codes",
            packing=packing,
            group=group if block is None else block[1],
            scale="" if scale is None else "scale",
        )

    def by_row(self, packed: Packed) -> bool:
        return bool(packed.spec.details.get("block", (1, 1))[0] == 1)

    def cuttable(self, packed: Packed) -> Packed:
        if self.by_row(packed):
            return packed
        down, across = packed.spec.details["block"]
        scale = packed.parts["scale"].repeat_interleave(down, 0)[: packed.spec.shape[0]].contiguous()
        details = {**packed.spec.details, "block": [1, across]}
        return Packed(spec=replace(packed.spec, details=details), parts={**packed.parts, "scale": scale})

    def read(self, detected: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        _check_marker(detected, get)
        key, codes = require(detected, "codes", get)
        shape = tuple(codes.shape) if shape is None else shape
        if codes.dtype not in DTYPES.values() or tuple(codes.shape) != shape:
            raise bad(key, f"it is {codes.dtype} {list(codes.shape)}, but the model needs float8 {list(shape)}")
        if not codes.numel():
            raise bad(key, f"its shape is {list(shape)}, which has no values")
        parts: dict[str, Tensor] = {"codes": codes}
        details: dict[str, Any] = {"packing": "float8"}
        of_inputs = _input_scale(detected, get)
        if "scale" in detected.keys:
            key, scale = require(detected, "scale", get)
            scale, block = fitted(key, scale, shape, dict(detected.details))
            parts["scale"] = scale
            details |= {"block": list(block)} if block is not None else {}
            details |= {INPUT_SCALE: of_inputs} if block is None and of_inputs is not None else {}
            details |= {"scale": "e8m0"} if scale.dtype == torch.uint8 else {}
        # The file does not say what was encoded; bfloat16 holds every value of float8.
        return Packed(spec=_spec(registry.scheme(detected.scheme), shape, "bfloat16", details), parts=parts)


def _encode(rows: Tensor) -> dict[str, Tensor]:
    wide = rows.float()
    scale = divided(wide.abs().amax(dim=tuple(range(1, wide.ndim)), keepdim=True), _LARGEST)
    scale = torch.where(scale == 0, 1.0, scale)  # a row of zeros; NaN stays, and shows
    codes = (wide / scale).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return {"codes": codes.contiguous(), "scale": scale}


def _spec(scheme: Scheme, shape: tuple[int, ...], dtype: str, details: dict[str, Any] | None = None) -> PackedSpec:
    return PackedSpec(scheme=scheme, shape=shape, dtype=dtype, details=details or {"packing": "float8"})


def _input_scale(detected: PrequantizedWeight, get: Callable[[str], Tensor]) -> float | None:
    """Return the static scale of the layer's activations, from sdquant's own description or a tensor beside."""
    if INPUT_SCALE in detected.details:
        return usable_scale(detected.details[INPUT_SCALE])
    key = next((key for key in detected.extra if key.rpartition(".")[2] in INPUT_SCALES), None)
    tensor = None if key is None else get(key)
    is_one = tensor is not None and tensor.numel() == 1 and tensor.dtype in DTYPES_OF_SCALES
    return usable_scale(tensor.item()) if tensor is not None and is_one else None


def _check_marker(detected: PrequantizedWeight, get: Callable[[str], Tensor]) -> None:
    """Raise BadFileError for a scale that is not known, or a format in ComfyUI's marker that is another one."""
    format_name = detected.details.get("format")
    for key in detected.extra:
        last = key.rpartition(".")[2]
        if last == MARKER:
            marked = _marked(key, get(key))
            if format_name not in (None, marked):
                raise bad(key, f"it says {marked!r}, but the file's metadata says {format_name!r}")
            format_name = marked
        elif last in SCALES:
            raise bad(key, f"the file also has {detected.keys['scale']!r}, but a weight has only one scale")
        elif last not in HINTS and last != WHOLE and not OF_QUANTIZER.fullmatch(key):
            raise bad(key, f"it looks like a scale, but sdquant only knows {', '.join('X.' + name for name in SCALES)}")


def _marked(key: str, line: Tensor) -> str:
    """Parse the format in ComfyUI's JSON line of bytes; some formats that are not read use float8 tensors, too."""
    try:
        claims = strict_json.parse(strict_json.text(bytes(line.to(torch.uint8).flatten()[:4096].tolist())))
    except ValueError as error:
        raise bad(key, f"its JSON cannot be parsed ({error})") from error
    kind = claims.get("format") if isinstance(claims, dict) else None
    if not isinstance(kind, str) or kind not in FORMATS:
        raise bad(key, f"it says that the weight is in format {kind!r}, which is none of {', '.join(FORMATS)}")
    return str(kind)
