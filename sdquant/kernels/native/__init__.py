"""Kernels in C for the CPU, where the package was installed with a compiler at hand.

`reader.py` is the `Reader`; the C files begin with `form.h`. Importing this imports no torch.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Any

log = logging.getLogger(__name__)

# Environment: 0 turns the kernels off; the name of an instruction set ("avx2") has those of it run.
SWITCH = "SDQUANT_NATIVE"


@cache
def extension() -> Any | None:
    """The extension module; None where it was not built or is turned off."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        from . import _kernels  # type: ignore[attr-defined]
    except ImportError:
        return None
    wanted = os.environ.get(SWITCH, "")
    if wanted not in ("", "1") and not _kernels.choose(wanted):
        log.warning(
            "%s=%s has no effect: there are no such kernels for this machine, whose best are %s.",
            SWITCH, wanted, _kernels.isa(),
        )  # fmt: skip
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
