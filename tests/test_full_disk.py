"""A disk that is really full: a small file system of its own, mounted for one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from typing import Any

import pytest

from .malformed import tiny

# One worker takes all of these: what they share takes seconds to make.
pytestmark = pytest.mark.xdist_group("full disk")

ROOM = 1 << 20  # bytes of the file system
# Saves the tiny model where there is room for it, and then where there is less and less. One line of JSON for each.
SCRIPT = """
import contextlib, json, os, sys
from pathlib import Path

import sdquant
from sdquant.utils import atomic_write
from sdquant.saving.export_gguf import quantize_file

source, disk = sys.argv[1], Path(sys.argv[2])
model = sdquant.load_model(source, "int8", runtime="plain", progress=False)


def files():
    return {str(path.relative_to(disk)): hash(path.read_bytes()) for path in disk.rglob("*") if path.is_file()}


def leave(room):
    (disk / "ballast").unlink(missing_ok=True)
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "ballast").write_bytes(bytes(free - room))


def attempt(name, call):
    before, free = files(), os.statvfs(disk).f_bavail
    said = {"name": name, "error": None}
    try:
        call()
    except sdquant.SdquantError as error:
        said |= {"error": type(error).__name__, "what": error.what, "why": error.why, "fix": error.fix}
    said |= {"same": files() == before, "room": os.statvfs(disk).f_bavail == free}
    print(json.dumps(said), flush=True)


calls = {
    "file": lambda: sdquant.save(model, disk / "model.safetensors", overwrite=True),
    "folder": lambda: sdquant.save(model, disk / "folder", overwrite=True),
    "gguf": lambda: quantize_file(source, "q8_0", disk / "model.gguf", overwrite=True, progress=False),
    "gguf folder": lambda: quantize_file(source, "q8_0", disk / "gguf", overwrite=True, progress=False),
}
for name, call in calls.items():
    attempt(f"sound {name}", call)
leave(16384)
for name, call in calls.items():
    attempt(f"seen before {name}", call)
atomic_write.require_space = lambda *_: None  # as if somebody else had filled the disk after it was asked
for name, call in calls.items():
    attempt(f"in the middle {name}", call)
leave(0)
for name, call in calls.items():
    attempt(f"no byte {name}", call)
(disk / "ballast").unlink()
for name in ("model.safetensors", "folder", "model.gguf", "gguf"):
    sdquant.verify(disk / name)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the script says, by name."""
    folder = tmp_path_factory.mktemp("full")
    disk = folder / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size={ROOM} none "$0"'
    for words in (["unshare", "-m"], ["unshare", "-rm"]):
        try:
            done = subprocess.run([*words, "sh", "-c", mount, str(disk)], capture_output=True, text=True)
        except OSError as error:
            pytest.skip(f"no file system of its own: {error}")
        if done.returncode == 0:
            break
    else:
        pytest.skip(f"no file system of its own: {done.stderr.strip()}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what other libraries say while they are imported
        source = tiny(folder / "model")
    command = [*words, "sh", "-c", f'{mount} && exec "$@"', str(disk)]
    command += [sys.executable, "-W", "ignore", "-c", SCRIPT, str(source), str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONHASHSEED": "0"})
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert not list(disk.iterdir())  # nothing was written under the mount
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", ["file", "folder", "gguf", "gguf folder"])
class TestFullDisk:
    def test_where_there_is_room(self, name: str, said: dict[str, dict[str, Any]]) -> None:
        """The control."""
        assert said[f"sound {name}"]["error"] is None and not said[f"sound {name}"]["same"]

    @pytest.mark.parametrize("when", ["seen before", "in the middle", "no byte"])
    def test_the_old_stays_and_nothing_is_left(self, when: str, name: str, said: dict[str, dict[str, Any]]) -> None:
        row = said[f"{when} {name}"]
        assert row["error"] == "DiskSpaceError", row
        assert row["same"] and row["room"], row
        assert "/disk/" in row["what"] and row["fix"]

    def test_the_bytes_that_it_takes_are_named(self, name: str, said: dict[str, dict[str, Any]]) -> None:
        for when in ("seen before", "in the middle"):
            why = said[f"{when} {name}"]["why"]
            needed = int(why.split("it takes ")[1].split()[0])
            assert 16384 < needed < ROOM and "are free there" in why
