"""Fifty times another model, scheme or offload: the process holds what it held after the first round.

Anonymous memory is counted, not what files have mapped, which the system takes back as it likes; and threads, open
files and temporary files.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from sdquant import demo
from sdquant.planning.request import make_request
from sdquant.ui.model_manager import Drawing, Engine

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="counts what /proc says")]

CYCLES = 50
COMBINATIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("digits-sd", {}),
    ("digits-sd", {"quant": "nf4", "offload": "balanced", "budget": "4MB"}),
    ("digits-flux", {"quant": "int8", "offload": "model"}),
    ("digits-sd", {"quant": "qint8", "offload": "sequential", "runtime": "plain"}),
    ("digits-flux", {"quant": "nf4", "offload": "group"}),
    ("digits-sd", {"quant": {"unet": "int4", "text_encoder": "int8"}, "offload": "model"}),
    ("digits-flux", {"quant": "fp8", "offload": "balanced", "budget": "8MB"}),
    ("digits-sd", {"quant": "qint4", "mode": "post"}),
    ("digits-flux", {}),
    ("digits-flux", {"quant": "sdnq-int8", "offload": "sequential"}),
)


def held() -> dict[str, int]:
    """Bytes of anonymous memory, and the numbers of threads, open files and temporary files."""
    gc.collect()
    rollup = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Anonymous:\s+(\d+) kB", rollup, re.MULTILINE)
    assert found is not None
    return {
        "bytes": int(found[1]) * 1024,
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "temporary": sum(1 for path in Path(tempfile.gettempdir()).rglob("*") if path.is_file()),
    }


def run() -> list[dict[str, int]]:
    """What is held after the first round of all combinations, and after each cycle from then on."""
    engine = Engine()

    def cycle(number: int) -> None:
        name, values = COMBINATIONS[number % len(COMBINATIONS)]
        asked = make_request(demo.path(name), progress=False, **values)
        engine.draw(asked, Drawing(prompt="a handwritten seven", steps=2, seed=number))
        if number % 3 == 0:  # the others are switches
            engine.unload()

    def after() -> dict[str, int]:
        engine.unload()
        return held()

    for number in range(len(COMBINATIONS)):
        cycle(number)
    seen = [after()]
    for number in range(CYCLES):
        cycle(number)
        if (number + 1) % len(COMBINATIONS) == 0:
            seen.append(after())
    return seen


def test_fifty_cycles_leave_what_the_first_round_left(tmp_path: Path) -> None:
    """In a process of its own: other tests would be counted too."""
    env = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", __name__], env=env, capture_output=True, text=True, check=False
    )
    assert out.returncode == 0, out.stderr
    first, *later = json.loads(out.stdout.splitlines()[-1])
    print(first, *later, sep="\n")
    assert len(later) == CYCLES / len(COMBINATIONS)
    last = later[-1]
    assert last["bytes"] <= 1.05 * first["bytes"], (first, later)
    for name in ("threads", "python threads", "files", "temporary"):
        assert last[name] <= first[name], (name, first, later)
    assert last["temporary"] == 0


if __name__ == "__main__":
    print(json.dumps(run()))
