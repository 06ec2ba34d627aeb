"""The one place that imports the files of this package that import triton."""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

_log = logging.getLogger(__name__)


@cache
def launcher() -> ModuleType | None:
    """`launch`, or None where Triton is not there or does not work: the reason is logged for those who debug."""
    try:
        from . import launch
    except (
        Exception
    ) as error:  # a broken Triton raises what it likes: OSError of a library, AttributeError of a version
        _log.debug("no Triton kernels: %s: %s", type(error).__name__, error)
        return None
    return launch
