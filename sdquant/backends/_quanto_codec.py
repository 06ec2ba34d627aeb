"""Encode with quanto's own functions; decode in plain torch, bit-equal to quanto's `dequantize()`.

quanto computes in the dtype of the scale: codes times scale, rounded, minus shift, rounded again. So does this, also
if the result has another dtype, so that a weight has the same values in either runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core import TensorSpec, code_tables
from ..utils.buffers import empty
from ..utils.chunk_sizes import weights_at_once
from ..utils.tensors import divided
from ._chunks import by_rows
from ._quanto_extension import shift_right
from ._quanto_layout import BITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..core import Packed


def encode(weight: Tensor, scheme: str, group: int | None, layout: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Quantize a float weight to the parts that `quanto.quantize(model); quanto.freeze(model)` would save."""
    with torch.no_grad():
        weight = weight.detach()
        if BITS[scheme] == 8:
            return by_rows(weight, layout, partial(_encode8, scheme=scheme))
        if scheme == "qint3":
            return by_rows(weight.reshape(-1, group or 0), layout, _encode3)
        rows = weight if group is None else weight.reshape(-1, group)
        codes = TensorSpec(dtype="uint8", shape=tuple(rows.shape))
        parts = by_rows(rows, {**layout, "data": codes}, partial(_encode_affine, bits=BITS[scheme]))
        if scheme == "qint4" and group == 128 and weight.ndim == 2 and weight.dtype == torch.bfloat16:
            parts["shift"] = _through_tinygemm(parts["scale"], parts["shift"])
        return {**parts, "data": _planes(parts["data"], layout["data"].shape, BITS[scheme])}


def _encode8(rows: Tensor, scheme: str) -> dict[str, Tensor]:
    from optimum import quanto

    qtype = quanto.qtypes[scheme]
    rows = rows.contiguous()
    if scheme == "qint8" and len(rows) > 1:
        return _encode_int8(rows)
    scale = quanto.AbsmaxOptimizer()(rows, qtype, axis=0)
    quantized = quanto.quantize_weight(rows, qtype, axis=0, scale=scale, optimized=False)
    data = quantized._data if scheme == "qint8" else _zeros_for_nan(quantized._data, scale)
    return {"data": data, "scale": scale}


def _encode_int8(rows: Tensor) -> dict[str, Tensor]:
    """Do quanto's `quantize_symmetric` with absmax scales, step by step in the weight's dtype, with one temporary."""
    scale = rows.abs()
    spare, scale = scale, divided(scale.amax(dim=tuple(range(1, rows.ndim)), keepdim=True), 127)
    torch.div(rows, scale, out=spare)
    spare.round_().clamp_(-128, 127)
    return {"data": spare.to(torch.int8), "scale": scale}


def _encode_affine(rows: Tensor, bits: int) -> dict[str, Tensor]:
    """Quantize to codes of one byte each, in the shape of `rows`, with a scale and a shift per row."""
    from optimum.quanto import MaxOptimizer
    from optimum.quanto.tensor.qtype import qint

    scale, shift = MaxOptimizer()(rows, qint(bits), axis=0)
    codes = torch.ops.quanto.quantize_affine(rows, bits=bits, axis=0, group_size=None, scale=scale, shift=shift)
    return {"data": codes, "scale": scale, "shift": shift}


def _encode3(rows: Tensor) -> dict[str, Tensor]:
    from optimum.quanto import MaxOptimizer
    from optimum.quanto.tensor.qtype import qint

    # `optimize` and not the call: for a single row the call would take the minimum over the wrong dimension.
    scale, shift = MaxOptimizer().optimize(rows, qint(3), 0)
    codes = torch.ops.quanto.quantize_affine(rows, bits=3, axis=0, group_size=None, scale=scale, shift=shift)
    return {"data": pack3(codes), "scale": scale, "shift": shift}


