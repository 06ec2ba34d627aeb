"""Start and control the worker processes that hold the models. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped,unused-ignore]  # required by accelerate, hence always there

from ...errors import SdquantError
from ...utils.signals import undisturbed
from ...utils.temp_dirs import temporary_folder

if TYPE_CHECKING:
    from .specs import LoadSpec

EVERY = 0.004  # seconds between two looks at a worker's memory
PATIENCE = 20.0  # seconds that a worker may take to end
ROOT = Path(__file__).parents[3]  # where the package is imported from

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Failed(Exception):
    """A worker could not execute a command.

    Attributes:
        kind: the error's class. text: sentences. parts: what, why and fix of an SdquantError; None for others.
    """

    def __init__(self, kind: str, text: str, parts: tuple[str, str, str] | None = None) -> None:
        super().__init__(text)
        self.kind, self.text, self.parts = kind, text, parts

    def as_error(self, what: str) -> SdquantError:
        """Return the failure as an error of this package."""
        if self.parts is not None:
            return SdquantError(*self.parts)
        return SdquantError(
            what, self.text.rstrip("."), "Run `sdquant plan` with the same arguments to see what it reports"
        )


class Worker:
    """One process.

    Attributes:
        peak, peak_resident: the most memory over that at `mark`, in bytes, seen while it was watched.
    """

    def __init__(self, job: LoadSpec) -> None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | dict.fromkeys(_THREADS, str(job.threads)) | {"PYTHONPATH": os.pathsep.join(paths)}
        self._says = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `end`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sdquant.evaluation.benchmark.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._says,
            env=env,
            start_new_session=os.name == "posix",  # Ctrl-C of the terminal is for the one that measures
        )
        self._answers: queue.Queue[bytes | None] = queue.Queue()
        self._early: list[bytes | None] = []  # answers that were waited for and not yet asked about
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._before = self._before_resident = 0
        self.peak = self.peak_resident = 0
        self._write(pickle.dumps(job))

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def ask(self, command: str, *, watch: bool = False, **values: Any) -> dict[str, Any]:
        """Send a command and wait for the answer.

        Args:
            watch: track its peak memory meanwhile.

        Raises:
            Failed: the command failed, or the process ended.
        """
        self.tell(command, **values)
        return self.answer(watch=watch)

    def tell(self, command: str, **values: Any) -> None:
        """Send a command; `answer` waits for its result."""
        self._write(json.dumps([command, values]).encode() + b"\n")

    def answer(self, *, watch: bool = False) -> dict[str, Any]:
        """Wait for the answer to the oldest command without one. Arguments and errors as for `ask`."""
        line = self._early.pop(0) if self._early else self._watched() if watch else self._answers.get()
        if line is None:
            raise self._ended()
        answer = json.loads(line)
        if "error" in answer:
            error = answer["error"]
            raise Failed(error["kind"], error["text"], None if error["parts"] is None else tuple(error["parts"]))
        result: dict[str, Any] = answer["ok"]
        return result

    def ready(self) -> None:
        """Wait until there is an answer, or the process has ended."""
        self._early.append(self._answers.get())

    def mark(self) -> None:
        """Take the memory that it uses now as the baseline for `peak` and `peak_resident`."""
        self._before, self._before_resident = memory_of(self.pid)

    def end(self) -> None:
        """End the process and its children, gracefully first so that it can remove its files."""
        started = _children(self.pid) if self._process.returncode is None else []
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        for impatience in (PATIENCE, PATIENCE / 2, None):
            try:
                self._process.wait(impatience)
                break
            except subprocess.TimeoutExpired:
                (self._process.terminate if impatience == PATIENCE else self._process.kill)()
        for child in started:
            with contextlib.suppress(psutil.Error):
                child.kill()
        self._reader.join(PATIENCE)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._says.close()

    def interrupt(self) -> None:
        """Ask it to stop in the middle of a command; `end` waits for that."""
        if self._process.poll() is None:
            self._process.terminate()

    def _write(self, raw: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: the answer says so
            self._process.stdin.write(raw)
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed under it
            for line in self._process.stdout:
                self._answers.put(line)
        self._answers.put(None)

    def _watched(self) -> bytes | None:
        while True:
            anonymous, resident = memory_of(self.pid)
            self.peak = max(self.peak, anonymous - self._before)
            self.peak_resident = max(self.peak_resident, resident - self._before_resident)
            try:
                return self._answers.get(timeout=EVERY)
            except queue.Empty:
                continue

    def _ended(self) -> Failed:
        code = self._process.wait()
        self._says.seek(0)
        last = [line for line in self._says.read().decode(errors="replace").splitlines() if line.strip()][-1:]
        how = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        more = ", usually because memory ran out" if code == -getattr(signal, "SIGKILL", 9) else ""
        output = f"; its last output: {last[0].strip()}" if last else ""
        return Failed("WorkerEnded", f"Its process {how}{more}{output}.")


def _children(pid: int) -> list[Any]:
    """Return the running descendants of a process."""
    try:
        children: list[Any] = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    return children


def memory_of(pid: int) -> tuple[int, int]:
    """Return the anonymous and resident bytes of a process; resident for both if anonymous memory is unknown."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        try:
            resident = int(psutil.Process(pid).memory_info().rss)
        except psutil.Error:
            resident = 0
        return resident, resident
    fields = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("RssAnon", "VmRSS"))}
    resident = int(fields.get("VmRSS", 0)) * 1024
    return int(fields["RssAnon"]) * 1024 if "RssAnon" in fields else resident, resident


def start(job: LoadSpec, workers: list[Worker]) -> Worker:
    """Start a worker for a job and add it to `workers`, with Ctrl-C deferred so that no process is orphaned."""
    with undisturbed():
        worker = Worker(job)
        workers.append(worker)
    return worker


@contextlib.contextmanager
def working() -> Iterator[tuple[Path, list[Worker]]]:
    """Yield a folder that the workers share, and a list of workers to add to.

    On exit all workers are ended, even in the middle of a command, and the folder is removed.
    """
    workers: list[Worker] = []
    with temporary_folder("sdquant-bench-") as folder:
        try:
            yield folder, workers
        finally:
            with undisturbed():
                for worker in workers:
                    worker.interrupt()
                for worker in workers:
                    worker.end()
