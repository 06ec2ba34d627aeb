"""Instructions that move numbers: between registers, threads and memory. And barriers."""

from __future__ import annotations

from functools import partial

import numpy as np

from .kinds import DTYPES, Array, size_of, unsigned
from .machine import WARP, Machine, Operation
from .memory import Fault
from .program import Address, Constant, Instruction, Operand, Several, Unsupported


def _several(operand: Operand) -> tuple[Operand, ...]:
    return operand.all if isinstance(operand, Several) else (operand,)


def _move(machine: Machine, of: Instruction) -> None:
    to, source = of.operands
    kind = of.kind
    if isinstance(to, Several):  # the low part goes to the first
        value, size = machine.get(source, kind), size_of(kind) // len(to.all)
        for i, part in enumerate(to.all):
            machine.put(part, (value >> value.dtype.type(8 * size * i)).astype(unsigned(size)))
    elif isinstance(source, Several):
        size, whole = size_of(kind) // len(source.all), np.zeros((), DTYPES[kind])
        for i, part in enumerate(source.all):
            shift = whole.dtype.type(8 * size * i)
            whole = whole | (machine.get(part, f"u{8 * size}").astype(whole.dtype) << shift)
        machine.put(to, whole)
    else:
        machine.put(to, machine.get(source, kind))


def _load(machine: Machine, of: Instruction) -> None:
    to, where = _several(of.operands[0]), of.operands[1]
    kind = of.kind
    if "param" in of.parts:
        assert isinstance(where, Address) and isinstance(where.base, str)
        machine.put(to[0], _argument(machine.arguments[where.base], kind))
        return
    address = machine.address(where)
    if not len(address):
        return
    if "shared" in of.parts:
        found = machine.shared.load(machine.of_program[machine.active], address, size_of(kind), len(to))
    elif "global" in of.parts:
        found = machine.tensors.load(address, size_of(kind), len(to))
    else:
        raise Unsupported(of.text)
    for register, value in zip(to, found, strict=True):
        spread = np.zeros(machine.lanes, value.dtype)
        spread[machine.active] = value
        machine.put(register, spread.view(DTYPES[kind]))


def _argument(value: float | int, kind: str) -> Array:
    size = size_of(kind)
    if isinstance(value, float):
        return np.array(value, f"f{size}").view(unsigned(size))
    return np.array(value & ((1 << 8 * size) - 1), unsigned(size))


def _store(machine: Machine, of: Instruction) -> None:
    kind = of.kind
    values = [
        np.broadcast_to(machine.get(one, kind), (machine.lanes,))[machine.active].view(unsigned(size_of(kind)))
        for one in _several(of.operands[1])
    ]
    address = machine.address(of.operands[0])
    if not len(address):
        return
    if "shared" in of.parts:
        machine.shared.store(machine.of_program[machine.active], address, values)
    elif "global" in of.parts:
        machine.tensors.store(address, values)
    else:
        raise Unsupported(of.text)


def _copy(machine: Machine, of: Instruction) -> None:
    """From a tensor to shared memory, in the background: a group of copies is there when it is waited for."""
    if "async" not in of.parts or "bulk" in of.parts:
        raise Unsupported(of.text)
    if "commit_group" in of.parts:
        machine.groups.append(machine.copying)
        machine.copying = []
    elif "wait_group" in of.parts:
        assert isinstance(of.operands[0], Constant)
        _arrive(machine, of.operands[0].bits)
    elif "wait_all" in of.parts:
        machine.groups.append(machine.copying)
        machine.copying = []
        _arrive(machine, 0)
    else:
        _begin(machine, of)


