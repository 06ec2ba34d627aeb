"""Dtypes by name, and tensors without their values. `torch_dtypes` has the same sets as torch's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import BackendUnavailableError

if TYPE_CHECKING:
    import torch

COMPUTE_DTYPES = ("float32", "float16", "bfloat16")  # what models compute in
FLOATS = ("float64", *COMPUTE_DTYPES)  # what a file's unquantized weights may be

# Sizes in bits of the dtypes that occur in files, by torch name.
DTYPE_BITS: Mapping[str, int] = {
    "float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8,
    "float8_e4m3fnuz": 8, "float8_e5m2fnuz": 8, "float8_e8m0fnu": 8,
    "int64": 64, "int32": 32, "int16": 16, "int8": 8, "uint64": 64, "uint32": 32, "uint16": 16, "uint8": 8, "bool": 8,
}  # fmt: skip
# Dtypes that the oldest torch that sdquant runs with (2.6) does not have, and the version that has brought them.
SINCE: Mapping[str, str] = {"float8_e8m0fnu": "2.7"}


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the module: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype of a name.

    Raises:
        BackendUnavailableError: this torch is too old for it.
    """
    import torch

    dtype: torch.dtype | None = getattr(torch, name, None)
    if dtype is None and name in SINCE:
        raise BackendUnavailableError(
            f"Cannot use {name} here",
            f"torch {torch.__version__} does not have this dtype, which torch {SINCE[name]} brought",
            f"Install torch {SINCE[name]} or newer, or use a model in another format",
        )
    if dtype is None:
        raise AttributeError(f"torch has no dtype {name!r}")
    return dtype


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Layout of one tensor of a packed weight: torch dtype name and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """A tensor as a header describes it: torch dtype name (or GGUF type name), logical shape, bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
