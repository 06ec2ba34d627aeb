"""The codec of `uniform`: (code - zero) * scale + shift in float32, then times a factor of the column if there is one.

How other programs' files have the same numbers: `_uniform_layouts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import Packed, PackedLayout, PackedSpec, dtype_name, registry
from ._bnb_codec import bad, require, scales
from ._chunks import row_chunks
from ._comfy_codec import dtype_of
from ._comfy_int4 import SIGNS, ZERO, nibbles
from ._uniform_layouts import BYTES, GROUP_SIZE, HIGH_FIRST, LAYOUT, NIBBLES, PAIRS

if TYPE_CHECKING:
    from ..core import PrequantizedWeight

Get = Callable[[str], Tensor]


class UniformCodec:
    """Parts, where groups are of columns:

    codes: int8 [out, in]; of 4 bits uint8 [out, in / 2], with 8 added, the even column in the low half.
    scale: float32 [out, groups].
    zero: int8 [out, groups], of 4 bits with 8 added; or float32. None if all are zero.
    shift: float32 [out, groups]; most have none. columns: float32 [in], which multiply the columns of the weight.
    """

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        parts, columns = packed.parts, packed.spec.shape[1]
        codes, scale = parts["codes"], parts["scale"]
        four, groups = _is_four(packed.spec.scheme.name), scale.shape[1]
        for rows in row_chunks(codes, columns):
            values = (nibbles(codes[rows]) if four else codes[rows]).float().view(-1, groups, columns // groups)
            zero = parts["zero"][rows].unsqueeze(-1) if "zero" in parts else ZERO if four else None
            values = values if zero is None else values.sub_(zero)
            values = values.mul_(scale[rows].unsqueeze(-1))
            values = values.add_(parts["shift"][rows].unsqueeze(-1)) if "shift" in parts else values
            values = values.flatten(1)
            out[rows].copy_(values * parts["columns"] if "columns" in parts else values)

    def form(self, packed: Packed) -> PackedLayout | None:
        parts, (rows, columns) = packed.parts, packed.spec.shape
        four, zero = _is_four(packed.spec.scheme.name), parts.get("zero")
        if "columns" in parts or (zero is not None and zero.is_floating_point()):
            return None
        return PackedLayout(
            rows=rows,
            columns=columns,
            codes="codes",
            packing="nibbles-low" if four else "int8",
            group=packed.spec.details[GROUP_SIZE],
            scale="scale",
            zero="zero" if zero is not None else ZERO if four else 0,
            zero_packing="int8",
            shift="shift" if "shift" in parts else "",
            added="shift" in parts,
        )

    def read(self, found: PrequantizedWeight, shape: tuple[int, ...] | None, get: Get) -> Packed:
        layout, group = found.details.get(LAYOUT), found.details.get(GROUP_SIZE)
        key, stored = require(found, "codes", get)
        four = _is_four(found.scheme)
        codes = _codes(key, stored, four, layout)
        size = (len(codes), codes.shape[1] * (2 if four else 1))
        shape = size if shape is None else tuple(shape)
        if shape != size:
            raise bad(key, f"it has codes of {list(size)}, but the model needs {list(shape)}")
        if type(group) is not int or group < 1 or shape[1] % group:
            raise bad(found.name, f"its group size is {group!r:.40}, which does not divide its {shape[1]} columns")
        grid = (shape[0], shape[1] // group)
        parts = {"codes": codes, "scale": _scale(*require(found, "scale", get), grid, layout)}
        if "zero" in found.keys:
            parts |= _zero(*require(found, "zero", get), grid, own=layout is None, four=four)
        if "shift" in found.keys:
            parts["shift"] = _grid(*require(found, "shift", get), grid, layout)
        if "columns" in found.keys:
            key, factors = require(found, "columns", get)
            parts["columns"] = scales(key, factors).reshape(-1)
            if parts["columns"].shape != shape[1:]:
                raise bad(key, f"it has {factors.numel()} values, but the weight has {shape[1]} columns")
        spec = PackedSpec(
            scheme=registry.scheme(found.scheme), shape=shape, dtype=dtype_of(found), details={GROUP_SIZE: group}
        )
        return Packed(spec=spec, parts=parts)


def _is_four(scheme: str) -> bool:
    return scheme == "uniform-int4"


def _codes(key: str, stored: Tensor, four: bool, layout: Any) -> Tensor:
    """Return the codes as they are kept here."""
    signed = layout == BYTES or (layout is None and not four)
    known = (torch.int8,) if signed else (torch.int8, torch.uint8) if layout == NIBBLES else (torch.uint8,)
    if stored.dtype not in known or stored.ndim != 2 or not stored.numel():
        raise bad(key, f"it is {dtype_name(stored.dtype)} {list(stored.shape)}, not a matrix of {dtype_name(known[0])}")
    if layout == NIBBLES:
        return stored.view(torch.uint8) ^ SIGNS
    if layout == HIGH_FIRST:
        return stored << 4 | stored >> 4
    if layout == PAIRS:
        flipped = stored ^ SIGNS
        return _packed(torch.stack((flipped & 15, flipped >> 4), dim=1).flatten(0, 1))
    if four and layout == BYTES:
        low, high = (bound.item() for bound in torch.aminmax(stored))
        if low < -ZERO or high >= ZERO:
            raise bad(key, f"it has codes from {low} to {high}, but they are said to have 4 bits")
        return _packed((stored + ZERO).view(torch.uint8))
    return stored


def _packed(codes: Tensor) -> Tensor:
    return codes[:, ::2] | codes[:, 1::2] << 4


def _scale(key: str, stored: Tensor, grid: tuple[int, int], layout: Any) -> Tensor:
    scale = _grid(key, stored, grid, layout)
    if layout != HIGH_FIRST:
        return scale
    if bool((scale == 0).any()):
        raise bad(key, "a scale that codes are divided by is zero")
    # ModelOpt divides by it. Of a group of zeros it is infinite, which `scales` has refused.
    return 1 / scale


def _grid(key: str, stored: Tensor, grid: tuple[int, int], layout: Any) -> Tensor:
    """Return a value for each group: float32 [*grid]."""
    values = scales(key, stored)
    if layout == HIGH_FIRST and values.numel() == grid[0] * grid[1]:
        return values.reshape(grid)
    return _spread(key, values.T.contiguous() if layout == NIBBLES and values.ndim == 2 else values, grid)


def _spread(key: str, values: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return values [*grid] of those that several rows may share."""
    if values.ndim < 2 and values.numel() in (1, grid[0]) and grid[1] == 1:
        values = values.reshape(-1, 1)
    if values.ndim != 2 or not len(values) or values.shape[1] != grid[1] or grid[0] % len(values):
        raise bad(key, f"its shape is {list(values.shape)}, but the weight has {grid[0]} rows of {grid[1]} groups")
    return values.repeat_interleave(grid[0] // len(values), 0).contiguous()


def _zero(key: str, stored: Tensor, grid: tuple[int, int], *, own: bool, four: bool) -> Mapping[str, Tensor]:
    """Return the part of zero points, if there is any but zero."""
    if stored.is_floating_point():
        zero = _spread(key, scales(key, stored), grid)
        zero = zero if own or not four else zero + ZERO
        return {"zero": zero} if own or bool((zero != (ZERO if four else 0)).any()) else {}
    if stored.dtype != torch.int8:
        raise bad(key, f"zero points must be int8 or floats, but these are {dtype_name(stored.dtype)}")
    zero = _spread(key, stored, grid)
    if own:
        return {"zero": zero}
    if not bool(zero.any()):
        return {}
    if not four:
        return {"zero": zero}
    low, high = (bound.item() for bound in torch.aminmax(zero))
    if low < -128 + ZERO or high > 127 - ZERO:
        raise bad(key, f"it has zero points from {low} to {high}, but the codes have 4 bits")
    return {"zero": zero + ZERO}