def _begin(machine: Machine, of: Instruction) -> None:
    size = of.operands[2].bits  # type: ignore[union-attr]
    to, source, program = (
        machine.address(of.operands[0]), machine.address(of.operands[1]), machine.of_program[machine.active]
    )  # fmt: skip
    given: Array = np.array(size)
    if len(of.operands) > 3:
        given = machine.get(of.operands[3], "u32")
    given = np.broadcast_to(given, (machine.lanes,))[machine.active]
    if ((given != 0) & (given != size)).any():
        raise Unsupported("a copy of a part")
    for there in (True, False):
        some = (given == size) == there
        if not some.any():
            continue
        words, each = (size // 4, 4) if size >= 4 else (1, size)
        zeros = [np.zeros(int(some.sum()), unsigned(each))] * words
        values = machine.tensors.load(source[some], each, words) if there else zeros
        machine.copying.append(partial(machine.shared.store, program[some], to[some], values))


def _arrive(machine: Machine, but: int) -> None:
    """All groups but the last ones."""
    while len(machine.groups) > but:
        for store in machine.groups.pop(0):
            store()


def _shuffle(machine: Machine, of: Instruction) -> None:
    """Each thread reads another's register. c holds where the other must be: a bound, and the bits that stay."""
    value, by = machine.get(of.operands[1], "b32"), machine.get(of.operands[2], "u32").astype(np.int64)
    c = machine.get(of.operands[3], "u32").astype(np.int64)
    bound, segment = c & 31, c >> 8 & 31
    own = machine.thread % WARP
    lowest, highest = own & segment, (own & segment) | (bound & ~segment)
    mode = next(part for part in of.parts if part in ("bfly", "idx", "up", "down"))
    other = {
        "bfly": own ^ by, "idx": lowest | (by & ~segment), "up": own - by, "down": own + by,
    }[mode]  # fmt: skip
    inside = other >= highest if mode == "up" else other <= highest
    if not (machine.active.reshape(-1, WARP).all(1) == machine.active.reshape(-1, WARP).any(1)).all():
        raise Fault("a shuffle that only a part of a warp reaches")
    source = machine.lane - own + np.where(inside, other, own)
    machine.put(of.operands[0], np.broadcast_to(value, (machine.lanes,))[source])


REDUCTIONS = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip


def _reduce(machine: Machine, of: Instruction) -> None:
    """Over the threads of a warp."""
    value = machine.warps(machine.get(of.operands[1], of.kind))
    function = REDUCTIONS[next(part for part in of.parts if part in REDUCTIONS)]
    machine.put(of.operands[0], np.repeat(function.reduce(value, axis=1, dtype=value.dtype), WARP))


def _vote(machine: Machine, of: Instruction) -> None:
    votes = machine.warps(machine.get(of.operands[1], "pred"))
    if "ballot" in of.parts:
        bits = (votes.astype(np.uint32) << np.arange(WARP, dtype=np.uint32)).sum(1, dtype=np.uint32)
        machine.put(of.operands[0], np.repeat(bits, WARP))
    else:
        machine.put(of.operands[0], np.repeat(votes.all(1) if "all" in of.parts else votes.any(1), WARP))


def _barrier(machine: Machine, of: Instruction) -> None:
    there = machine.active.reshape(machine.programs, -1)
    if (there.any(1) != there.all(1)).any():
        raise Fault("a barrier that only a part of a program reaches")


def _nothing(machine: Machine, of: Instruction) -> None: ...


def _atomic(machine: Machine, of: Instruction) -> None:
    """Additions alone, one thread after the other."""
    kind = of.kinds[-1]
    if "add" not in of.parts or "global" not in of.parts or kind not in ("u32", "s32", "f32", "u64"):
        raise Unsupported(of.text)
    to, where, value = of.operands if of.name == "atom" else (None, *of.operands)
    address = machine.address(where)
    added = np.broadcast_to(machine.get(value, kind), (machine.lanes,))[machine.active]
    before = machine.tensors.add(address, added, DTYPES[kind])
    if to is not None:
        spread = np.zeros(machine.lanes, DTYPES[kind])
        spread[machine.active] = before
        machine.put(to, spread)


OPERATIONS: dict[str, Operation] = {
    "mov": _move, "ld": _load, "st": _store, "cp": _copy, "shfl": _shuffle, "redux": _reduce, "vote": _vote,
    "bar": _barrier, "barrier": _barrier, "fence": _nothing, "membar": _nothing, "griddepcontrol": _nothing,
    "atom": _atomic, "red": _atomic,
}  # fmt: skip
