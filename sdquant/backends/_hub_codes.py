"""The hub's integer weights in memory: their codes as integers, their values, and their layout for kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core import PackedLayout, bit_fields
from ..kernels import decode_by_turns
from ._chunks import row_chunks
from ._comfy_int4 import nibbles

if TYPE_CHECKING:
    from ..core import Packed

# Keys in the details of packed weights; see `hub.Hub`.
AXIS, ZERO = "axis", "zero"
_PACKINGS = {2: "twos", 3: "threes", 4: "nibbles-low", 5: "fives", 6: "sixes", 7: "sevens", 8: "uint8"}


def unit(bits: int) -> int:
    """Return how many columns a weight must have a multiple of, so that `packed` fills whole bytes."""
    return {4: 2, 8: 1}.get(bits, 8)


def integers(codes: Tensor, bits: int) -> Tensor:
    """Unpack bytes of codes, uint8 [..., n], of which a row is one number with the first code in the low bits: uint8
    [..., n * 8 / bits]."""
    if bits == 8:
        return codes
    if bits == 4:
        return nibbles(codes)
    values = bit_fields.unpack_units(codes.reshape(-1, bits), bit_fields.stream(bits), torch.uint8)
    return values.view(*codes.shape[:-1], -1)


def packed(values: Tensor, bits: int) -> Tensor:
    """Invert `integers`. The last dimension must be a multiple of `unit`."""
    if bits == 8:
        return values.contiguous()
    if bits == 4:
        return values[..., ::2] | values[..., 1::2] << 4
    units = values.view(*values.shape[:-1], -1, unit(bits)).long()
    numbers = (units << torch.arange(unit(bits), device=values.device) * bits).sum(-1, keepdim=True)
    places = torch.arange(bits, device=values.device) * 8
    return (numbers >> places & 0xFF).to(torch.uint8).flatten(-2)


def decode_into(packed: Packed, out: Tensor) -> None:
    """Dequantize into `out`, [rows, columns]: as `hub.Hub` has it, each operation rounded to float32."""
    parts, bits, columns = packed.parts, int(packed.spec.scheme.bits), packed.spec.shape[1]
    codes, scale, zero, shift, order, factors = (
        parts.get(name) for name in ("codes", "scale", "zero", "shift", "order", "columns")
    )
    assert codes is not None and scale is not None
    middle = _middle(packed)
    if AXIS in packed.spec.details:
        _decode_by_turns(codes, bits, middle, scale.float(), shift, out)
        return
    for rows in row_chunks(codes, columns):
        values = integers(codes[rows], bits).float().view(-1, scale.shape[1], columns // scale.shape[1])
        if zero is None or zero.is_floating_point():
            values.sub_(middle)
        if zero is not None:
            values.sub_(zero[rows].unsqueeze(-1))
        values.mul_(scale[rows].float().unsqueeze(-1))
        values = (values if shift is None else values.sub_(shift[rows].unsqueeze(-1))).flatten(1)
        if order is not None:
            values = torch.empty_like(values).index_copy_(1, order.long(), values)
        out[rows].copy_(values if factors is None else values.mul_(factors))


def _decode_by_turns(codes: Tensor, bits: int, middle: int, scale: Tensor, shift: Tensor | None, out: Tensor) -> None:
    """Dequantize HQQ's axis 0: scales [1, width] of each run of `width` weights, whatever the rows are."""
    width = scale.shape[1]
    runs = codes.reshape(-1, width * bits // 8) if width % unit(bits) == 0 else codes.reshape(1, -1)
    whole = out if out.is_contiguous() else out.new_empty(out.shape)
    each = whole.view(len(runs), -1)
    for some in row_chunks(runs, each.shape[1]):
        part = runs[some] if bits == 4 else integers(runs[some], bits)
        if width == each.shape[1] and decode_by_turns(part, 4 if bits == 4 else 8, middle, scale, shift, each[some]):
            continue
        values = (integers(part, 4) if bits == 4 else part).float().view(-1, width).sub_(middle).mul_(scale)
        each[some].copy_((values if shift is None else values.sub_(shift)).view(-1, each.shape[1]))
    if whole is not out:
        out.copy_(whole)


def form(packed: Packed) -> PackedLayout | None:
    """Return the memory layout; None for zero points that are no integers, and where inputs are gathered or multiplied
    (`core.input_columns`).

    HQQ's axis 0 is one group whose scales are used in turn.
    """
    parts, bits, (rows, columns) = packed.parts, int(packed.spec.scheme.bits), packed.spec.shape
    zero = parts.get("zero")
    width, by_turns = parts["scale"].shape[1], AXIS in packed.spec.details
    if parts.keys() & {"order", "columns"}:
        return None
    if zero is not None and (by_turns or zero.is_floating_point()):
        return None
    return PackedLayout(
        rows=rows,
        columns=columns,
        codes="codes",
        packing=_PACKINGS[bits],
        group=rows * columns if by_turns else columns // width,
        taps=width if by_turns else 1,
        scale="scale",
        zero="zero" if zero is not None else _middle(packed),
        shift="shift" if "shift" in parts else "",
    )


def _middle(packed: Packed) -> int:
    """Return the zero point where there is no part of them, or that from which floats count."""
    zero: int = packed.spec.details.get(ZERO, 1 << int(packed.spec.scheme.bits) - 1)
    return zero
