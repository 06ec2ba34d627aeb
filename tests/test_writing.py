"""Files and folders are written whole or not at all: processes that are really killed, disks that are really full."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sdquant import ConflictError, DiskSpaceError, demo, writing
from sdquant.detection import detect
from sdquant.saving import save
from sdquant.writing import whole_file, whole_folder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="kill -9, file modes and resource limits are POSIX's")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class TestFile:
    def test_new(self, tmp_path: Path) -> None:
        with whole_file(tmp_path / "a", 3) as file:
            file.write(b"new")
        assert (tmp_path / "a").read_bytes() == b"new"
        mask = os.umask(0)
        os.umask(mask)
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o666 & ~mask
        assert names(tmp_path) == ["a"]

    def test_a_failure_leaves_the_old(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"old")
        with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "a") as file:
            file.write(b"half")
            raise KeyboardInterrupt
        assert (tmp_path / "a").read_bytes() == b"old"
        assert names(tmp_path) == ["a"]

    def test_mode_and_link_of_the_target_stay(self, tmp_path: Path) -> None:
        (tmp_path / "real").write_bytes(b"old")
        (tmp_path / "real").chmod(0o640)
        (tmp_path / "link").symlink_to("real")
        with whole_file(tmp_path / "link") as file:
            file.write(b"new")
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "real").read_bytes() == b"new"
        assert (tmp_path / "real").stat().st_mode & 0o777 == 0o640

    def test_a_long_name(self, tmp_path: Path) -> None:
        with whole_file(tmp_path / ("ä" * 127)) as file:
            file.write(b"new")
        assert names(tmp_path) == ["ä" * 127]

    def test_one_writer_at_a_time(self, tmp_path: Path) -> None:
        with whole_file(tmp_path / "a") as file:
            file.write(b"first")
            with pytest.raises(ConflictError, match="another process"), whole_file(tmp_path / "a"):
                pytest.fail("two at once")
            with whole_file(tmp_path / "b") as other:  # of another target
                other.write(b"second")
        assert (tmp_path / "a").read_bytes() == b"first"
        assert names(tmp_path) == ["a", "b"]

    def test_no_room_is_said_before_writing(self, tmp_path: Path) -> None:
        with pytest.raises(DiskSpaceError, match=f"takes {2**60} bytes") as caught, whole_file(tmp_path / "a", 2**60):
            pytest.fail("there cannot be that much")
        assert "Make room" in caught.value.fix
        assert names(tmp_path) == []


class TestFolder:
    def test_it_takes_the_place_of_the_old(self, tmp_path: Path) -> None:
        for word in ("old", "new"):
            with whole_folder(tmp_path / "a") as folder:
                (folder / word).write_text(word)
        assert names(tmp_path) == ["a"] and names(tmp_path / "a") == ["new"]

    def test_also_where_two_names_cannot_be_exchanged(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(writing, "_swap", lambda *_: False)
        self.test_it_takes_the_place_of_the_old(tmp_path)

    def test_a_file_is_replaced_too(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("a file")
        with whole_folder(tmp_path / "a") as folder:
            (folder / "new").write_text("new")
        assert names(tmp_path) == ["a"] and names(tmp_path / "a") == ["new"]

    def test_what_was_killed_between_two_renames_comes_back(self, tmp_path: Path) -> None:
        (tmp_path / ".sdquant-a.old").mkdir()
        (tmp_path / ".sdquant-a.old" / "old").write_text("old")
        (tmp_path / ".sdquant-a.tmp").mkdir()
        with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "a"):
            raise KeyboardInterrupt
        assert names(tmp_path) == ["a"] and names(tmp_path / "a") == ["old"]


SAVE = """
import sys
import sdquant
pipe = sdquant.load_model(sys.argv[1], "nf4", progress=False)
print("ready", flush=True)
sys.stdin.readline()
sdquant.save(pipe, sys.argv[2], overwrite=True)
print("done", flush=True)
"""


def test_killed_while_saving_over_a_model(tmp_path: Path) -> None:
    """kill -9 at moments spread over the time that saving takes: the old model stays, or the new one is there."""
    target = tmp_path / "out"
    words = [sys.executable, "-W", "ignore", "-c", SAVE, str(demo.path("digits-sd")), str(target)]

    def start() -> subprocess.Popen[str]:
        child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == "ready\n"
        child.stdin.write("\n")
        child.stdin.flush()
        return child

    child = start()
    begin = time.perf_counter()
    assert child.stdout is not None and child.stdout.readline() == "done\n"
    took = time.perf_counter() - begin
    child.communicate(timeout=60)
    wanted = sorted(path.relative_to(target) for path in target.rglob("*"))
    killed = 0
    for number in range(8):
        child = start()
        time.sleep(took * number / 7)
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=60)
        killed += child.returncode == -signal.SIGKILL
        assert sorted(path.relative_to(target) for path in target.rglob("*")) == wanted
        assert detect(target).quant == "nf4"
        assert all(name == "out" or name.startswith(".sdquant-out.") for name in names(tmp_path))
    assert killed >= 2
    child = start()
    child.communicate(timeout=60)
    assert child.returncode == 0
    assert names(tmp_path) == ["out"]  # what the killed ones had begun is gone


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """The system refuses to write more than 100 KB into a file: the old file stays, and the error says what is up."""
    from sdquant.loader import load_model

    pipe = load_model(demo.path("digits-sd"), "nf4", progress=False)
    save(pipe.unet, tmp_path / "unet.safetensors")
    before = (tmp_path / "unet.safetensors").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        with pytest.raises(DiskSpaceError, match="bytes"):
            save(pipe.unet, tmp_path / "unet.safetensors", overwrite=True)
        with pytest.raises(DiskSpaceError, match="bytes"):
            save(pipe, tmp_path / "folder")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert (tmp_path / "unet.safetensors").read_bytes() == before
    assert names(tmp_path) == ["unet.safetensors"]
