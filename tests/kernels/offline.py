"""Triton launches compiled for a card that is not here: the compiler and its assembler need none."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

if TYPE_CHECKING:
    from sdquant.kernels.triton.launch_config import Launch

_POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.uint8: "*u8", torch.int8: "*i8", torch.int32: "*i32",
}  # fmt: skip


def compiled(launch: Launch, capability: int) -> Any:
    """Triton's kernel, with its stages of code in `asm`, as the launch would compile it on a card of this capability
    (90 for an H100): numbers of 1 and what 16 divides are compiled in."""
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
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)


def stack(kernel: Any) -> int:
    """Bytes of memory that each thread of a compiled kernel has for what does not fit into its registers."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return max(int(found) for found in re.findall(r"STACK:(\d+)", text))
