"""Files and folders are written whole or not at all: processes that are really killed, disks that are really full."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sdquant import ConflictError, DiskSpaceError, SettingsError, demo
from sdquant.models.detection import detect
from sdquant.saving.model_files import refuse_existing, save
from sdquant.utils import atomic_write
from sdquant.utils.atomic_write import whole_file, whole_folder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="kill -9, file modes and resource limits are POSIX's")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_second_signal_waits_until_what_was_written_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean, seen = atomic_write.remove, []

    def disturbed(path: Path) -> None:
        if path.suffix == ".gone" and path.exists():
            signal.raise_signal(signal.SIGINT)
            seen.append(path)
        clean(path)

    monkeypatch.setattr(atomic_write, "remove", disturbed)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test runner's worker may ignore it
    try:
        with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "a") as folder:
            (folder / "b").write_bytes(b"new")
            raise ValueError
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(seen) == 1
    assert names(tmp_path) == []


def test_a_part_is_made_in_its_folder_and_not_where_that_was(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "a") as folder, atomic_write.part_file(folder / "part", 3) as file:
        file.write(b"new")
    assert (tmp_path / "a" / "part").read_bytes() == b"new"
    with pytest.raises(SettingsError, match="part"), atomic_write.part_file(folder / "part", 3):
        pass
    assert names(tmp_path) == ["a"]


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
        monkeypatch.setattr(atomic_write, "_swap", lambda *_: False)
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


class TestTargets:
    """Where nothing can be written, or what is there must not go: an error of ours, and all stays as it was."""

    def test_of_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("a file")
        (tmp_path / "folder").mkdir()
        for path in (tmp_path / "a" / "b", tmp_path / "folder", tmp_path / ("x" * 300), tmp_path / "a\0b"):
            with pytest.raises(SettingsError) as caught, whole_file(path):
                pytest.fail("nothing can be there")
            assert str(path).replace("\0", "") in caught.value.what.replace("\0", "") and caught.value.why
        assert names(tmp_path) == ["a", "folder"] and (tmp_path / "a").read_text() == "a file"

    def test_of_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("a file")
        for path in (tmp_path / "a" / "b", tmp_path / ("x" * 300), tmp_path / "a\0b"):
            with pytest.raises(SettingsError), whole_folder(path):
                pytest.fail("nothing can be there")
        assert names(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "a file"

    @pytest.mark.parametrize("whole", [whole_file, whole_folder])
    def test_devices_and_pipes_stay(self, whole: Any, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "link").symlink_to("pipe")
        (tmp_path / "circle").symlink_to("circle")
        for name, word in (("pipe", "device or a pipe"), ("link", "device or a pipe"), ("circle", "circular link")):
            with pytest.raises(SettingsError, match=word), whole(tmp_path / name):
                pytest.fail("it would be gone")
            with pytest.raises(SettingsError, match=word):
                refuse_existing(tmp_path / name, overwrite=True)  # before any work
        assert (tmp_path / "pipe").is_fifo() and names(tmp_path) == ["circle", "link", "pipe"]

    @pytest.mark.parametrize("whole", [whole_file, whole_folder])
    def test_folders_that_it_takes_are_made(self, whole: Any, tmp_path: Path) -> None:
        place = tmp_path / "some" / "where" / "a"
        with pytest.raises(KeyboardInterrupt), whole(place):
            raise KeyboardInterrupt
        assert names(tmp_path) == []
        with whole(place):
            pass
        assert names(place.parent) == ["a"]

    def test_a_folder_of_other_things(self, tmp_path: Path) -> None:
        """`-o ~/models --overwrite` is a slip, and not the wish to be rid of them."""
        (tmp_path / "models").mkdir()
        refuse_existing(tmp_path / "models", overwrite=True)
        (tmp_path / "models" / "a.safetensors").write_text("a model")
        with pytest.raises(SettingsError, match="its contents would be deleted"):
            refuse_existing(tmp_path / "models", overwrite=True)
        (tmp_path / "models" / "config.json").write_text("{}")
        refuse_existing(tmp_path / "models", overwrite=True)


# Loads once, and for every line that it reads saves in a process of its own: its number, and how it ended.
SAVE = """
import os, sys
import torch
import sdquant
torch.set_num_threads(1)  # threads do not survive a fork
pipe = sdquant.load_model(sys.argv[1], "nf4", progress=False)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            sdquant.save(pipe, sys.argv[2], overwrite=True)
            code = 0
        finally:
            os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
MOMENTS = 16


def test_killed_while_saving_over_a_model(tmp_path: Path) -> None:
    """kill -9 at moments spread over the time that saving takes: the old model stays, or the new one is there."""
    target = tmp_path / "out"
    words = [sys.executable, "-W", "ignore", "-c", SAVE, str(demo.path("digits-sd")), str(target)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        _killed(target, server)
    assert server.returncode == 0
    assert names(tmp_path) == ["out"]  # what the killed ones had begun is gone


def _killed(target: Path, server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None and server.stdout is not None
    stdin, stdout = server.stdin, server.stdout

    def save(seconds: float | None = None) -> int:
        """How a process that saves ended; killed after some seconds, if it had not ended before."""
        stdin.write("\n")
        stdin.flush()
        child = int(stdout.readline())
        if seconds is not None:
            time.sleep(seconds)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        return int(stdout.readline())

    assert save() == 0
    begin = time.perf_counter()
    assert save() == 0
    took = time.perf_counter() - begin
    wanted = sorted(path.relative_to(target) for path in target.rglob("*"))
    ends = []
    for number in range(MOMENTS):
        ends.append(save(took * number / (MOMENTS - 1)))
        assert sorted(path.relative_to(target) for path in target.rglob("*")) == wanted
        assert detect(target).quant == "nf4"
        assert all(name == "out" or name.startswith(".sdquant-out.") for name in names(target.parent))
    assert set(ends) <= {0, -signal.SIGKILL} and ends.count(-signal.SIGKILL) >= 2
    assert save() == 0


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """The system refuses to write more than 100 KB into a file: the old file stays, and the error says what is up."""
    from sdquant.loading.loader import load_model

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
