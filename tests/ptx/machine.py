"""Registers, operands, branches: what runs a program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from .kinds import DTYPES, Array, size_of, unsigned
from .memory import NO_ONES, Fault, Global, Shared, Span
from .program import Address, Constant, Instruction, Operand, Program, Register, Unsupported, parse

WARP = 32
Operation = Callable[["Machine", Instruction], None]


class Machine:
    """A launch: all threads of all programs, each a lane of the arrays that registers are.

    Threads that a branch parts go on one path after the other, always on the one that is farthest behind, so that they
    meet again where the paths do.
    """

    def __init__(
        self,
        program: Program,
        arguments: Iterable[int | float],
        spans: Iterable[Span],
        grid: Iterable[int],
        shared: int,
    ) -> None:
        """arguments: numbers and addresses, one for each parameter. shared: bytes for each program."""
        self.program = program
        self.arguments = dict(zip(program.parameters, arguments, strict=True))
        self.grid: tuple[int, ...] = (*grid, 1, 1)[:3]
        self.programs = int(np.prod(self.grid))
        self.lanes = self.programs * program.threads
        self.lane = np.arange(self.lanes)
        self.of_program, self.thread = np.divmod(self.lane, program.threads)
        self.tensors, self.shared = Global(spans), Shared(self.programs, shared)
        self.registers: dict[str, Array] = {}
        self.running = np.ones(self.lanes, bool)  # the threads on this path
        self.active = self.running  # those of them that the instruction's condition lets through
        self.copying: list[Callable[[], None]] = []  # to shared memory, since the last group of copies
        self.groups: list[list[Callable[[], None]]] = []
        self.steps = 0

    # ---- operands ----

    def get(self, operand: Operand, kind: str) -> Array:
        """Return an operand's numbers of a type: an array, or one number for all threads."""
        dtype = DTYPES[kind]
        if isinstance(operand, Constant):
            return _constant(operand, kind)
        if isinstance(operand, str):  # shared memory begins at 0
            return np.array(0, dtype)
        if not isinstance(operand, Register):
            raise Unsupported(f"{operand} where a number is expected")
        special = self._special(operand.name)
        if special is not None:
            return special.astype(dtype)
        value = self.registers.get(operand.name)
        if value is None:
            raise Fault(f"{operand.name} is read before anything was written to it")
        if kind == "pred":
            return value
        size = size_of(kind)
        if value.dtype.itemsize != size:  # the low part, or zeros above
            value = value.astype(unsigned(size))
        return value.view(dtype)

    def put(self, register: Operand, value: Array) -> None:
        """Write numbers to a register of the active threads; narrower ones are extended, signed by their sign."""
        if not isinstance(register, Register):
            raise Unsupported(f"a result in {register}")
        if register.name == "_":
            return
        kind = self.program.kind_of(register)
        if kind == "pred":
            made = np.asarray(value, bool)
        else:
            size, value = size_of(kind), np.asarray(value)
            if value.dtype.itemsize != size:
                letter = "i" if value.dtype.kind == "i" else "u"
                value = value.view(np.dtype(f"{letter}{value.dtype.itemsize}")).astype(np.dtype(f"{letter}{size}"))
            made = value.view(unsigned(size))
        if self.active.all():
            self.registers[register.name] = np.array(np.broadcast_to(made, (self.lanes,)))
            return
        before = self.registers.get(register.name)
        if before is None:
            before = np.full(self.lanes * made.dtype.itemsize, NO_ONES, np.uint8).view(made.dtype)
        self.registers[register.name] = np.where(self.active, made, before)

    def address(self, operand: Operand) -> Array:
        """Return the addresses of the active threads, int64."""
        if not isinstance(operand, Address):
            raise Unsupported(f"{operand} where an address is expected")
        if isinstance(operand.base, str):
            return np.full(int(self.active.sum()), operand.offset, np.int64)
        wide = self.program.kind_of(operand.base).endswith("64")
        base = self.get(operand.base, "u64" if wide else "u32").astype(np.int64)
        return base[self.active] + operand.offset

    def _special(self, name: str) -> Array | None:
        register, _, axis = name.partition(".")
        number = "xyz".find(axis)
        if register == "%ctaid":
            x, y, _ = self.grid
            return np.stack((self.of_program % x, self.of_program // x % y, self.of_program // (x * y)))[number]
        if register == "%nctaid":
            return np.array(self.grid[number])
        if register == "%tid":
            return self.thread if number == 0 else np.zeros_like(self.thread)
        if register == "%ntid":
            return np.array(self.program.threads if number == 0 else 1)
        if name == "%laneid":
            return self.thread % WARP
        return None

    def warps(self, value: Array) -> Array:
        """Return a register as [warps, 32]."""
        return np.broadcast_to(value, (self.lanes,)).reshape(-1, WARP)

    # ---- running ----

    def run(self, operations: Mapping[str, Operation]) -> None:
        """Run to the end."""
        at, apart = 0, dict[int, Array]()  # where the other paths are, and whose they are
        with np.errstate(all="ignore"):
            while True:
                if apart and (first := min(apart)) <= at:
                    threads = apart.pop(first)
                    if first == at:
                        self.running = self.running | threads
                    else:
                        _join(apart, at, self.running)
                        self.running, at = threads, first
                    continue
                instruction = self.program.code[at]
                self.steps += 1
                taken = self._condition(instruction)
                at += 1
                if instruction.name not in ("bra", "ret", "exit"):
                    self.active = taken
                    self._do(instruction, operations)
                    continue
                goal = len(self.program.code)
                if instruction.name == "bra":
                    goal = self.program.labels[str(instruction.operands[0])]
                stay = self.running & ~taken
                if goal < len(self.program.code) and taken.any():
                    _join(apart, goal, taken)
                if stay.any():
                    self.running = stay
                    continue
                if not apart:
                    return
                at = min(apart)
                self.running = apart.pop(at)

    def _condition(self, instruction: Instruction) -> Array:
        if instruction.condition is None:
            return self.running
        return self.running & (self.get(instruction.condition, "pred") != instruction.negated)

    def _do(self, instruction: Instruction, operations: Mapping[str, Operation]) -> None:
        operation = operations.get(instruction.name)
        if operation is None:
            raise Unsupported(instruction.text)
        try:
            operation(self, instruction)
        except Fault as fault:
            raise Fault(f"{fault}: {instruction.text}") from None
        except (Unsupported, KeyError) as error:
            raise Unsupported(f"{error}: {instruction.text}") from error


def _join(apart: dict[int, Array], at: int, threads: Array) -> None:
    """Let threads wait at an instruction, with those that do so already."""
    apart[at] = apart[at] | threads if at in apart else threads


def _constant(constant: Constant, kind: str) -> Array:
    if constant.is_float:
        bits = np.array(constant.bits, np.uint64 if constant.wide else np.uint32)
        value = bits.view(np.float64 if constant.wide else np.float32)
        return bits.view(DTYPES[kind]) if bits.itemsize == size_of(kind) else value.astype(DTYPES[kind])
    if kind == "pred":
        return np.array(bool(constant.bits))
    size = size_of(kind)
    return np.array(constant.bits & ((1 << 8 * size) - 1), unsigned(size)).view(DTYPES[kind])


def run(
    ptx: str, arguments: Iterable[int | float], spans: Iterable[Span], grid: Iterable[int], shared: int = 0
) -> Machine:
    """Run a module's kernel on memory of this process; `arguments` are numbers and addresses within `spans`."""
    from . import arithmetic, movement, tensor_cores

    machine = Machine(parse(ptx), arguments, spans, grid, shared)
    if machine.lanes:
        machine.run(arithmetic.OPERATIONS | movement.OPERATIONS | tensor_cores.OPERATIONS)
    return machine
