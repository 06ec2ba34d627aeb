"""The doctor's hints: a table of rules, each with a condition on the machine and a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..utils.byte_sizes import GIB, gib
from ..utils.install import install_extra

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..compat import Machine

# Age in seconds after which a lock is taken for a leftover. Compiling quanto's extension takes a minute or so.
STALE_AFTER = 600.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A piece of advice. `level`: "problem" (something will fail), "advice" (something could be better) or "info"."""

    name: str
    level: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A condition on the machine, and the text of the finding (a function if it includes facts about the machine)."""

    name: str
    level: str
    applies: Callable[[Machine], bool]
    text: str | Callable[[Machine], str]


def advice(machine: Machine) -> tuple[Finding, ...]:
    """Return the findings that apply to `machine`."""
    return tuple(
        Finding(name=row.name, level=row.level, text=row.text if isinstance(row.text, str) else row.text(machine))
        for row in RULES
        if row.applies(machine)
    )


def _has(machine: Machine, *kinds: str) -> bool:
    return any(kind in machine.kinds for kind in kinds)


def _unused(machine: Machine, vendor: str, *kinds: str) -> bool:
    """Return whether the machine has a GPU of `vendor`, and torch supports none of its device kinds."""
    return vendor in machine.gpu_vendors and not _has(machine, *kinds)


def _stale(machine: Machine) -> list[str]:
    return [lock.path for lock in machine.locks if lock.age_s > STALE_AFTER]


def _python(machine: Machine) -> tuple[int, int]:
    major, minor = machine.python.split(".")[:2]
    return int(major), int(minor)


SELECTOR = "Choose it in the install selector of the PyTorch site"

RULES: tuple[Rule, ...] = (
    Rule(
        name="python",
        level="problem",
        applies=lambda machine: not (3, 10) <= _python(machine) <= (3, 13),
        text="sdquant is tested with Python 3.10 to 3.13. The libraries behind it may have no wheels for this one.",
    ),
    Rule(
        name="stale-lock",
        level="problem",
        applies=lambda machine: bool(_stale(machine)),
        text=lambda machine: (
            "A compilation of optimum-quanto was interrupted and left its lock behind. Programs that let quanto "
            "compile wait for it forever; sdquant does not. If nothing is compiling now, delete "
            f"{' and '.join(_stale(machine))}."
        ),
    ),
    Rule(
        name="fresh-lock",
        level="info",
        applies=lambda machine: len(machine.locks) > len(_stale(machine)),
        text="optimum-quanto's extension is being compiled by some program just now, or that program was killed "
        "minutes ago. If this line is still here in ten minutes, the lock is a leftover.",
    ),
    Rule(
        name="nvidia-unused",
        level="problem",
        applies=lambda machine: _unused(machine, "nvidia", "cuda"),
        text=f"There is an NVIDIA card, and this torch cannot use it: install the CUDA build of torch. {SELECTOR}.",
    ),
    Rule(
        name="amd-unused",
        level="problem",
        applies=lambda machine: _unused(machine, "amd", "rocm", "directml"),
        text=f"There is an AMD card, and this torch cannot use it: install the ROCm build of torch. {SELECTOR}.",
    ),
    Rule(
        name="intel-unused",
        level="advice",
        applies=lambda machine: _unused(machine, "intel", "xpu"),
        text="There is Intel graphics, and this torch does not use it. For an Arc card or a recent built-in one, "
        f"install the XPU build of torch. {SELECTOR}.",
    ),
    Rule(
        name="no-accelerator",
        level="info",
        applies=lambda machine: machine.kinds == ("cpu",) and not machine.gpu_vendors,
        text="torch sees no GPU, so everything runs on the CPU. If there is one, this torch is not built for it: "
        f"NVIDIA needs the CUDA build, AMD the ROCm build, Intel the XPU build. {SELECTOR}.",
    ),
    Rule(
        name="windows-wsl2",
        level="advice",
        applies=lambda machine: machine.platform == "windows",
        text="WSL2 runs the Linux builds of torch, Triton and the quantization libraries on this machine's GPU, "
        "including those that have no Windows build.",
    ),
    Rule(
        name="wsl2-memory",
        level="info",
        applies=lambda machine: machine.wsl,
        text="This is WSL2, which gives Linux half of the RAM by default. `memory=` in .wslconfig raises that, which "
        "offloading makes use of.",
    ),
    Rule(
        name="triton-missing",
        level="advice",
        applies=lambda machine: _has(machine, "cuda", "rocm", "xpu") and not machine.has_triton,
        text="Triton is missing. Everything runs without it; torch.compile on the GPU, and the faster kernels made "
        "with it, do not. It comes with the Linux builds of torch; on Windows it is the package triton-windows.",
    ),
    Rule(
        name="triton",
        level="info",
        applies=lambda machine: machine.has_triton,
        text="Triton is here: torch.compile can make kernels for the GPU.",
    ),
    Rule(
        name="no-compiler",
        level="info",
        applies=lambda machine: not machine.has_compiler,
        text="There is no C++ compiler on the path. sdquant needs none; torch.compile on the CPU does.",
    ),
    Rule(
        name="libgguf-missing",
        level="advice",
        applies=lambda machine: "libgguf" not in machine.versions,
        text=f"GGUF files can be read but not written: {install_extra('gguf')}.",
    ),
    Rule(
        name="mps-float8",
        level="info",
        applies=lambda machine: _has(machine, "mps"),
        text="torch has no float8 on MPS, so qfloat8 is refused there. qint8 and int8 are the 8-bit schemes to take.",
    ),
    Rule(
        name="directml",
        level="info",
        applies=lambda machine: _has(machine, "directml"),
        text="bitsandbytes and optimum-quanto have no DirectML support. GGUF files and NNCF's int8 and int4 need "
        "nothing but torch, though nobody has run them on DirectML yet.",
    ),
    Rule(
        name="low-ram",
        level="advice",
        applies=lambda machine: machine.ram_available < 4 * GIB,
        text=lambda machine: (
            f"Only {gib(machine.ram_available)} of RAM are free. Close other programs, or use "
            'offload="balanced" with a budget, which keeps the rest on disk.'
        ),
    ),
)
