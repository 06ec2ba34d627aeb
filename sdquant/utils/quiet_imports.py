"""Keep what libraries say while they are imported off the terminal: deprecations, packages that they miss.

Nobody who loads a model can do anything about it. Errors still come through, and so do remarks on what is done later.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .process_state import Shared, errors_only, no_warnings

if TYPE_CHECKING:
    from collections.abc import Iterator

# Who says what while classes are imported, models made and pipelines put together, and why nobody needs to hear it:
CHATTY = (
    "diffusers",  # config fields that it does not know; the weights tell what matters
    "transformers",  # torchvision, which some image processors could use
    "bitsandbytes.backends.cpu.ops",  # the package `kernels`; diffusers imports bitsandbytes wherever it is installed
    "kernels",
    "torch.utils.flop_counter",  # Triton
    "torch.distributed.elastic",  # redirects, on Windows
)

# From these the libraries set the level of their loggers while they are imported, after ours is set.
_LEVELS = {"TRANSFORMERS_VERBOSITY": "transformers", "DIFFUSERS_VERBOSITY": "diffusers"}


@contextmanager
def _levels_of_errors() -> Iterator[None]:
    ours = {name: library for name, library in _LEVELS.items() if name not in os.environ}
    missing = [library for library in ours.values() if library not in sys.modules]
    os.environ.update(dict.fromkeys(ours, "error"))
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
        for library in missing:
            if library in sys.modules:  # what it would have set; a root logger at INFO would have it say everything
                logging.getLogger(library).setLevel(logging.WARNING)


_no_remarks = Shared(_levels_of_errors)


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Suppress warnings, and all but errors of chatty loggers, for any number of threads."""
    with errors_only(*CHATTY), no_warnings, _no_remarks:
        yield
