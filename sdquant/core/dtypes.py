"""Names of dtypes."""

from __future__ import annotations

FLOATS = ("float64", "float32", "float16", "bfloat16")
