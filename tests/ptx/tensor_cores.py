"""Products of matrices by a warp, of which each thread holds a part; and loads of such parts from shared memory.

Where a thread's numbers are is PTX ISA 9.7.14.5, "Matrix Fragments for mma".
"""

from __future__ import annotations

import re

import numpy as np

from .kinds import Array, of_bfloat16
from .machine import WARP, Machine, Operation
from .program import Instruction, Several, Unsupported

LANE = np.arange(WARP)
GROUP, WITHIN = LANE >> 2, LANE & 3
EACH = {"f16": 2, "bf16": 2, "s8": 4, "u8": 4}  # numbers in a register


def _load_matrices(machine: Machine, of: Instruction) -> None:
    """8 x 8 numbers of 16 bits for each register; the addresses of their rows are held by 8 threads each."""
    to = of.operands[0]
    if not isinstance(to, Several) or "m8n8" not in of.parts or not machine.active.all():
        raise Unsupported(of.text)
    address = machine.address(of.operands[1]).reshape(-1, WARP)
    program = machine.warps(machine.of_program)[:, :1]
    for i, register in enumerate(to.all):
        rows = address[:, 8 * i : 8 * i + 8]
        words = machine.shared.load(np.broadcast_to(program, rows.shape), rows, 4, 4)
        cells = np.ascontiguousarray(np.stack(words, -1)).view(np.uint16)  # [warps, 8 rows, 8 columns]
        if "trans" in of.parts:
            cells = cells.transpose(0, 2, 1)
        pair = [cells[:, GROUP, 2 * WITHIN + j].astype(np.uint32) for j in (0, 1)]
        machine.put(register, (pair[0] | (pair[1] << np.uint32(16))).reshape(-1))


def _multiply(machine: Machine, of: Instruction) -> None:
    """d = a b + c: [m, k] by [k, n], in float64, which is exact for integers, and rounded once for floats."""
    m, n, k = map(int, re.findall(r"\d+", next(part for part in of.parts if re.fullmatch(r"m\d+n\d+k\d+", part))))
    result, left, right, sums = of.kinds
    if left not in EACH or result not in ("f32", "s32") or (m, n) != (16, 8) or not machine.active.all():
        raise Unsupported(of.text)
    if not all(isinstance(one, Several) for one in of.operands):
        raise Unsupported(of.text)
    d, a, b, c = (one.all for one in of.operands)  # type: ignore[union-attr]
    each, warps = EACH[left], machine.lanes // WARP
    whole_a, whole_b = np.zeros((warps, m, k)), np.zeros((warps, k, n))
    # Registers of a hold rows g and g + 8 of four threads' columns, then the same of the next ones.
    for i, register in enumerate(a):
        row, column = GROUP + 8 * (i % 2), each * WITHIN + 4 * each * (i // 2)
        for j, numbers in enumerate(_numbers(machine.warps(machine.get(register, "b32")), left)):
            whole_a[:, row, column + j] = numbers
    for i, register in enumerate(b):
        row = each * WITHIN + 4 * each * i
        for j, numbers in enumerate(_numbers(machine.warps(machine.get(register, "b32")), right)):
            whole_b[:, row + j, GROUP] = numbers
    total = whole_a @ whole_b
    for i, register in enumerate(c):
        total[:, GROUP + 8 * (i // 2), 2 * WITHIN + i % 2] += machine.warps(machine.get(register, sums))
    if "satfinite" in of.parts:
        total = np.clip(total, -(2.0**31), 2.0**31 - 1)
    for i, register in enumerate(d):
        part = total[:, GROUP + 8 * (i // 2), 2 * WITHIN + i % 2].reshape(-1)
        machine.put(register, part.astype(np.float32) if result == "f32" else part.astype(np.int64).astype(np.int32))


def _numbers(raw: Array, kind: str) -> list[Array]:
    """The numbers in registers, the lowest first, as float64."""
    raw = np.ascontiguousarray(raw)
    if kind in ("s8", "u8"):
        parts = raw.view(np.int8 if kind == "s8" else np.uint8).reshape(*raw.shape, 4)
    else:
        halves = raw.view(np.uint16).reshape(*raw.shape, 2)
        parts = of_bfloat16(halves) if kind == "bf16" else halves.view(np.float16)
    return [parts[..., j].astype(np.float64) for j in range(parts.shape[-1])]


OPERATIONS: dict[str, Operation] = {"ldmatrix": _load_matrices, "mma": _multiply}
