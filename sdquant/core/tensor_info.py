"""Tensors without their values: dtypes, shapes and sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

# Sizes in bits of the dtypes that occur in files, by torch name.
DTYPE_BITS: Mapping[str, int] = {
    "float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8,
    "float8_e4m3fnuz": 8, "float8_e5m2fnuz": 8, "float8_e8m0fnu": 8,
    "int64": 64, "int32": 32, "int16": 16, "int8": 8, "uint64": 64, "uint32": 32, "uint16": 16, "uint8": 8, "bool": 8,
}  # fmt: skip


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
