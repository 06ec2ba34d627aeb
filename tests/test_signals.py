"""Ctrl-C and SIGTERM: never lost, and not raised where that would break something."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from sdquant.utils import signals
from sdquant.utils.signals import Stop

SLOW = """
import signal, time
signal.raise_signal(signal.{name})
for _ in range(10):
    time.sleep(0.01)
"""


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    """A module that is interrupted while it is imported."""
    own = folder.name  # that of the test
    folder.joinpath(f"{own}.py").write_text(SLOW.format(name=name))
    monkeypatch.syspath_prepend(folder)
    return own


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_in_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, code: int
) -> None:
    imported = module(tmp_path, monkeypatch, name)
    stop = Stop()
    with pytest.raises(KeyboardInterrupt), stop:
        __import__(imported)
        time.sleep(30)
    assert imported in sys.modules, "the import was not finished"
    assert stop.say() == code
    assert capsys.readouterr().err == f"sdquant: {'terminated' if code == 143 else 'interrupted'}\n"


def test_an_import_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "PATIENCE", 0.04)
    imported = module(tmp_path, monkeypatch, "SIGINT")
    with pytest.raises(KeyboardInterrupt), Stop():
        __import__(imported)
    assert imported not in sys.modules


class Interrupted:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_in_a_finalizer(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Stop():
        one = Interrupted()
        del one
        time.sleep(30)
    assert time.monotonic() - began < 20
    assert not capsys.readouterr().err


def test_other_errors_in_finalizers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __del__(self) -> None:
            raise ValueError("as it was")

    said = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: said.append(str(report.exc_value)))
    before = sys.unraisablehook
    with Stop():
        one = Failing()
        del one
    assert said == ["as it was"]
    assert sys.unraisablehook is before


def test_handlers_as_they_were() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Stop():
        assert signal.getsignal(signal.SIGINT) not in before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
