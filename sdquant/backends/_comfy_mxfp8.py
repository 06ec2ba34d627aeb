"""MXFP8: 8-bit floats (E4M3), and a power of two as scale of 32 weights (OCP Microscaling formats 1.0).

ComfyUI's files have rows and columns padded to 32, and scales in tiles (`_blocked_scales`). What is made has the codes
and scales that comfy-kitchen's `TensorCoreMXFP8Layout` makes of the weight, whose scales are rounded up. Exponent 0
stands for a block of zeros there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import Packed, PackedLayout, PackedSpec, TensorSpec, dtype_name, dtype_named, leaf, registry
from ..kernels import block_floats
from ._blocked_scales import untiled
from ._bnb_codec import bad, require
from ._chunks import by_rows, row_chunks
from ._comfy_codec import ComfyCodec, dtype_of, marker, require_matrix
from ._comfy_find import LOW_FIRST, TILED
from ._float8_values import floats_of

if TYPE_CHECKING:
    from ..core import PrequantizedWeight, QuantSpec

_BLOCK = 32
_NAN = 255  # of E8M0
_SCALE = "float8_e8m0fnu"


class Mxfp8(ComfyCodec):
    """Parts: codes, float8_e4m3fn [out, in]; scale, float8_e8m0fnu [out, in / 32, rounded up]."""

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        require_matrix(shape, dtype)
        return {
            "codes": TensorSpec(dtype="float8_e4m3fn", shape=shape),
            "scale": TensorSpec(dtype=_SCALE, shape=(shape[0], math.ceil(shape[1] / _BLOCK))),
        }

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        shape, dtype = tuple(weight.shape), dtype_name(weight.dtype)
        parts = by_rows(weight.detach(), self.layout(spec, shape, dtype), _encode)
        return Packed(spec=PackedSpec(scheme=spec.scheme, shape=shape, dtype=dtype), parts=parts)

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        codes, scale = packed.parts["codes"], packed.parts["scale"]
        for rows in row_chunks(codes, codes.shape[1]):
            factors = floats_of(scale[rows]).repeat_interleave(_BLOCK, 1)[:, : codes.shape[1]]
            out[rows].copy_(floats_of(codes[rows]) * factors)

    def form(self, packed: Packed) -> PackedLayout | None:
        rows, columns = packed.spec.shape
        if columns % _BLOCK:
            return None
        return PackedLayout(
            rows=rows, columns=columns, codes="codes", packing="float8_e4m3fn", group=_BLOCK, scale="scale"
        )

    def export(self, name: str, packed: Packed) -> dict[str, Tensor]:
        codes, (rows, columns) = packed.parts["codes"].view(torch.uint8), packed.spec.shape
        padded = F.pad(codes, (0, -columns % _BLOCK, 0, -rows % _BLOCK))
        return {
            name: padded.view(torch.float8_e4m3fn),
            leaf(name, "weight_scale"): block_floats.tiled(packed.parts["scale"]),  # bytes, as ComfyUI wants them
            **marker(name, packed.spec),
        }

    def read(self, found: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        in_tiles = found.details.get(TILED, False)
        key, codes = require(found, "codes", get)
        stored = tuple(codes.shape)
        shape = tuple(shape) if shape is not None else found.shape or stored
        sizes = {shape, tuple(math.ceil(n / _BLOCK) * _BLOCK for n in shape)} if in_tiles else {shape}
        if codes.dtype != torch.float8_e4m3fn or len(shape) != 2 or stored not in sizes or not codes.numel():
            raise bad(
                key, f"it is {dtype_name(codes.dtype)} {list(stored)}, but {list(shape)} in float8_e4m3fn is needed"
            )
        rows, blocks = shape[0], math.ceil(shape[1] / _BLOCK)
        key, scale = require(found, "scale", get)
        if dtype_name(scale.dtype) not in (_SCALE, "uint8"):
            raise bad(key, f"scales must be exponents of one byte (E8M0), but these are {dtype_name(scale.dtype)}")
        if in_tiles:
            scale = untiled(key, scale, (rows, blocks))
        elif tuple(scale.shape) != (rows, blocks):
            raise bad(key, f"its shape is {list(scale.shape)}, but a weight of {list(shape)} has {rows} x {blocks}")
        exponents = scale.contiguous().view(torch.uint8)
        if bool((exponents == _NAN).any()):
            raise bad(key, "a scale is not a number")
        codes = codes[:rows, : shape[1]].contiguous()
        if in_tiles and LOW_FIRST not in found.details:
            codes = _without_zeros(codes, exponents)
        spec = PackedSpec(scheme=registry.scheme(found.scheme), shape=shape, dtype=dtype_of(found))
        return Packed(spec=spec, parts={"codes": codes, "scale": exponents.view(dtype_named(_SCALE))})


def _encode(rows: Tensor) -> dict[str, Tensor]:
    codes, scale = block_floats.mxfp8(rows)
    return {"codes": codes, "scale": scale}


def _without_zeros(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return the codes with zeros in blocks of exponent 0, which stands for zeros in ComfyUI's files."""
    zero = exponents == 0
    if not bool(zero.any()):
        return codes
    of_columns = zero.repeat_interleave(_BLOCK, 1)[:, : codes.shape[1]]
    return codes.view(torch.uint8).masked_fill(of_columns, 0).view(codes.dtype)
