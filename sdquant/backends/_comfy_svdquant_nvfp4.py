"""SVDQuant with 4-bit floats, as Nunchaku has it: NVFP4 of what a low-rank branch leaves of the smoothed weight.

A weight is value * scale * factor * rows / smooth + up down^T. A layer computes the branch as two narrow products
beside that with the codes, and multiplies by the factors of rows behind it (`core.low_rank`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import FACTOR, LowRank, Packed, PackedLayout, PackedSpec, TensorSpec, dtype_name, registry
from ..utils.tensors import divided
from . import _nvfp4_find
from ._bnb_codec import bad, require, scales
from ._chunks import by_rows, row_chunks
from ._comfy_codec import dtype_of
from ._comfy_nvfp4 import Nvfp4, encode_nvfp4
from ._comfy_svdquant import SvdQuant

if TYPE_CHECKING:
    from ..core import PrequantizedWeight

_BLOCK = 16
_BRANCH = ("smooth", "down", "up")
_NAN = 0x7F  # of E4M3, without its sign
_LARGEST = 6 * 448.0  # code times the largest scale
_LEAST_EXPONENT = -24  # of numbers that float16 has


class SvdQuantNvfp4(SvdQuant):
    """Parts: codes, uint8 [out, in / 2], the even column in the low half; scale, float8_e4m3fn or float32
    [out, in / 16]; perhaps rows, [out]; smooth [in]; down [in, rank]; up [out, rank], in a float dtype."""

    group = _BLOCK
    scales = "float8_e4m3fn"
    _residual = Nvfp4()

    def encode_left(
        self, left: Tensor, layout: Mapping[str, TensorSpec]
    ) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        low, high = torch.aminmax(left)
        factor = _power(torch.maximum(-low, high))
        residual = {name: layout[name] for name in ("codes", "scale")}
        return by_rows(left, residual, lambda rows: encode_nvfp4(rows, factor)), {FACTOR: float(factor)}

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        parts, width = packed.parts, packed.spec.shape[1]
        for rows in row_chunks(parts["codes"], width):
            some = {name: parts[name][rows] for name in ("codes", "scale")}
            spec = replace(packed.spec, shape=(len(some["codes"]), width))
            values = torch.empty(spec.shape, dtype=torch.float32, device=out.device)
            self._residual.decode_into(Packed(spec=spec, parts=some), values)
            if "rows" in parts:
                values.mul_(parts["rows"][rows].float().unsqueeze(1))
            if "down" in parts:
                values.div_(parts["smooth"].float()).addmm_(parts["up"][rows].float(), parts["down"].float().T)
            out[rows].copy_(values.view(out[rows].shape))

    def form(self, packed: Packed) -> PackedLayout | None:
        return None if packed.parts.keys() & {"down", "rows"} else self._residual.form(packed)

    def export(self, name: str, packed: Packed) -> dict[str, Tensor]:
        raise NotImplementedError(f"comfy-kitchen has no {packed.spec.scheme}")

    def low_rank(self, packed: Packed) -> LowRank | None:
        if "down" not in packed.parts:
            return None
        rows = "rows" if "rows" in packed.parts else ""
        return LowRank(residual=("codes", "scale"), rows=rows, smooth="smooth", down="down", up="up")

    def read(self, found: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        if _nvfp4_find.has_branch(found):
            return self._of_modelopt(found, shape, get)
        key, codes = require(found, "codes", get)
        if codes.dtype != torch.uint8 or codes.ndim != 2 or not codes.numel():
            raise bad(key, f"it is {dtype_name(codes.dtype)} {list(codes.shape)}, not a matrix of bytes")
        stored = (len(codes), codes.shape[1] * 2)
        shape = stored if shape is None else tuple(shape)
        if shape[:2] != stored or any(size != 1 for size in shape[2:]) or shape[1] % _BLOCK:
            raise bad(key, f"it has 4-bit codes of {list(stored)}, but the model needs {list(shape)}")
        factor = found.details.get(FACTOR)
        if type(factor) is not float or not 0 <= factor < float("inf"):
            raise bad(found.name, f"the factor of its scales is {factor!r}, not a positive number")
        tensors = {part: require(found, part, get) for part in ("scale", *_BRANCH)}
        tensors |= {"rows": require(found, "rows", get)} if "rows" in found.keys else {}
        rank = tensors["down"][1].shape[-1] if tensors["down"][1].ndim else 0
        sizes = {
            "scale": (shape[0], shape[1] // _BLOCK), "smooth": (shape[1],), "down": (shape[1], rank),
            "up": (shape[0], rank), "rows": (shape[0],),
        }  # fmt: skip
        for part, (name, tensor) in tensors.items():
            if tensor.dtype != torch.float8_e4m3fn or part != "scale":
                scales(name, tensor)  # float, and finite
            elif bool((tensor.view(torch.uint8) & _NAN == _NAN).any()):
                raise bad(name, "a scale is not a number")
            if tuple(tensor.shape) != sizes[part]:
                raise bad(name, f"its shape is {list(tensor.shape)}, but {list(sizes[part])} belongs to the weight")
            if part == "smooth" and not bool((tensor > 0).all()):
                raise bad(name, "a factor for smoothing is not positive")
        spec = PackedSpec(
            scheme=registry.scheme(found.scheme), shape=shape, dtype=dtype_of(found), details={FACTOR: factor}
        )
        return Packed(spec=spec, parts={"codes": codes, **{part: tensor for part, (_, tensor) in tensors.items()}})

    def _of_modelopt(
        self, weight: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]
    ) -> Packed:
        """Read (value + B A) * columns, of which A is the part `down` in the file, [rank, in], and B the part `up`. The
        factors here have 16 bits, as in Nunchaku's files: kernels read no others."""
        keys = {part: key for part, key in weight.keys.items() if part not in _BRANCH}
        residual = self._residual.read(replace(weight, keys=keys), shape, get)
        (down_key, down), (up_key, up) = (require(weight, part, get) for part in ("down", "up"))
        dtype = torch.float16 if down.dtype is torch.float16 else torch.bfloat16
        down, up = scales(down_key, down), scales(up_key, up)
        (rows, inputs), rank = residual.spec.shape, len(down)
        if tuple(down.shape) != (rank, inputs) or tuple(up.shape) != (rows, rank):
            raise bad(up_key, f"{list(up.shape)} and {list(down.shape)} are no branch of a weight of {[rows, inputs]}")
        columns = residual.parts.get("columns", torch.ones(inputs, dtype=torch.float32, device=down.device))
        if not bool((columns > 0).all()):
            raise bad(weight.keys["columns"], "a factor for smoothing is not positive")
        parts = {
            "codes": residual.parts["codes"], "scale": residual.parts["scale"],
            "smooth": columns.reciprocal().clamp(max=torch.finfo(dtype).max).to(dtype),
            "down": (down * columns).T.to(dtype).contiguous(), "up": up.to(dtype),
        }  # fmt: skip
        return Packed(spec=residual.spec, parts=parts)


def _power(largest: Tensor) -> Tensor:
    """Return the factor of scales that are at most those of E4M3: float32 []. It is a power of two, which files have in
    16 bits without loss; NaN stays, and shows in the scales."""
    exponent = torch.frexp(divided(largest, _LARGEST)).exponent.clamp(_LEAST_EXPONENT)
    factor = torch.ldexp(torch.ones_like(largest), exponent)
    return torch.where(largest.isfinite(), factor, largest)
