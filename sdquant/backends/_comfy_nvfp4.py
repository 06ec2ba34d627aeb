"""NVFP4: 4-bit floats (E2M1), an 8-bit float as scale of 16 weights, and one factor of all scales.

A weight is value * (scale * factor), each product rounded to float32. Two orders of the same numbers are around. In
memory here they are the same, with the even column in the low half of a byte:

* ComfyUI's, of comfy-kitchen's `TensorCoreNVFP4Layout`: the even column in the high half, scales in tiles
  (`_blocked_scales`), rows and columns padded to 16. `X.comfy_quant` names the format.
* ModelOpt's, Black Forest Labs', compressed-tensors' and torchao's, which diffusers reads: scales in the order of the
  weight; torchao's may also be in tiles. That of compressed-tensors has the factor's inverse.

What is made has the codes and scales that comfy-kitchen makes of the weight in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import FACTOR, Packed, PackedLayout, PackedSpec, TensorSpec, code_tables, dtype_name, leaf, registry
from ..kernels import block_floats
from ..utils.device_constants import constant
from ._blocked_scales import untiled
from ._bnb_codec import bad, require, scales
from ._chunks import by_rows, row_chunks
from ._comfy_codec import ComfyCodec, dtype_of, marker, require_matrix
from ._comfy_find import INVERSE, LOW_FIRST, TILED
from ._float8_values import floats_of

if TYPE_CHECKING:
    from ..core import PrequantizedWeight, QuantSpec

_BLOCK = 16
_NAN = 0x7F  # of E4M3, without its sign


class Nvfp4(ComfyCodec):
    """Parts, where blocks are the columns of a row in sixteens, the last one filled up with zeros:

    codes: uint8 [out, 8 * blocks], the even column in the low half.
    scale: float8_e4m3fn [out, blocks].
    columns: float32 [in], which multiply the columns of the weight (`pre_quant_scale` of a file); most have none.
    """

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        require_matrix(shape, dtype)
        blocks = math.ceil(shape[1] / _BLOCK)
        return {
            "codes": TensorSpec(dtype="uint8", shape=(shape[0], blocks * _BLOCK // 2)),
            "scale": TensorSpec(dtype="float8_e4m3fn", shape=(shape[0], blocks)),
        }

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        shape, dtype, weight = tuple(weight.shape), dtype_name(weight.dtype), weight.detach()
        layout = self.layout(spec, shape, dtype)
        low, high = torch.aminmax(weight)
        factor = block_floats.factor_of(torch.maximum(-low, high))
        parts = by_rows(weight, layout, lambda rows: encode_nvfp4(rows, factor))
        details = {FACTOR: factor.item()}  # float32, which a Python float holds exactly
        return Packed(spec=PackedSpec(scheme=spec.scheme, shape=shape, dtype=dtype, details=details), parts=parts)

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        codes, scale, columns = packed.parts["codes"], packed.parts["scale"], packed.parts.get("columns")
        pairs, width = _pairs(codes.device), packed.spec.shape[1]
        for rows in row_chunks(codes, width):
            values = pairs.index_select(0, codes[rows].reshape(-1).int()).view(-1, scale.shape[1], _BLOCK)
            steps = floats_of(scale[rows]) if scale.itemsize == 1 else scale[rows].float()
            values.mul_(steps.mul(packed.spec.details[FACTOR]).unsqueeze(-1))
            values = values.view(-1, scale.shape[1] * _BLOCK)[:, :width]
            out[rows].copy_(values if columns is None else values * columns)

    def form(self, packed: Packed) -> PackedLayout | None:
        rows, columns = packed.spec.shape
        if columns % _BLOCK or "columns" in packed.parts:
            return None
        return PackedLayout(
            rows=rows,
            columns=columns,
            codes="codes",
            packing="nibbles-low",
            group=_BLOCK,
            table="e2m1",
            scale="scale",
            factor=packed.spec.details[FACTOR],
        )

    def by_row(self, packed: Packed) -> bool:
        return "columns" not in packed.parts

    def export(self, name: str, packed: Packed) -> dict[str, Tensor]:
        codes, scale = packed.parts["codes"], packed.parts["scale"]
        factor = packed.spec.details.get(FACTOR, 1.0)
        return {
            name: F.pad(_swapped(codes), (0, 0, 0, -len(codes) % _BLOCK)),
            leaf(name, "weight_scale"): block_floats.tiled(scale).view(torch.float8_e4m3fn),
            leaf(name, "weight_scale_2"): torch.tensor(factor, dtype=torch.float32, device="cpu"),
            **marker(name, packed.spec),
        }

    def read(self, found: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        in_tiles = found.details.get(TILED, False)
        key, codes = require(found, "codes", get)
        if codes.dtype != torch.uint8 or codes.ndim != 2 or not codes.numel():
            raise bad(key, f"it is {dtype_name(codes.dtype)} {list(codes.shape)}, not a matrix of uint8")
        stored = (len(codes), codes.shape[1] * 2)
        shape = tuple(shape) if shape is not None else found.shape or stored
        rows = {shape[0], math.ceil(shape[0] / _BLOCK) * _BLOCK} if in_tiles else {shape[0]}
        blocks = math.ceil(shape[-1] / _BLOCK)
        if len(shape) != 2 or stored[0] not in rows or stored[1] != blocks * _BLOCK:
            raise bad(key, f"it has 4-bit codes of {list(stored)}, but the model needs {list(shape)}")
        key, scale = require(found, "scale", get)
        if scale.dtype not in (torch.float8_e4m3fn, torch.uint8):
            raise bad(key, f"scales must be 8-bit floats (E4M3), but these are {dtype_name(scale.dtype)}")
        if in_tiles:
            scale = untiled(key, scale, (stored[0], blocks))[: shape[0]]
        elif tuple(scale.shape) != (shape[0], blocks):
            raise bad(key, f"its shape is {list(scale.shape)}, but a weight of {list(shape)} has {shape[0]} x {blocks}")
        scale = scale.contiguous().view(torch.float8_e4m3fn)
        if bool((scale.view(torch.uint8) & _NAN == _NAN).any()):
            raise bad(key, "a scale is not a number")
        parts = {
            "codes": _swapped(codes[: shape[0]]) if in_tiles and LOW_FIRST not in found.details else codes[: shape[0]],
            "scale": scale,
        }
        if "columns" in found.keys:
            key, columns = require(found, "columns", get)
            parts["columns"] = scales(key, columns).reshape(-1)
            if parts["columns"].shape != shape[1:]:
                raise bad(key, f"it has {columns.numel()} values, but the weight has {shape[1]} columns")
        spec = PackedSpec(
            scheme=registry.scheme(found.scheme),
            shape=shape,
            dtype=dtype_of(found),
            details={FACTOR: _factor(found, get)},
        )
        return Packed(spec=spec, parts=parts)


def encode_nvfp4(rows: Tensor, factor: Tensor) -> dict[str, Tensor]:
    """Return codes and scale of some rows, with the factor of the whole weight: float32 []."""
    codes, scale = block_floats.nvfp4(rows, factor)
    return {"codes": codes, "scale": scale}


@constant
def _pairs(device: torch.device) -> Tensor:
    """Return the two values of each byte, of the low half first: float32 [256, 2]."""
    table, codes = code_tables.code_table("e2m1", "float32", torch.device("cpu")), torch.arange(256, device="cpu")
    return torch.stack((table[codes & 15], table[codes >> 4]), dim=1).to(device)


def _swapped(codes: Tensor) -> Tensor:
    """Return the codes with the halves of each byte exchanged."""
    return codes << 4 | codes >> 4


def _factor(found: PrequantizedWeight, get: Callable[[str], Tensor]) -> float:
    if "factor" not in found.keys:
        factor = found.details.get(FACTOR)
        if type(factor) is not float or not 0 <= factor < math.inf:
            raise bad(found.name, f"the factor of its scales is {factor!r}, not a positive number")
        return factor
    key, tensor = require(found, "factor", get)
    value = scales(key, tensor)
    inverse = found.details.get(INVERSE, False)
    if value.numel() != 1 or value.item() < 0 or (inverse and not value.item()):
        raise bad(key, f"it must be one positive number, but it is {list(value.shape)}")
    return float((value.reciprocal() if inverse else value).item())
