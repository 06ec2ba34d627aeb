"""Temporary folders: Ctrl-C at the worst moments leaves none."""

from __future__ import annotations

import gc
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sdquant.offload.host_store import DiskStore
from sdquant.utils.temp_dirs import temporary_folder


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """As Python has it from a terminal: a shell's background jobs ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupting(real: Any) -> Any:
    """What `real` does, with Ctrl-C pressed just before it returns."""

    def run(*args: Any, **kwargs: Any) -> Any:
        done = real(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)
        return done

    return run


def interrupted_first(real: Any) -> Any:
    """What `real` does, with Ctrl-C pressed just before it begins."""

    def run(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return real(*args, **kwargs)

    return run


def test_interrupted_when_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", interrupting(tempfile.mkdtemp))
    with pytest.raises(KeyboardInterrupt), temporary_folder("sdquant-"):
        pytest.fail("the block was entered")
    with pytest.raises(KeyboardInterrupt):
        DiskStore(tmp_path)
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_interrupted_when_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "rmtree", interrupted_first(shutil.rmtree))
    with pytest.raises(KeyboardInterrupt), temporary_folder("sdquant-") as folder:
        (folder / "a").write_text("a")
    store = DiskStore(tmp_path)
    store.add([torch.zeros(3)])
    with pytest.raises(KeyboardInterrupt):
        store.close()
    assert not list(tmp_path.iterdir())


def test_a_failing_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ValueError, match="as it was"), temporary_folder("sdquant-") as folder:
        assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
        raise ValueError("as it was")
    assert not folder.exists()
