"""Import diffusers and transformers whole, in any thread.

Both put another module in their place into `sys.modules` while they are imported: a lazy one, which imports what is
asked of it. An import statement that runs in a second thread at that moment waits, and then gives the module that was
there before (CPython 3.11, C path of `import`): it has no `ModelMixin` and never will. `importlib.import_module` looks
again after it has waited. So nothing in this package has an import statement for the names of either.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..utils.quiet_imports import quiet_imports

if TYPE_CHECKING:
    from torch import nn

_WHOLE = ("transformers", "diffusers")


def module(name: str) -> Any:
    """Return a module of diffusers or transformers, such as "diffusers" or "diffusers.utils.logging".

    transformers comes first, in each thread: diffusers' own import statements for it then find it whole.

    Raises:
        ImportError: there is no such module in the version that is installed.
    """
    if name in sys.modules and all(one in sys.modules for one in _WHOLE):  # perhaps not whole yet, in another thread
        return _module(name)
    with quiet_imports():
        return _module(name)


def _module(name: str) -> Any:
    for whole in _WHOLE:
        import_module(whole)
    return import_module(name)


def diffusers() -> Any:
    """Return diffusers."""
    return module("diffusers")


def transformers() -> Any:
    """Return transformers."""
    return module("transformers")


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether it is a transformers model; else it is one of diffusers."""
    return hasattr(getattr(model, "config", None), "to_json_string")
