"""Where sdquant plugs into other libraries. Standard library only: it is imported with sdquant.

diffusers finds quantizers in two tables of `diffusers.quantizers.auto`. sdquant's go in as soon as that module is
imported, before or after sdquant is, so that `import sdquant` neither imports diffusers nor misses it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

TABLES = "diffusers.quantizers.auto"

log = logging.getLogger(__name__)


def plug_into_diffusers() -> None:
    """Register sdquant's quantizer with diffusers: now, or when it is imported."""
    if TABLES in sys.modules:
        _register()
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(MetaPathFinder):
    """Lets the usual finders find the module, and has something done after it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != TABLES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _register()

            loader.exec_module = exec_module
        return spec


def _register() -> None:
    try:
        importlib.import_module(f"{__name__}.diffusers_quantizer")  # puts itself into the tables
    except ImportError as error:  # a diffusers from before it had quantizers; sdquant itself does without
        log.info("sdquant's quantizer is not registered with diffusers: %s", error)
