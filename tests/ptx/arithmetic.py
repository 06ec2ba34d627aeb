"""Instructions from numbers to a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .kinds import DTYPES, Array, fused, of_bfloat16, of_small, size_of, to_bfloat16
from .program import Instruction, Register, Unsupported

if TYPE_CHECKING:
    from .machine import Machine, Operation

SMALL = ("bf16", "bf16x2", "f16", "f16x2")
WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64", "u64": "u64", "s64": "s64"}
APPROXIMATE = ("approx", "full")  # rounded here, which is one of the numbers that a card may give


def _simple(operation: Callable[..., Array]) -> Operation:
    """An operation on all operands after the first, of one type."""

    def run(machine: Machine, of: Instruction) -> None:
        kind = of.kinds[-1]
        if "sat" in of.parts:
            raise Unsupported(of.text)
        if kind in SMALL:
            raws = [machine.get(one, "b32" if kind.endswith("x2") else "b16") for one in of.operands[1:]]
            machine.put(of.operands[0], of_small(kind, operation, raws))
            return
        values = [_flushed(machine.get(one, kind), of) for one in of.operands[1:]]
        machine.put(of.operands[0], _flushed(operation(*values).astype(DTYPES[kind]), of))

    return run


def _flushed(value: Array, of: Instruction) -> Array:
    """Without numbers below the least exponent, where the instruction leaves them out."""
    if "ftz" not in of.parts or value.dtype != np.float32:
        return value
    return np.where(np.abs(value) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), value), value)


def _multiply(machine: Machine, of: Instruction) -> None:
    kind = of.kinds[-1]
    if kind in (*SMALL, "f32", "f64"):
        _simple(np.multiply)(machine, of)
    else:
        machine.put(of.operands[0], _product(machine, of))


def _multiply_and_add(machine: Machine, of: Instruction) -> None:
    kind = WIDE[of.kind] if "wide" in of.parts else of.kind
    machine.put(of.operands[0], _product(machine, of) + machine.get(of.operands[3], kind))


def _product(machine: Machine, of: Instruction) -> Array:
    kind = of.kind
    a, b = (machine.get(one, kind) for one in of.operands[1:3])
    if "lo" in of.parts:
        return a * b
    wide = DTYPES[WIDE[kind]]
    if size_of(kind) == 8:
        raise Unsupported(of.text)
    whole = a.astype(wide) * b.astype(wide)
    return whole if "wide" in of.parts else (whole >> wide(8 * size_of(kind))).astype(DTYPES[kind])


def _fused(machine: Machine, of: Instruction) -> None:
    kind = of.kinds[-1]
    if kind in SMALL:
        _simple(fused)(machine, of)
    elif kind == "f32":
        a, b, c = (_flushed(machine.get(one, kind), of) for one in of.operands[1:4])
        machine.put(of.operands[0], _flushed(fused(a, b, c).astype(np.float32), of))
    else:
        raise Unsupported(of.text)


def _divide(machine: Machine, of: Instruction) -> None:
    kind = of.kinds[-1]
    if kind.startswith("f"):
        _simple(np.divide)(machine, of)
        return
    a, b = (machine.get(one, kind).astype(np.int64) for one in of.operands[1:3])
    machine.put(of.operands[0], _whole_parts(a, b).astype(DTYPES[kind]))


def _remainder(machine: Machine, of: Instruction) -> None:
    a, b = (machine.get(one, of.kind).astype(np.int64) for one in of.operands[1:3])
    machine.put(of.operands[0], (a - _whole_parts(a, b) * b).astype(DTYPES[of.kind]))


def _whole_parts(a: Array, b: Array) -> Array:
    """a / b towards zero. By zero anything is right: a card does not fault, and what masks leave out may divide so."""
    by = np.where(b == 0, 1, b)
    return np.abs(a) // np.abs(by) * np.where((a < 0) != (by < 0), -1, 1)


def _extreme(of_numbers: Callable[..., Array], with_nan: Callable[..., Array]) -> Operation:
    def run(machine: Machine, of: Instruction) -> None:
        floats = of.kinds[-1].startswith(("f", "bf"))
        _simple(of_numbers if floats and "NaN" not in of.parts else with_nan)(machine, of)

    return run


def _bits(operation: Callable[..., Array]) -> Operation:
    def run(machine: Machine, of: Instruction) -> None:
        machine.put(of.operands[0], operation(*(machine.get(one, of.kind) for one in of.operands[1:])))

    return run


def _shift(machine: Machine, of: Instruction) -> None:
    """By all bits and more nothing is left, or the sign."""
    value, by = machine.get(of.operands[1], of.kind), machine.get(of.operands[2], "u32")
    bits = 8 * value.dtype.itemsize
    if of.name == "shl":
        made = np.where(by < bits, value << np.minimum(by, bits - 1).astype(value.dtype), 0)
    elif value.dtype.kind == "i":
        made = value >> np.minimum(by, bits - 1).astype(value.dtype)
    else:
        made = np.where(by < bits, value >> np.minimum(by, bits - 1).astype(value.dtype), 0)
    machine.put(of.operands[0], made.astype(value.dtype))


def _funnel(machine: Machine, of: Instruction) -> None:
    low, high, by = (machine.get(one, "u32").astype(np.uint64) for one in of.operands[1:4])
    by = by & np.uint64(31) if "wrap" in of.parts else np.minimum(by, np.uint64(32))
    both = (high << np.uint64(32)) | low
    made = both >> by if "r" in of.parts else (both << by) >> np.uint64(32)
    machine.put(of.operands[0], (made & np.uint64(0xFFFFFFFF)).astype(np.uint32))


def _extract(machine: Machine, of: Instruction) -> None:
    """A field of bits, with its sign if it has one."""
    value = machine.get(of.operands[1], of.kind)
    start, size = (machine.get(one, "u32").astype(np.int64) & 255 for one in of.operands[2:4])
    if value.dtype.itemsize != 4:
        raise Unsupported(of.text)
    field = (value.view(np.uint32).astype(np.int64) >> np.minimum(start, 32)) & ((1 << np.minimum(size, 32)) - 1)
    if value.dtype.kind == "i":
        last = np.minimum(start + size - 1, 31)
        sign = (value.view(np.uint32).astype(np.int64) >> np.maximum(last, 0)) & 1
        field = np.where(size == 0, 0, field - (sign << np.clip(last - start + 1, 0, 32)))
        field = np.where(start > 31, -sign, field)
    machine.put(of.operands[0], field.astype(value.dtype))


def _insert(machine: Machine, of: Instruction) -> None:
    a, b = (machine.get(one, "u32").astype(np.int64) for one in of.operands[1:3])
    start, size = (np.minimum(machine.get(one, "u32").astype(np.int64) & 255, 32) for one in of.operands[3:5])
    field = ((1 << size) - 1) << start
    machine.put(of.operands[0], (((b & ~field) | ((a << start) & field)) & 0xFFFFFFFF).astype(np.uint32))


def _permute(machine: Machine, of: Instruction) -> None:
    """Four bytes of eight, each named by a half byte, whose upper bit asks for its sign alone."""
    if len(of.kinds) != 1 or of.parts != ("b32",):
        raise Unsupported(of.text)
    a, b, chosen = (machine.get(one, "u32").astype(np.uint64) for one in of.operands[1:4])
    both, made = a | (b << np.uint64(32)), np.uint64(0)
    for i in range(4):
        pick = (chosen >> np.uint64(4 * i)) & np.uint64(15)
        byte = (both >> ((pick & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        byte = np.where(pick & np.uint64(8), np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0)), byte)
        made = made | (byte << np.uint64(8 * i))
    machine.put(of.operands[0], np.asarray(made).astype(np.uint32))


def _logic(machine: Machine, of: Instruction) -> None:
    """Any function of three bits, by its table."""
    a, b, c = (machine.get(one, "u32") for one in of.operands[1:4])
    table, made = int(machine.get(of.operands[4], "u32")), np.uint32(0)
    for i in range(8):
        if table >> i & 1:
            made = made | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
    machine.put(of.operands[0], np.asarray(made))


# With NaN the first six are false, those that end in u are true.
COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    "ne": lambda a, b: (a != b) & (a == a) & (b == b),
    "equ": lambda a, b: (a == b) | (a != a) | (b != b), "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b), "nan": lambda a, b: (a != a) | (b != b),
}  # fmt: skip
TOGETHER = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _compare(machine: Machine, of: Instruction) -> None:
    kind = of.kinds[-1]
    a, b = (machine.get(one, kind) for one in of.operands[1:3])
    if kind == "bf16":
        a, b = of_bfloat16(a), of_bfloat16(b)
    elif kind.endswith("x2"):
        raise Unsupported(of.text)
    made = COMPARISONS[of.parts[0]](a, b)
    if len(of.operands) > 3:
        other = of.operands[3]
        negated = isinstance(other, str) and other.startswith("!")
        value = machine.get(Register(other[1:]) if negated else other, "pred")  # type: ignore[index]
        made = TOGETHER[of.parts[1]](made, value != negated)
    machine.put(of.operands[0], made)


def _select(machine: Machine, of: Instruction) -> None:
    a, b = (machine.get(one, of.kind) for one in of.operands[1:3])
    machine.put(of.operands[0], np.where(machine.get(of.operands[3], "pred"), a, b))


WHOLE = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}


def _convert(machine: Machine, of: Instruction) -> None:
    to, source = of.kinds
    if to.endswith("x2"):
        high, low = (machine.get(one, "f32") for one in of.operands[1:])
        bits = (_of_float(one, to.removesuffix("x2")).astype(np.uint32) for one in (high, low))
        machine.put(of.operands[0], (next(bits) << np.uint32(16)) | next(bits))
        return
    value = machine.get(of.operands[1], source)
    if source == "bf16":
        value = of_bfloat16(value)
    if "relu" in of.parts:
        raise Unsupported(of.text)
    if to in ("bf16", "f16", "f32", "f64"):
        rounding = next((part for part in of.parts if part in WHOLE), None)
        value = value if rounding is None else WHOLE[rounding](value)
        if value.dtype.kind in "iu" and to in ("bf16", "f16"):
            value = value.astype(np.float64)
        machine.put(of.operands[0], _of_float(value, to))
    elif value.dtype.kind == "f":
        whole = WHOLE[next((part for part in of.parts if part in WHOLE), "rzi")](value.astype(np.float64))
        machine.put(of.operands[0], _within(np.where(np.isnan(whole), 0.0, whole), to))
    elif "sat" in of.parts:
        limits = np.iinfo(DTYPES[to])
        machine.put(of.operands[0], np.clip(value.astype(np.int64), limits.min, limits.max).astype(DTYPES[to]))
    else:
        machine.put(of.operands[0], value.astype(DTYPES[to]))


def _of_float(value: Array, to: str) -> Array:
    """Numbers rounded to a float type, bits for bfloat16."""
    if to == "bf16":
        return to_bfloat16(value if value.dtype == np.float64 else value.astype(np.float32))
    made = value.astype(DTYPES[to])
    return made.view(np.uint16) if to == "f16" else made


def _within(whole: Array, to: str) -> Array:
    limits = np.iinfo(DTYPES[to])
    if limits.bits < 64:
        return np.clip(whole, limits.min, limits.max).astype(DTYPES[to])
    made = np.where(np.abs(whole) < 2.0**62, whole, 0.0).astype(np.int64)
    if (np.abs(whole) >= 2.0**62).any():
        raise Unsupported("a conversion of a float beyond 62 bits")
    return made.view(DTYPES[to])


def _count_bits(machine: Machine, of: Instruction) -> None:
    value = machine.get(of.operands[1], of.kind)
    bits = np.unpackbits(np.atleast_1d(np.ascontiguousarray(value)).view(np.uint8)).reshape(-1, 8 * size_of(of.kind))
    machine.put(of.operands[0], bits.sum(1).astype(np.uint32))


def _absolute(value: Array) -> Array:
    return np.abs(value)


def _sqrt(value: Array) -> Array:
    return np.sqrt(value)


OPERATIONS: dict[str, Operation] = {
    "add": _simple(np.add), "sub": _simple(np.subtract), "mul": _multiply, "mad": _multiply_and_add, "fma": _fused,
    "div": _divide, "rem": _remainder, "neg": _simple(np.negative), "abs": _simple(_absolute),
    "min": _extreme(np.fmin, np.minimum), "max": _extreme(np.fmax, np.maximum),
    "sqrt": _simple(_sqrt), "rsqrt": _simple(lambda v: 1 / np.sqrt(v)), "rcp": _simple(lambda v: 1 / v),
    "ex2": _simple(np.exp2), "lg2": _simple(np.log2), "tanh": _simple(np.tanh),
    "and": _bits(np.bitwise_and), "or": _bits(np.bitwise_or), "xor": _bits(np.bitwise_xor), "not": _bits(np.invert),
    "cvta": _bits(lambda value: value), "shl": _shift, "shr": _shift, "shf": _funnel, "bfe": _extract, "bfi": _insert,
    "prmt": _permute, "lop3": _logic, "setp": _compare, "selp": _select, "cvt": _convert, "popc": _count_bits,
}  # fmt: skip
