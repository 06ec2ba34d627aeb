"""The name of this machine's processor."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """Return the name of the processor, as Linux has it, else the kind of machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
