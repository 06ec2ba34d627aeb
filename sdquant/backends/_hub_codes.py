"""The hub's integer weights in memory: their codes as integers, their values, and their layout for kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core import PackedLayout
from ._chunks import row_chunks
from ._comfy_int4 import nibbles

if TYPE_CHECKING:
    from ..core import Packed

_PACKINGS = {2: "twos", 3: "threes", 4: "nibbles-low", 8: "uint8"}
UNIT = 8  # codes that fill whole bytes whatever their bits


def integers(codes: Tensor, bits: int) -> Tensor:
    """Unpack bytes of codes, uint8 [..., n], of which a row is one number with the first code in the low bits: uint8
    [..., n * 8 / bits]."""
    if bits == 8:
        return codes
    if bits == 4:
        return nibbles(codes)
    units = codes.view(*codes.shape[:-1], -1, bits).long()
    places = torch.arange(bits, device=codes.device) * 8
    values = (units << places).sum(-1, keepdim=True) >> torch.arange(UNIT, device=codes.device) * bits
    return (values & (1 << bits) - 1).to(torch.uint8).flatten(-2)


def packed(values: Tensor, bits: int) -> Tensor:
    """Invert `integers`. The last dimension must be a multiple of UNIT."""
    if bits == 8:
        return values.contiguous()
    units = values.view(*values.shape[:-1], -1, UNIT).long()
    numbers = (units << torch.arange(UNIT, device=values.device) * bits).sum(-1, keepdim=True)
    places = torch.arange(bits, device=values.device) * 8
    return (numbers >> places & 0xFF).to(torch.uint8).flatten(-2)


def decode_into(packed: Packed, out: Tensor) -> None:
    """Dequantize into `out`, [rows, columns]; (code - zero) * scale - shift, each rounded to float32."""
    parts, bits, columns = packed.parts, int(packed.spec.scheme.bits), packed.spec.shape[1]
    codes, scale, zero, shift = (parts.get(name) for name in ("codes", "scale", "zero", "shift"))
    assert codes is not None and scale is not None
    middle = 0 if shift is not None else 1 << bits - 1
    if "axis" in packed.spec.details:
        values = integers(codes, bits).float().view(-1, scale.shape[1]).sub_(middle).mul_(scale.float())
        out.copy_((values if shift is None else values.sub_(shift)).view(packed.spec.shape))
        return
    order = parts.get("order")
    for rows in row_chunks(codes, columns):
        values = integers(codes[rows], bits).float().view(-1, scale.shape[1], columns // scale.shape[1])
        values.sub_(middle if zero is None else zero[rows].unsqueeze(-1)).mul_(scale[rows].float().unsqueeze(-1))
        values = (values if shift is None else values.sub_(shift[rows].unsqueeze(-1))).flatten(1)
        if order is None:
            out[rows].copy_(values)
        else:
            out[rows] = torch.empty_like(values).index_copy_(1, order.long(), values).to(out.dtype)


def form(packed: Packed) -> PackedLayout | None:
    """Return the memory layout; None where groups are not of neighbours in a row."""
    parts, bits, (rows, columns) = packed.parts, int(packed.spec.scheme.bits), packed.spec.shape
    if "axis" in packed.spec.details or "order" in parts:
        return None
    return PackedLayout(
        rows=rows,
        columns=columns,
        codes="codes",
        packing=_PACKINGS[bits],
        group=columns // parts["scale"].shape[1],
        scale="scale",
        zero="zero" if "zero" in parts else 0 if "shift" in parts else 1 << bits - 1,
        shift="shift" if "shift" in parts else "",
    )