def _planes(codes: Tensor, shape: tuple[int, ...], bits: int) -> Tensor:
    """Pack as quanto does: byte row r holds the rows r, r + R, r + 2R, ... of `codes`, the first in the low bits."""
    packed = empty(shape, torch.uint8, codes.device)
    packed.copy_(codes[: len(packed)])
    for plane in range(1, 8 // bits):
        some = codes[plane * len(packed) : (plane + 1) * len(packed)]
        packed[: len(some)] |= some << (bits * plane)
    return packed


def _through_tinygemm(scale: Tensor, shift: Tensor) -> Tensor:
    """Return the shift after a round trip through TinyGemm's layout, which quanto uses for such weights.

    That layout stores the middle of the range instead, rounded to bfloat16. Ordinary weights lose nothing by it; groups
    whose range is far from symmetric are rounded once more. This is the same arithmetic without the layout, whose
    unpacking multiplies by an identity matrix of [in, in].
    """
    half = 8 * scale
    return half - (-shift + half)


def _zeros_for_nan(data: Tensor, scale: Tensor) -> Tensor:
    """Set the codes of rows of zeros to 0: their scale is 0, and quanto's 0 / 0 is NaN in float8."""
    if bool((scale == 0).any()):
        data = data.float().nan_to_num_(nan=0.0).to(data.dtype)
    return data


def decode_into(packed: Packed, out: Tensor) -> None:
    """Dequantize into `out`, [*shape] of any float dtype, with no temporary larger than a slab if it is contiguous."""
    scale = packed.parts["scale"]
    if not out.is_contiguous():
        fresh = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        decode_into(packed, fresh)
        out.copy_(fresh)
        return
    shift = packed.parts.get("shift")
    group = packed.spec.details.get("group_size")
    rows = out.view(-1, group) if group else out
    for span, codes in _slabs(packed, rows.shape):
        if shift is not None and not shift.is_floating_point():  # quanto's "zeropoint": subtract before scaling
            codes = codes.to(torch.int8) - shift[span].to(torch.int8)
        target = rows[span]
        slab = target if out.dtype == scale.dtype else torch.empty_like(target, dtype=scale.dtype)
        _fill(slab, codes)
        slab.mul_(scale[span] if scale.ndim else scale)
        if shift is not None and shift.is_floating_point():
            slab.sub_(shift[span])
        if slab is not target:
            target.copy_(slab)


def _fill(slab: Tensor, codes: Tensor) -> None:
    """Do `slab.copy_(codes)`, seven times as fast for float8 on a CPU, where torch converts one value at a time."""
    if codes.device.type == "cpu" and codes.is_floating_point():
        index = codes.reshape(-1).view(torch.uint8).to(torch.int32)
        torch.index_select(
            code_tables.float8_values(codes.dtype, slab.dtype, codes.device), 0, index, out=slab.view(-1)
        )
    else:
        slab.copy_(codes)


def _slabs(packed: Packed, shape: torch.Size) -> Iterator[tuple[slice, Tensor]]:
    """Yield the codes of the weight viewed as `shape` (its groups as rows), some rows at a time: (rows, codes)."""
    data = packed.parts["data"]
    bits = BITS[packed.spec.scheme.name]
    step = max(1, weights_at_once(data.device) // max(1, shape[1:].numel()))
    if bits == 8 or bits == 3:
        for start in range(0, len(data), step):
            span = slice(start, min(start + step, len(data)))
            yield span, data[span] if bits == 8 else unpack3(data[span])
        return
    for plane in range(8 // bits):
        first = plane * len(data)
        stop = min(len(data), shape[0] - first)  # the last plane may be short
        for start in range(0, stop, step):
            end = min(start + step, stop)
            yield slice(first + start, first + end), shift_right(data[start:end], bits * plane) & (2**bits - 1)


# Eight 3-bit codes are three bytes, a little-endian number that has code k in its bits 3k to 3k + 2. Unpacking spreads
# that number over the eight bytes of an int64 by halving: 24 bits into two lanes of 12, four of 6, eight of 3. All of
# it is contiguous int64 arithmetic, and the result, seen as bytes, is the codes in their order.
# (shift, mask of the lanes after it) from 24 bits together to 3 bits a byte.
_STEPS = ((20, 0x00000FFF_00000FFF), (10, 0x003F003F_003F003F), (5, 0x07070707_07070707))
_MASK24 = 0xFFFFFF


def pack3(codes: Tensor) -> Tensor:
    """Pack codes of 0 to 7, uint8 [rows, n] with n a multiple of 8, as uint8 [rows, 3 n / 8]."""
    rows, n = codes.shape
    words = codes.contiguous().view(torch.int64)  # [rows, n / 8]
    for (shift, _), mask in zip(reversed(_STEPS), (_STEPS[1][1], _STEPS[0][1], _MASK24), strict=True):
        words = (words | (words >> shift)) & mask
    return words.view(torch.uint8).view(rows, n // 8, 8)[:, :, :3].reshape(rows, n // 8 * 3)


def unpack3(data: Tensor) -> Tensor:
    """Unpack uint8 [rows, 3 n / 8] to uint8 [rows, n]: the inverse of `pack3`."""
    rows, size = data.shape
    wide = data.new_zeros(rows, size // 3, 8)
    wide[:, :, :3] = data.view(rows, size // 3, 3)
    words = wide.view(torch.int64).view(rows, size // 3)
    for shift, mask in _STEPS:
        words = (words | (words << shift)) & mask
    return words.view(torch.uint8).view(rows, size // 3 * 8)
