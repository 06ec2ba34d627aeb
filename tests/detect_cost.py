"""A script: what looking into files takes. `python detect_cost.py SOUND` answers each line with a line of JSON.

A line is a JSON list of a path and its header's length. SOUND is looked into first, so that all that is imported is
there; then each file in a process forked from that one, with its address space limited.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

LIMIT = 20  # seconds for one file: far more than any takes, and far less than a hang
SPARE = 64 << 20  # bytes that looking may take beside twice the header


def _memory() -> dict[str, int]:
    """Of this process, in bytes: its address space, what of it is in memory, and the most that was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if line.startswith("Vm"))
    return {name: int(fields[name].split()[0]) << 10 for name in ("VmSize", "VmRSS", "VmHWM")}


def _look(path: str, header: int) -> dict[str, Any]:
    """In a forked process: what `detect` says, and the memory and time that it took.

    Not `getrusage`: its ru_maxrss is never less than that of the process which started this one.
    """
    from sdquant import SdquantError, detect

    before = _memory()
    resource.setrlimit(resource.RLIMIT_AS, (before["VmSize"] + SPARE + 2 * header,) * 2)
    signal.alarm(LIMIT)
    begin = time.perf_counter()
    try:
        said, refused = f"{detect(path).tensors} tensors", False
    except SdquantError as error:
        said, refused = f"{type(error).__name__}: {error}", True
    seconds = time.perf_counter() - begin
    signal.alarm(0)
    return {
        "said": said[:500],
        "length": len(said),
        "refused": refused,
        "bytes": _memory()["VmHWM"] - before["VmRSS"],
        "seconds": round(seconds, 3),
    }


def main(sound: str) -> None:
    """Look into each file that a line names."""
    from sdquant import detect

    detect(sound)
    for line in sys.stdin:
        path, header = json.loads(line)
        pid = os.fork()
        if pid == 0:
            answer: dict[str, Any] = {"raw": "ended"}
            try:
                answer = _look(path, header)
            except BaseException as error:
                answer = {"raw": repr(error)[:500]}
            finally:
                print(json.dumps(answer), flush=True)
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status:
            print(json.dumps({"raw": f"ended by signal {status}"}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
