"""The host's own progress line and error display."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..errors import SdquantError

log = logging.getLogger(__name__)
TASK = "sdquant"


def module(name: str) -> Any:
    """Return a module of the host, which it imports long before it loads extensions."""
    return importlib.import_module(name)


def has(name: str) -> bool:
    """Return whether the host has a module of this name."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show a text in the host's own progress line."""
    state: Any = getattr(module("modules.shared"), "state", None)
    before = getattr(state, "textinfo", None)
    if state is not None:
        state.textinfo = text
    log.info("%s", text)
    try:
        yield
    finally:
        if state is not None:
            state.textinfo = before


def tell(text: str) -> None:
    """Print a sentence to the host's console: by its own log, where it has one. SD.Next shows no other."""
    theirs: Any = getattr(module("modules.shared"), "log", log) if has("modules.shared") else log
    theirs.warning("%s", f"{TASK}: {text}")


def failed(error: SdquantError) -> None:
    """Show an error in the host's own error display."""
    module("modules.errors").display(expected(error), TASK)


def expected(error: SdquantError) -> Exception:
    """Return the error as one that the host shows without a traceback: in SD.Next, as a ValidationError."""
    kind = getattr(module("modules.errors"), "ValidationError", None)
    return error if kind is None else kind(str(error))
