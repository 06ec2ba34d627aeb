"""What is asked for ahead: the files in order, once, and never further than the window."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sdquant.formats import readahead
from sdquant.formats.readahead import Readahead


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="reads /proc to see which file is meant")
def test_each_byte_once_and_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readahead, "STEP", 100)
    monkeypatch.setattr(readahead, "WINDOW", 250)
    sizes = {"a": 130, "b": 0, "c": 420}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    asked: list[tuple[str, int]] = []

    def advise(file: int, start: int, length: int, _: int) -> None:
        assert length == 100
        asked.append((Path(os.readlink(f"/proc/self/fd/{file}")).name, start))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    ahead = Readahead([tmp_path / name for name in sizes])
    assert asked == [("a", 0), ("a", 100), ("c", 0)]
    ahead.advance(60)
    assert asked[3:] == [("c", 100)]
    ahead.advance(10_000)
    assert asked[4:] == [("c", 200), ("c", 300), ("c", 400)]
    ahead.close()
    held = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    assert not any(str(tmp_path) in os.readlink(path) for path in held if path.is_symlink())
