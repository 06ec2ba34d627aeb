"""Kernels in C for the CPU, where the package was installed with a compiler at hand.

`reader.py` is the `Reader`; the C files begin with `form.h`. Importing this imports no torch.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

SWITCH = "SDQUANT_NATIVE"  # environment: 0 turns the kernels off


@cache
def extension() -> Any | None:
    """The extension module; None where it was not built or is turned off."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        from . import _kernels  # type: ignore[attr-defined]
    except ImportError:
        return None
    return _kernels


def isa() -> str | None:
    """Name of the instruction set whose kernels run; None where there are none."""
    found = extension()
    return None if found is None else str(found.isa())


def state() -> str:
    """A sentence's part for `sdquant doctor`."""
    if os.environ.get(SWITCH) == "0":
        return f"turned off by {SWITCH}=0; everything works, slower"
    return isa() or "not built (no C compiler at install time?); everything works, slower"
