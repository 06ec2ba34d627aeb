"""Triton launches compiled for a card that is not here, and what the code asks of it: the compilers need no card."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sdquant.kernels.triton.launch_config import Launch

_POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.uint8: "*u8", torch.int8: "*i8", torch.int32: "*i32",
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A card by its architecture, sm_80 or gfx942, and the bytes of shared memory that a program may have on it."""

    name: str
    shared: int

    @property
    def is_amd(self) -> bool:
        return self.name.startswith("gfx")

    @property
    def capability(self) -> tuple[int, int]:
        """What torch says of it; of AMD's there are none that matter."""
        return (9, 4) if self.is_amd else (int(self.name[3:-1]), int(self.name[-1]))

    @property
    def lanes(self) -> int:
        """Threads in a warp."""
        return 64 if self.name.startswith("gfx9") else 32

    @property
    def of_triton(self) -> GPUTarget:
        return GPUTarget("hip", self.name, self.lanes) if self.is_amd else GPUTarget("cuda", int(self.name[3:]), 32)


_KIB = 1024
TARGETS = {
    name: Target(name, size * _KIB)
    for name, size in {
        "sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99,
        "gfx90a": 64, "gfx942": 64, "gfx1100": 64, "gfx1201": 64,
    }.items()
}  # fmt: skip


@dataclass(frozen=True)
class Code:
    """What compiled code asks of a card.

    Attributes:
        shared: bytes for each program. stack: bytes, or registers on AMD's cards, for what does not fit into the
            registers of a thread.
        instructions: of the whole code. loops: of each innermost loop, in their order.
        matrices: whether tensor cores are used.
    """

    shared: int
    stack: int
    instructions: int
    loops: tuple[int, ...]
    matrices: bool


def compiled(launch: Launch, target: int | Target) -> Any:
    """Triton's kernel, with its stages of code in `asm`, as the launch would compile it on a card (90: on NVIDIA's of
    that capability): numbers of 1 and what 16 divides are compiled in."""
    types: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    known: dict[tuple[int], Any] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            types[parameter.name] = "constexpr"
            constants[index,] = value
            continue
        if isinstance(value, torch.Tensor):
            types[parameter.name] = _POINTERS[value.dtype]
        else:
            types[parameter.name] = "i32" if isinstance(value, int) else "fp32"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            known[index,] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, types, constants, known)
    goal = GPUTarget("cuda", target, 32) if isinstance(target, int) else target.of_triton
    return triton.compile(source, target=goal, options=launch.options)


def measured(kernel: Any) -> Code:
    """Read off a compiled kernel what it asks of a card."""
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        lines = [line.partition(";")[0].strip() for line in text.partition(".section")[0].splitlines()]
        count, loops = _counted(lines, re.compile(r"s_cbranch\w*\s+(\.\w+)"))
        spilled = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])  # type: ignore[index]
        return Code(kernel.metadata.shared, spilled, count, loops, bool(re.search(r"v_(?:mfma|wmma)", text)))
    lines = [_plain(line) for line in _asked(kernel, "nvdisasm", "-c").splitlines()]
    count, loops = _counted(lines, re.compile(r"BRA\S*\s+.*?`\((\.L_\w+)\)"))
    matrices = any(re.match(r"[HIQ]G?MMA|UTC\w*MMA", line) for line in lines)
    return Code(kernel.metadata.shared, stack(kernel), count, loops, matrices)


def _plain(line: str) -> str:
    """A line of NVIDIA's disassembler as a label or an instruction, without the address before it and a condition."""
    if (label := re.match(r"\s*(\.L_\w+:)", line)) is not None:
        return label[1]
    found = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*);", line)
    return "" if found is None or found[1].startswith("NOP") else found[1]


def _counted(lines: Iterable[str], branch: re.Pattern[str]) -> tuple[int, tuple[int, ...]]:
    """The number of instructions, and of those in each innermost loop: from a label to a branch back to it."""
    count, labels, loops = 0, dict[str, int](), list[tuple[int, int]]()
    for line in lines:
        if line.endswith(":"):
            labels[line[:-1]] = count
        elif line and not line.startswith((".", "#", "/")):
            count += 1
            if (found := branch.match(line)) is not None and found[1] in labels:
                loops.append((labels[found[1]], count))
    # A branch to itself stands behind the end of a kernel.
    inner = [
        (a, b) for a, b in loops if b - a > 1 and not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)
    ]
    return count, tuple(b - a for a, b in inner)


@cache
def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _asked(kernel: Any, tool: str, *words: str) -> str:
    """What a program beside NVIDIA's compiler says of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([_tool(tool), *words, file.name], capture_output=True, text=True, check=True).stdout


def stack(kernel: Any) -> int:
    """Bytes of memory that each thread of a compiled kernel has for what does not fit into its registers."""
    return max(int(found) for found in re.findall(r"STACK:(\d+)", _asked(kernel, "cuobjdump", "-res-usage")))
