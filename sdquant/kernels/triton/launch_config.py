"""Kernel launches, the devices for them, and the arguments that are the same for all weights of one form."""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import triton

from ...core import code_tables, ggml_iq, gguf_fields, torch_dtypes
from ...utils.device_constants import constant
from .blocks import GRIDS, Block, block_of
from .decoding import rounded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ...core import PackedLayout


# Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 when triton was imported), on the CPU.
INTERPRETED = not isinstance(rounded, triton.runtime.JITFunction)
# A multiplication and an addition are rounded one by one, as torch does it.
EXACT = {"enable_fp_fusion": False}


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments by parameter name; `options` are Triton's own."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    def __call__(self, device: torch.device) -> Any:
        """Launch on a device; return the compiled kernel, None in Triton's interpreter."""
        with _on(device):
            return self.kernel[self.grid](**self.arguments, **self.options)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` current: Triton launches on the current device, which need not be the tensors'."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    if device.type == "xpu" and device.index != torch.xpu.current_device():
        return torch.xpu.device(device)
    return nullcontext()


def works_on(device: torch.device) -> bool:
    """Return whether kernels can be launched on a device. A GPU too old for Triton only fails at the first launch."""
    return device.type == "cpu" if INTERPRETED else device.type in ("cuda", "xpu")


_FIELDS = ("codes", "high", "scales", "scale", "minimum")


@dataclass(frozen=True)
class LaunchConfig:
    """The numbers that kernels over weights take, and the constants that are compiled into them."""

    block: Block
    numbers: dict[str, int | float]
    compiled: dict[str, Any]


# Scales of 8 bits, which are decoded by arithmetic, and what the kernels call them; torch 2.6 has no float8_e8m0fnu.
FLOAT8_SCALES = {torch.float8_e4m3fn: "e4m3"}
if torch_dtypes.E8M0 is not None:
    FLOAT8_SCALES[torch_dtypes.E8M0] = "e8m0"


def plan_of(form: PackedLayout, parts: Mapping[str, Tensor]) -> LaunchConfig:
    """Return what the kernels take for a weight of this form with these parts."""
    scales = "nested" if form.nested else ""
    if form.scale and not form.nested:
        scales = FLOAT8_SCALES.get(parts[form.scale].dtype, "floats")
    return _plan(form, scales)


@lru_cache(maxsize=4096)
def _plan(form: PackedLayout, scales: str) -> LaunchConfig:
    block = block_of(form)
    assert block is not None  # `reads` said so
    own = block.family == "form"
    zero = "" if not isinstance(form.zero, str) else "nibbles-low" if form.zero_packing == "nibbles-low" else "bytes"
    numbers: dict[str, int | float] = {
        "group": form.group,
        "plane_size": plane_size(form),
        "offset": form.offset,
        "factor": form.factor,
        "number": float(form.zero) if not isinstance(form.zero, str) else 0.0,
        "count": form.rows * form.columns,
        "many": form.rows * form.columns // form.group if form.apart else 1,
    }
    # -1 for a field that the type lacks.
    at = {} if own else gguf_fields.places(form.packing, apart=form.apart)
    start = {name: at[name].start if name in at else -1 for name in _FIELDS}
    step = {name: at[name].step if name in at else 0 for name in _FIELDS}
    compiled = {
        "FAMILY": block.family,
        "PACKING": form.packing if own or block.family == GRIDS else "",
        "PLANES": block.planes,
        "LANES": block.lanes,
        "ORDER": block.order,
        "TABLE": bool(form.table if own else block.table),
        "SCALE": scales if own else "",
        "ZERO": zero or ("number" if form.zero else ""),
        "FACTOR": form.factor != 1.0,
        "TAPS": form.taps,
        "SHIFT": ("added" if form.added else "subtracted") if form.shift else "",
        "FUSED": form.fused,
        "ARITHMETIC": form.arithmetic,
        "CHUNKS": block.chunks,
        "D": start["scale"] // 2,
        "M": start["minimum"] // 2,
        "Q": start["codes"],
        "H": start["high"],
        "S": start["scales"],
        "D_STEP": step["scale"] // 2,
        "Q_STEP": step["codes"],
        "H_STEP": step["high"],
        "S_STEP": step["scales"],
        "Z": block.zero,
        "BITS": INTERPRETED,
    }
    return LaunchConfig(block, numbers, compiled)


def plane_size(form: PackedLayout) -> int:
    """Return the bytes of each of quanto's planes; 0 for other packings."""
    if not form.packing.startswith("planes"):
        return 0
    groups = form.rows * form.columns // form.group
    return -(-groups * int(form.packing[-1]) // 8) * form.group


def pointers(form: PackedLayout, parts: Mapping[str, Tensor], block: Block) -> dict[str, Tensor]:
    """Return the pointers that the kernels take; unused ones point to the codes."""
    codes = parts[form.codes]
    if codes.dtype not in (torch.int8, torch.uint8):
        codes = codes.view(torch.uint8)
    scale = parts[form.scale] if form.scale else codes
    if scale.dtype in FLOAT8_SCALES:
        scale = scale.view(torch.uint8)
    name = form.table if block.family == "form" else block.table
    return {
        "codes": codes,
        "scale": scale,
        "nested": parts[form.nested] if form.nested else codes,
        "zero": parts[form.zero] if isinstance(form.zero, str) else codes,
        "shift": parts[form.shift] if form.shift else codes,
        "table": table_of(name, form.arithmetic, codes.device) if name else codes,
        "dynamic": code_tables.dynamic_code(codes.device) if form.nested else codes,
    }


_SIXTEEN = {"iq4": ggml_iq.NON_LINEAR, "e2m1 twice": ggml_iq.E2M1_TWICE}


@constant
def table_of(name: str, arithmetic: str, device: torch.device) -> Tensor:
    """Return the values of a table's codes, float32; those of grids are int8, in words of four."""
    if name in _SIXTEEN:
        return torch.tensor(_SIXTEEN[name], dtype=torch.float32, device=device)
    if name in ggml_iq.GRIDS:
        return ggml_iq.grid(name).view(-1, 4).view(torch.int32).view(-1).to(device)
    return code_tables.code_table(name, arithmetic, device)
