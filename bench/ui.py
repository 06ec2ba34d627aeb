"""How long the page takes: from the command to the first answer, and from the address to a page that can be used.

    python -m bench.ui [--runs 5] [--out bench/results/ui.json]

Each run starts `sdquant ui` anew, and a chromium with an empty profile that opens the page twice: for the first time,
and again with what it has kept. The page can be used when the button Draw can be pressed. Seconds are of wall clock,
but for `cpu`, the server's own user and system time until its first answer. The files of Python and of the browser are
in memory already: a run before the others, which is not counted, brings them there.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from bench.fidelity import machine, versions

RESULTS = Path(__file__).parent / "results" / "ui.json"
PROMISED = 2.0  # seconds, of the first page
_FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")


@contextmanager
def server(place: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """A running `sdquant ui`: its address, and what it took until its first answer."""
    command = [sys.executable, "-m", "sdquant", "ui", "--no-browser", "--port", "0"]
    command += ["--settings", str(place / "settings.json")]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        if found is None:
            raise RuntimeError("`sdquant ui` did not start")
        with urllib.request.urlopen(found[0]) as answer:
            answer.read()
        times = psutil.Process(process.pid).cpu_times()
        yield found[0], {"start": time.perf_counter() - begin, "cpu": times.user + times.system}
    finally:
        process.terminate()
        process.wait()


def page(url: str) -> dict[str, float]:
    """A new chromium opens the page, and again: seconds until it can be used; bytes and requests of the first time."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=chromium, args=list(_FLAGS), viewport={"width": 1280, "height": 900}
        )
        tab = context.new_page()
        told: list[float] = []
        session = context.new_cdp_session(tab)
        session.send("Network.enable")
        session.on("Network.loadingFinished", lambda event: told.append(event["encodedDataLength"]))
        first = _opened(tab, url)
        seen = {"first": first, "bytes": sum(told), "requests": len(told), "again": _opened(tab, url)}
        context.close()
    return seen


def _opened(tab: Any, url: str) -> float:
    begin = time.perf_counter()
    tab.goto(url, wait_until="commit")
    tab.wait_for_selector("#draw:not([disabled])", timeout=60_000)
    return time.perf_counter() - begin


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, and hold the first page against the promise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    runs: list[dict[str, float]] = []
    for number in range(args.runs + 1):
        with tempfile.TemporaryDirectory() as place, server(Path(place)) as (url, took):
            seen = {**took, **page(url)}
        if number:
            runs.append(seen)
            print(", ".join(f"{name} {value:.4g}" for name, value in seen.items()), flush=True)
    median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    args.out.write_text(
        json.dumps({"machine": machine(), "versions": versions(), "median": median, "runs": runs}, indent=1) + "\n"
    )
    print("median: " + ", ".join(f"{name} {value:.4g}" for name, value in median.items()))
    return 0 if median["first"] <= PROMISED else 1


if __name__ == "__main__":
    raise SystemExit(main())
