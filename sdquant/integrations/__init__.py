"""sdquant's quantizers for diffusers and transformers, and their registration there.

Both look quantizers up in tables, each in a module of its own. sdquant's are added as soon as that module is imported,
before or after sdquant, so that `import sdquant` neither imports these libraries nor misses them.
In: a `Config`, and the models that these libraries load. Out: the same models, quantized.
May import `loading` and what is below; this file only what is as light, since it is imported with sdquant.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..loading import finishing
from ..utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

    from torch import nn

    from ._common import dequantize
    from .bnb_on_cpus import serve_bitsandbytes
    from .config import Config
else:
    __getattr__ = lazy_exports(__name__)

__all__ = ["Config", "dequantize", "plug_in", "serve_bitsandbytes"]

# The module with a library's tables -> the module here that registers sdquant in them when it is imported.
TABLES = {
    "diffusers.quantizers.auto": "diffusers_quantizer",
    "transformers.quantizers.auto": "transformers_quantizer",
}

log = logging.getLogger(__name__)


def _attach(model: nn.Module) -> None:
    """Call `attach.attach`, importing it only now."""
    from .attach import attach

    attach(model)


def plug_in() -> None:
    """Register sdquant's quantizers with diffusers and transformers: now, or when they are imported."""
    finishing.register(__name__, _attach)
    waiting = {finder.table for finder in sys.meta_path if isinstance(finder, _WhenImported)}
    for table in TABLES:
        if table in sys.modules:
            _register(table)
        elif table not in waiting:
            sys.meta_path.insert(0, _WhenImported(table))


class _WhenImported(MetaPathFinder):
    """Finder that lets the usual finders find the module, and registers sdquant after the module has run."""

    def __init__(self, table: str) -> None:
        self.table = table

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.table:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _register(self.table)

            loader.exec_module = exec_module
        return spec


def _register(table: str) -> None:
    try:
        importlib.import_module(f"{__name__}.{TABLES[table]}")  # puts itself into the tables
    except ImportError as error:  # a version too old for it; sdquant itself works without
        log.info("sdquant's quantizer is not registered in %s: %s", table, error)
