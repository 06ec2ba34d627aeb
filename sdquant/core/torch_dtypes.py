"""The sets of `dtypes` as torch's dtypes. In a file of its own, because importing it imports torch."""

from __future__ import annotations

import torch

from . import dtypes

COMPUTE_DTYPES = tuple(map(dtypes.dtype_named, dtypes.COMPUTE_DTYPES))
FLOATS = tuple(map(dtypes.dtype_named, dtypes.FLOATS))
# None where torch is older than 2.7; `dtype_named` refuses it by name.
E8M0: torch.dtype | None = getattr(torch, "float8_e8m0fnu", None)
