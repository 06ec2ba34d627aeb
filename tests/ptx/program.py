"""The text of PTX to instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


class Unsupported(Exception):
    """An instruction, or an operand, that has no row here."""


@dataclass(frozen=True, slots=True)
class Register:
    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A number, by its bits; `wide` where they are those of a float64."""

    bits: int
    is_float: bool = False
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Address:
    """What is in brackets: a register, or the name of a parameter or of shared memory, and a number of bytes."""

    base: Register | str
    offset: int


@dataclass(frozen=True, slots=True)
class Several:
    """Operands in braces."""

    all: tuple[Operand, ...]


Operand = Register | Constant | Address | Several | str  # a name is that of shared memory, or of a label


@dataclass(frozen=True, slots=True)
class Instruction:
    """`@!%p1 ld.global.b32 %r1, [%rd1];` is ld, with global and b32 beside it, if not p1.

    kinds: those of `parts` that are types, in their order.
    """

    text: str
    name: str
    parts: tuple[str, ...]
    kinds: tuple[str, ...]
    operands: tuple[Operand, ...]
    condition: Register | None = None
    negated: bool = False

    @property
    def kind(self) -> str:
        """The type of the result."""
        return self.kinds[0]


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel: the names of its parameters, its instructions, which of them labels stand before, and the types of its
    registers by their names up to the number."""

    parameters: tuple[str, ...]
    threads: int
    code: tuple[Instruction, ...]
    labels: dict[str, int]
    registers: dict[str, str]

    def kind_of(self, register: Register) -> str:
        """The type that a register was declared with."""
        kind = self.registers.get(register.name) or self.registers.get(register.name.rstrip("0123456789"))
        if kind is None:
            raise Unsupported(f"{register.name} is not declared")
        return kind


TYPES = frozenset(
    ("pred", "bf16x2", "f16x2", "bf16", "tf32", *(f"{family}{n}" for family in "busf" for n in (8, 16, 32, 64)))
)
_WHOLE_LINES = re.compile(r"(?m)^\s*\.(?:loc|file|pragma|section)\b[^\n]*$")
_ENTRY = re.compile(r"\.entry\s+\w+\s*\((?P<parameters>.*?)\)(?P<head>[^{]*)\{", re.S)
_LABEL = re.compile(r"\s*(\$?\w+):\s")
_STATEMENT = re.compile(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)


@lru_cache(maxsize=512)
def parse(text: str) -> Program:
    """Return the one kernel of a module."""
    text = _WHOLE_LINES.sub("", re.sub(r"//[^\n]*", "", text))
    entry = _ENTRY.search(text)
    if entry is None:
        raise Unsupported("a module without a kernel")
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", entry["head"])
    if threads is None:
        raise Unsupported("a kernel that does not say how many threads a program has")
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    registers: dict[str, str] = {}
    for raw in _body(text, entry.end()).split(";"):
        statement = raw.strip().lstrip("{} \t\n")  # scopes of inline assembly begin and end where statements do
        while (label := _LABEL.match(statement + " ")) is not None:
            labels[label[1]] = len(code)
            statement = statement[label.end() :].lstrip("{} \t\n")
        if statement.startswith(".reg"):
            _, kind, names = statement.split(None, 2)
            for name in names.split(","):
                registers[name.strip().partition("<")[0]] = kind.lstrip(".")
        elif statement.startswith("."):
            raise Unsupported(statement)
        elif statement:
            code.append(_instruction(" ".join(statement.split()), registers))
    parameters = tuple(re.findall(r"\w+_param_\d+", entry["parameters"]))
    return Program(parameters, int(threads[1]), tuple(code), labels, registers)


def _body(text: str, start: int) -> str:
    """What is between the brace that ends at `start` and its own closing one."""
    depth = 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return text[start : start + brace.start()]
    raise Unsupported("a kernel that does not end")


def _instruction(text: str, registers: dict[str, str]) -> Instruction:
    found = _STATEMENT.fullmatch(text)
    if found is None:
        raise Unsupported(text)
    negated, condition, opcode, operands = found.groups()
    name, *parts = re.split(r"[.]|::", opcode)
    return Instruction(
        text=text,
        name=name,
        parts=tuple(parts),
        kinds=tuple(part for part in parts if part in TYPES),
        operands=tuple(_operand(one, registers) for one in _apart(operands)),
        condition=Register(condition) if condition else None,
        negated=bool(negated),
    )


def _apart(text: str) -> list[str]:
    """Operands between the commas that are in no braces."""
    found = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)
    return [one.strip() for one in found if one.strip()]


def _operand(text: str, registers: dict[str, str]) -> Operand:
    if text.startswith("{"):
        return Several(tuple(_operand(one, registers) for one in _apart(text.strip("{} "))))
    if text.startswith("["):
        base, sign, offset = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:([+-])\s*(-?\w+))?\s*\]", text).groups()  # type: ignore[union-attr]
        number = int(offset or "0", 0) * (-1 if sign == "-" else 1)
        return Address(Register(base) if base.startswith("%") or base in registers else base, number)
    if text.startswith("%") or text in registers or text == "_":
        return Register(text.partition("|")[0])
    if text[:2] in ("0f", "0F", "0d", "0D"):
        return Constant(int(text[2:], 16), is_float=True, wide=text[1] in "dD")
    if re.fullmatch(r"-?(?:0x)?[0-9a-fA-F]+U?", text):
        return Constant(int(text.rstrip("U"), 0))
    if re.fullmatch(r"-?\d+\.\d*(?:[eE][+-]?\d+)?", text):
        return Constant(int(np.float64(text).view(np.uint64)), is_float=True, wide=True)
    return text
