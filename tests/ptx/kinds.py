"""The types of PTX as numpy's, and operations of small floats and fused ones, which round once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any  # numpy's, of any dtype

DTYPES: dict[str, Any] = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16,
    "s16": np.int16, "f16": np.float16, "bf16": np.uint16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32,
    "f32": np.float32, "f16x2": np.uint32, "bf16x2": np.uint32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
    "f64": np.float64,
}  # fmt: skip


def unsigned(size: int) -> Any:
    """The dtype of unsigned numbers of so many bytes."""
    return np.dtype(f"u{size}")


def size_of(kind: str) -> int:
    """Bytes of a type."""
    return 1 if kind == "pred" else int(np.dtype(DTYPES[kind]).itemsize)


def of_bfloat16(bits: Array) -> Array:
    """The float32 numbers of bfloat16's bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(value: Array) -> Array:
    """The bits of the nearest bfloat16 numbers to float32 or float64 ones, halves to even, rounded once."""
    if value.dtype == np.float64:
        with np.errstate(over="ignore", invalid="ignore"):
            near = value.astype(np.float32)
            value = _to_odd(near, value - near.astype(np.float64), np.int32)
    bits = value.view(np.uint32)
    near = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FFF), near)


def _to_odd(near: Array, rest: Array, bits: Any) -> Array:
    """Of a sum that is rounded to `near` and had `rest` over, the two neighbours' odd one: rounded again, to a type of
    two bits less or more, it is what the exact sum is rounded to."""
    whole = near.view(bits)
    towards_zero = np.where((rest < 0) != (near < 0), whole - 1, whole)
    return np.where((rest != 0) & np.isfinite(near), towards_zero | 1, whole).astype(bits).view(near.dtype)


def fused(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of floats of 32 bits or fewer, as float64 that is rounded to odd."""
    a, b, c = (one.astype(np.float64) for one in (a, b, c))
    with np.errstate(all="ignore"):
        product = a * b  # exact
        total = product + c
        part = total - product
        rest = (product - (total - part)) + (c - part)
    return _to_odd(total, np.where(np.isfinite(rest), rest, 0.0), np.int64)


def of_small(kind: str, operation: Callable[..., Array], raws: list[Array]) -> Array:
    """Apply an operation on exact float64 numbers to 16-bit floats, by their bits, one or two in a register."""
    small = kind.removesuffix("x2")
    if kind != small:
        halves = [of_small(small, operation, [_half(raw, i) for raw in raws]) for i in (0, 1)]
        return halves[0].astype(np.uint32) | (halves[1].astype(np.uint32) << np.uint32(16))
    wide = [of_bfloat16(raw) if small == "bf16" else raw.view(np.float16) for raw in raws]
    exact = operation(*(one.astype(np.float64) for one in wide))
    with np.errstate(over="ignore"):
        return to_bfloat16(exact) if small == "bf16" else exact.astype(np.float16).view(np.uint16)


def _half(raw: Array, i: int) -> Array:
    return (raw >> np.uint32(16 * i)).astype(np.uint16)
