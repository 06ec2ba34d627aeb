"""Kernels in C for the CPU, available if a compiler was found when the package was installed.

`cpu_kernels.py` is the `Reader`; the C files begin with `form.h`. Importing this imports no torch.
"""

from __future__ import annotations

import importlib
import logging
import os
from functools import cache
from typing import Any

log = logging.getLogger(__name__)

# Of the functions that are called here, and of those that were built: `VERSION` of module.c.
VERSION = 8
# Environment variable: 0 turns the kernels off; the name of an instruction set ("avx2") selects its kernels.
SWITCH = "SDQUANT_NATIVE"
_REBUILD = "reinstall sdquant, or in a checkout run `python setup.py -q build_ext --inplace`"


@cache
def _built() -> tuple[Any | None, str]:
    """Return the extension module, or None and the reason why there is none."""
    try:
        module = importlib.import_module(f"{__name__}._kernels")
        version = getattr(module, "VERSION", 0)
        if version == VERSION:
            return module, ""
        why = f"built of other sources than these (version {version}, and these call version {VERSION}); {_REBUILD}"
    except ModuleNotFoundError:
        return None, "not built (no C compiler at install time?)"
    except ImportError as error:  # it is there: of another machine or system
        why = f"built, but cannot be loaded ({error}); {_REBUILD}"
    log.warning("Native kernels: %s. Everything works without them, but slower.", why)
    return None, why


@cache
def extension() -> Any | None:
    """Return the extension module; None if it was not built, cannot be loaded, or is turned off."""
    if os.environ.get(SWITCH) == "0":
        return None
    module = _built()[0]
    choice = os.environ.get(SWITCH, "")
    if module is not None and choice not in ("", "1") and not module.choose(choice):
        log.warning(
            "%s=%s has no effect: this machine cannot run such kernels. The best that it can run are %s.",
            SWITCH, choice, module.isa(),
        )  # fmt: skip
    return module


def isa() -> str | None:
    """Return the name of the instruction set whose kernels are used; None if there are none."""
    module = extension()
    return None if module is None else str(module.isa())


def state() -> str:
    """Return the state of the native kernels as a phrase for `sdquant doctor`."""
    if os.environ.get(SWITCH) == "0":
        return f"turned off by {SWITCH}=0; everything works, but slower"
    return isa() or f"{_built()[1]}; everything works, but slower"
