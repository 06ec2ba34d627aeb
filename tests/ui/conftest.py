"""A running server, with folders beside its own that it must not read."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..patience import PATIENCE

SECRET = "canary-7f3a91c4"  # in files that must never be read


@dataclass(frozen=True)
class Served:
    """A server in a process of its own.

    Attributes:
        url, port: where it is. process: the process. log: the file with all that it says; a pipe would fill up.
        models: the folder given with --models. outside: a folder beside it, whose name begins with the same letters,
            with a file that holds SECRET.
        temporary: the folder that its temporary files are made in.
    """

    url: str
    port: int
    process: subprocess.Popen[str]
    models: Path
    outside: Path
    temporary: Path
    log: Path

    def end(self, number: int = signal.SIGTERM, seconds: float = PATIENCE) -> int:
        """End it by a signal and return its exit code."""
        self.process.send_signal(number)
        return self.process.wait(seconds)


Start = Callable[..., Served]


def start(
    place: Path, *args: str, module: Sequence[str] = ("tests.ui.small_page",), env: Mapping[str, str] | None = None
) -> Served:
    """Start `python -m module --port 0 --models ... args` in a folder of its own, and wait until it serves."""
    models, outside, temporary = place / "models", place / "models-private", place / "tmp"
    for folder in (models, outside, temporary):
        folder.mkdir(parents=True)
    (outside / "secret.safetensors").write_text(SECRET)
    (models / "link.safetensors").symlink_to(outside / "secret.safetensors")
    (models / "out").symlink_to(outside)
    log = place / "log.txt"
    around = {
        **os.environ,
        "TMPDIR": str(temporary),
        "PYTHONUNBUFFERED": "1",
        "GRADIO_SHARE": "True",  # what the user's environment says of other Gradio apps must change nothing
        "GRADIO_ALLOWED_PATHS": "/",
        "GRADIO_ROOT_PATH": "/elsewhere",
        **(env or {}),
    }
    command = [sys.executable, "-m", *module, "--port", "0", "--models", str(models), *args]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True, env=around)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if found := re.search(r"http://\S+?:(\d+)", log.read_text()):
            return Served(found[0], int(found[1]), process, models, outside, temporary, log)
        if process.poll() is not None:
            break
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no server: {log.read_text()}")


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """A function that starts a server; all are ended at the end."""
    running: list[Served] = []

    def begin(*args: str, **how: object) -> Served:
        served = start(tmp_path_factory.mktemp("served"), *args, **how)  # type: ignore[arg-type]
        running.append(served)
        return served

    yield begin
    for served in running:
        if served.process.poll() is None:
            served.process.kill()
        served.process.wait()


@pytest.fixture(scope="session")
def server(serve: Start) -> Served:
    """A server with a small page."""
    return serve()
