"""The sets of `dtypes` as torch's dtypes. In a file of its own, because importing it imports torch."""

from __future__ import annotations

from . import dtypes

COMPUTE_DTYPES = tuple(map(dtypes.dtype_named, dtypes.COMPUTE_DTYPES))
FLOATS = tuple(map(dtypes.dtype_named, dtypes.FLOATS))
