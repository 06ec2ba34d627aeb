"""Dequantize GGUF block types in torch: one function per type, in a table.

Every function takes raw blocks [n, bytes per block] uint8 (block layouts: ggml's `ggml-common.h`) and fills `out`
[n, weights per block] float32. The order of the arithmetic is that of gguf-py's reference: results are bit-equal to it.

Codes are unpacked eight at a time, as the bytes of int64 words, because torch's loops over rows of 16 or 32 single
bytes cost more than the arithmetic. fp16 arithmetic is avoided: it is the slow part of other decoders on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core import bit_fields, ggml_iq, gguf_types
from ..utils.chunk_sizes import weights_at_once

if TYPE_CHECKING:
    from collections.abc import Callable

_ONES = 0x0101010101010101  # the lowest bit of each of eight bytes
_TWOS, _NIBBLES = 3 * _ONES, 15 * _ONES
_ONES_OF_32 = 0x01010101


def decode_blocks(kind: str, blocks: Tensor, out: Tensor) -> None:
    """Decode into `out`, a contiguous tensor of blocks' n * weights elements in any float dtype, tile by tile."""
    function, width = DECODERS[kind], gguf_types.TYPES[kind].block
    flat = out.view(-1, width)
    rows = max(1, weights_at_once(out.device) // width)
    tile = None if out.dtype == torch.float32 else flat.new_empty((min(rows, len(flat)), width), dtype=torch.float32)
    for start in range(0, len(flat), rows):
        target = flat[start : start + rows]
        if tile is None:
            function(blocks[start : start + rows], target)
        else:
            part = tile[: len(target)]
            function(blocks[start : start + rows], part)
            target.copy_(part)  # the one rounding


def _words(blocks: Tensor, start: int, stop: int) -> Tensor:
    """Return bytes `start` to `stop` of each block as int64 [n, (stop - start) / 8]."""
    return ggml_iq.contiguous(blocks[:, start:stop]).view(torch.int64)


def _shifted(words: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Shift each byte of words [n, a, w] right, then mask it, for each shift: [n, a, len(shifts), w]."""
    return bit_fields.split(words, shifts, mask, 2)


def _codes(words: Tensor, out: Tensor, zero: int = 0) -> None:
    """Write the bytes of `words`, less `zero`, as floats to `out`."""
    codes = words.reshape(len(out), -1).view(torch.int8)
    if zero and bit_fields.launches(out.device):
        torch.sub(codes, zero, out=out)  # which is several times slower on a CPU
    else:
        out.copy_(codes)
        if zero:
            out.sub_(zero)


def _nibbles(blocks: Tensor, start: int) -> Tensor:
    """Unpack 16 bytes to 32 4-bit codes as [n, 4] words: the low halves come first."""
    words = _words(blocks, start, start + 16)
    return bit_fields.split(words, (0, 4), _NIBBLES, 1).flatten(1)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Spread 4 bytes, one bit per code, to [n, 4] words with bit 4 of each byte set accordingly."""
    # A byte times this constant puts a copy of it into every byte of the word; AND keeps bit i in byte i.
    spread = blocks[:, start : start + 4].to(torch.int64) * _ONES
    bits = spread & -0x7FBFDFEFF7FBFDFF  # 0x8040201008040201 as a signed number
    # Any set bit to bit 4: add 0x7f to carry into bit 7, except bit 7 itself; then move bit 7 down.
    carried = ((bits & (0x7F * _ONES)) + 0x7F * _ONES) | bits
    return (carried >> 3) & (0x10 * _ONES)


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(ggml_iq.half(blocks, 0))


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _codes(_nibbles(blocks, 2), out, 8)
    out.mul_(ggml_iq.half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    _codes(_nibbles(blocks, 4), out)
    _scaled_up(blocks, out)


def _scaled_up(blocks: Tensor, out: Tensor) -> None:
    both = ggml_iq.half(blocks, 0, 2)
    out.mul_(both[:, :1]).add_(both[:, 1:])


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    _codes(_nibbles(blocks, 6) | _fifth_bits(blocks, 2), out, 16)
    out.mul_(ggml_iq.half(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    _codes(_nibbles(blocks, 8) | _fifth_bits(blocks, 4), out)
    _scaled_up(blocks, out)


def _scaled(out: Tensor, groups: int, scale: Tensor, minimum: Tensor | None = None) -> None:
    """Compute out = out * scale - minimum in place, with one of each per group: [n, groups]."""
    view = out.view(len(out), groups, -1)
    view.mul_(scale.unsqueeze(2))
    if minimum is not None:
        view.sub_(minimum.unsqueeze(2))


def _q2_k(blocks: Tensor, out: Tensor) -> None:
    scales = ggml_iq.half(blocks, 80, 2).unsqueeze(2) * bit_fields.split(blocks[:, :16], (0, 4), 15, 1)
    codes = _shifted(_words(blocks, 16, 80).view(-1, 2, 4), (0, 2, 4, 6), _TWOS)
    _codes(codes, out)
    _scaled(out, 16, *scales.unbind(1))


def _q3_k(blocks: Tensor, out: Tensor) -> None:
    words = _words(blocks, 0, 96).view(-1, 3, 4)
    low = _shifted(words[:, 1:], (0, 2, 4, 6), _TWOS).view(-1, 8, 4)
    high = _shifted(words[:, :1], tuple(range(8)), _ONES).view(-1, 8, 4)
    _codes(low | (high << 2), out, 4)  # a set high bit means no offset
    # 16 scales of 6 bits: low halves in 8 bytes, the first 8 scales in the low nibbles; high 2 bits in 4 bytes.
    four, two = blocks[:, 96:104], blocks[:, 104:108]
    low, high = bit_fields.split(four, (0, 4), 15, 1), bit_fields.split(two, (0, 2, 4, 6), 3, 1)
    scales = low.flatten(1) | high.flatten(1) << 4
    _scaled(out, 16, ggml_iq.half(blocks, 108) * (scales.view(torch.int8) - 32))


def _six_bits(blocks: Tensor) -> Tensor:
    """Unpack scales and minimums of Q4_K and Q5_K, uint8 [n, 2, 8], from the 12 bytes at 4: 6 bits in the first four of
    each kind, 4 bits in the last four, whose upper 2 bits are the upper bits of the first four's bytes."""
    words = blocks.view(torch.int32)
    upper, both = words[:, 1:3], words[:, 3:4]
    last = bit_fields.split(both, (0, 4), 15 * _ONES_OF_32, 1).flatten(1) | (upper >> 2 & 48 * _ONES_OF_32)
    return torch.stack((upper & 63 * _ONES_OF_32, last), dim=2).view(torch.uint8)


def _scaled_8(blocks: Tensor, out: Tensor) -> None:
    halves = blocks.view(torch.float16)[:, :2].float()
    _scaled(out, 8, *(halves.unsqueeze(2) * _six_bits(blocks)).unbind(1))


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    blocks = ggml_iq.contiguous(blocks)
    _codes(_shifted(blocks.view(torch.int64)[:, 2:].view(-1, 4, 4), (0, 4), _NIBBLES), out)
    _scaled_8(blocks, out)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    blocks = ggml_iq.contiguous(blocks)
    words = blocks.view(torch.int64)[:, 2:].view(-1, 5, 4)
    low = _shifted(words[:, 1:], (0, 4), _NIBBLES).view(-1, 8, 4)
    high = _shifted(words[:, :1], tuple(range(8)), _ONES).view(-1, 8, 4)
    _codes(low | (high << 4), out)
    _scaled_8(blocks, out)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    words = _words(blocks, 0, 192)
    low = _shifted(words[:, :16].view(-1, 2, 8), (0, 4), _NIBBLES).view(-1, 32)
    high = _shifted(words[:, 16:].view(-1, 2, 4), (0, 2, 4, 6), _TWOS).view(-1, 32)
    _codes(low | (high << 4), out, 32)
    _scaled(out, 16, ggml_iq.half(blocks, 208) * blocks[:, 192:208].view(torch.int8))


# Type name to its function.
DECODERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "q8_0": _q8_0, "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1,
    "q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
    **ggml_iq.IQ_DECODERS,
}  # fmt: skip
