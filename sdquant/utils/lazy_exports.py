"""The exports of a room, imported when they are first used, so that importing a room costs nothing and needs no torch.

    if TYPE_CHECKING:
        from .plan import Plan
    else:
        __getattr__ = lazy_exports(__name__)

The imports of the block are what type checkers, linters and readers see, and they are also what runs: nothing else says
where a name is, so that nothing else can be wrong.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from .quiet_imports import quiet_imports


def lazy_exports(package: str) -> Callable[[str], Any]:
    """Return the module `__getattr__` of a package whose `__init__` has such a block."""

    def get(name: str) -> Any:
        if name.startswith("__") or name not in _exports(package):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = _exports(package)[name]
        if f"{package}.{module or attribute}" in sys.modules:
            return _imported(package, module, attribute)
        with quiet_imports():  # torch's too, and of what it imports
            return _imported(package, module, attribute)

    return get


def _imported(package: str, module: str | None, attribute: str) -> Any:
    if module is None:
        return importlib.import_module(f"{package}.{attribute}")
    # What `from module import attribute` does: it imports the attribute if that is a module.
    return getattr(__import__(f"{package}.{module}", fromlist=(attribute,)), attribute)


@cache
def _exports(package: str) -> dict[str, tuple[str | None, str]]:
    """Return, for each export, the module that has it and its name there; no module if it is one itself."""
    import ast
    from pathlib import Path

    module = sys.modules[package]
    loader: Any = module.__spec__.loader  # type: ignore[union-attr]
    # Loaders that wrap Python's own, as tools for coverage have them, may lack the method.
    source = loader.get_source(package) if hasattr(loader, "get_source") else Path(str(module.__file__)).read_text()
    tree = ast.parse(source)
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    own = [node for node in imports if node.level == 1]  # those of other rooms are for annotations
    return {alias.asname or alias.name: (node.module, alias.name) for node in own for alias in node.names}
