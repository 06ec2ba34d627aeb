"""The one place that imports the files of this package that import triton."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..base import Prepared

_log = logging.getLogger(__name__)


@cache
def launcher() -> ModuleType | None:
    """Return the module `launch`, or None if Triton is missing or broken; the reason is logged at debug level."""
    try:
        from . import launch
    except (
        Exception
    ) as error:  # a broken Triton raises what it likes: OSError of a library, AttributeError of a version
        _log.debug("Cannot import the Triton kernels: %s: %s", type(error).__name__, error)
        return None
    return launch


@cache
def binder() -> Callable[..., Prepared] | None:
    """Return `bound_eight.bind`; None without Triton, or in its interpreter, which compiles nothing."""
    kernels = launcher()
    if kernels is None or kernels.INTERPRETED:
        return None
    from .bound_eight import bind

    return bind


@cache
def eight(device: torch.device) -> ModuleType | None:
    """Return the module `int8_gemm`; None if its kernels do not run on `device` or give wrong results there."""
    kernels = launcher()
    if kernels is None or not kernels.works_on(device):
        return None
    why = "their results are wrong"
    try:
        from . import int8_gemm as module

        if module.sound(device):
            return module
    except Exception as error:  # whatever it is: the kernels do not work here, and torch does
        why = f"{type(error).__name__}: {error}"
    _log.warning(
        "The Triton kernels for 8-bit products are not used on %s: %s. Using torch instead, which is slower.",
        device,
        why,
    )
    return None
