"""The host's own progress line and error display."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..errors import SdquantError

log = logging.getLogger(__name__)
TASK = "sdquant"


def module(name: str) -> Any:
    """A module of the host. It has been imported long before extensions are loaded."""
    return importlib.import_module(name)


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show what is being done where the host shows what it does."""
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


def failed(error: SdquantError) -> None:
    """Show an error as the host shows its own."""
    module("modules.errors").display(expected(error), TASK)


def expected(error: SdquantError) -> Exception:
    """The error as one that the host shows in a line: in SD.Next those that say all there is to say have a class."""
    kind = getattr(module("modules.errors"), "ValidationError", None)
    return error if kind is None else kind(str(error))
