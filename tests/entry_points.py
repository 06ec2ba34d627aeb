"""What each way to look at a model says of it: they have to say the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import sdquant
from sdquant.errors import SdquantError

WAYS: Mapping[str, Callable[..., Any]] = {
    "detect": sdquant.detect,
    "verify": sdquant.verify,
    "plan": sdquant.plan,
    "load_model": lambda path: sdquant.load_model(path, progress=False),
}


def answers(path: Path, ways: Mapping[str, Callable[..., Any]] = WAYS) -> dict[str, SdquantError | None]:
    """The error of each way, None where it has none. What is no SdquantError passes through."""
    said: dict[str, SdquantError | None] = {}
    for name, ask in ways.items():
        try:
            ask(path)
            said[name] = None
        except SdquantError as error:
            said[name] = error
    return said


def one_answer(path: Path, kind: type[SdquantError], *words: str) -> SdquantError:
    """The error that all have in common: of this kind, with these words, naming the model and a way out."""
    said = answers(path)
    first = said["load_model"]
    assert type(first) is kind, (first, said)
    for name, error in said.items():
        assert type(error) is kind, (name, error)
        for word in words:
            assert word in str(error), (name, word, str(error))
        assert str(path) in str(error), (name, str(error))
        assert error is not None and error.what and error.why and error.fix
        assert "Traceback" not in str(error)
    return first


def copied(folder: Path, place: Path) -> Path:
    """A copy of a folder that a test may change."""
    return Path(shutil.copytree(folder, place))
