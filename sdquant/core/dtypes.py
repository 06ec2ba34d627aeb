"""Names of dtypes. `torch_dtypes` has the same sets as torch's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

COMPUTE_DTYPES = ("float32", "float16", "bfloat16")  # what models compute in
FLOATS = ("float64", *COMPUTE_DTYPES)  # what a file's unquantized weights may be


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the module: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype of a name."""
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype
