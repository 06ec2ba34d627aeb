"""Memory of processes, and of the machine before they start."""

from __future__ import annotations

import mmap
from pathlib import Path


def touch(nbytes: int) -> None:
    """Use and free memory, so that the next process gets pages which the host of a virtual machine has given already.

    Without this its first use of each page is a fault in the host too, which is the larger part of the system time and
    depends on what ran before.
    """
    with mmap.mmap(-1, nbytes) as area:
        for start in range(0, nbytes, mmap.PAGESIZE):
            area[start] = 1


def anonymous(pid: int) -> int:
    """Anonymous bytes of a process, 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("RssAnon")), 0)
