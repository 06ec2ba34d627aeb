"""Whether a change of the code cost speed or memory: this tree beside another, in turns.

    git worktree add ../before REVISION && (cd ../before && python setup.py -q build_ext --inplace)
    python -m bench.trees ../before [--rounds 5] [--json FILE]

Each round runs the same measurements in a fresh process for each tree, with one thread, first one and then the other.
Times are CPU time, since other programs may run beside; memory is the most anonymous memory over what the imports took.
A ratio is this tree's figure over the other's, the median over the rounds. Only names that users call are used, so that
older trees can be measured as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
MODELS = ("digits-sd", "digits-flux")
SCHEMES = ("nf4", "fp8", "int8", "qint8", "sdnq-int8")
ROWS = (1, 16, 512)
WIDTH = 3072
PROMPT, SIZE = "a handwritten seven", 32  # pixels: the size that both models draw


def cpu_seconds(work: Callable[[], Any], times: int) -> float:
    """Return the median CPU time of a call in seconds, after one that is not counted."""
    work()
    spent = []
    for _ in range(times):
        begin = time.process_time()
        work()
        spent.append(time.process_time() - begin)
    return statistics.median(spent)


def measure() -> dict[str, float]:
    """Return all figures of the tree that is imported here, by name: CPU seconds, or bytes for "memory"."""
    begin = time.process_time()
    import sdquant

    figures = {"import sdquant": time.process_time() - begin}
    import torch
    from torch import nn

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for model in MODELS:
        path = sdquant.demo.path(model)
        figures[f"plan {model}"] = cpu_seconds(lambda path=path: sdquant.plan(path, "nf4", offload="balanced"), 3)
        figures[f"plan {model}, auto"] = cpu_seconds(lambda path=path: sdquant.plan(path, "auto", offload="auto"), 1)
        for scheme in ("nf4", "int8"):
            figures[f"load {model} {scheme}"] = cpu_seconds(
                lambda path=path, scheme=scheme: sdquant.load_model(path, scheme, progress=False), 2
            )
        for offload, budget in (("none", None), ("balanced", "4MB")):
            pipe = sdquant.load_model(path, "nf4", offload, budget=budget, progress=False)
            pipe.set_progress_bar_config(disable=True)
            figures[f"draw {model} nf4 {offload}"] = cpu_seconds(
                lambda pipe=pipe: pipe(PROMPT, num_inference_steps=4, height=SIZE, width=SIZE), 3
            )
    x = {rows: torch.randn(rows, WIDTH, dtype=torch.bfloat16) for rows in ROWS}
    for scheme in SCHEMES:
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH)).bfloat16().requires_grad_(False)
        sdquant.quantize(net, scheme, runtime="plain", progress=False)
        for rows in ROWS:
            figures[f"linear {scheme}, {rows} rows"] = cpu_seconds(lambda net=net, rows=rows: net(x[rows]), 9)
    figures["memory of a load"] = _peak(
        lambda: sdquant.load_model(sdquant.demo.path("digits-flux"), "nf4", progress=False)
    )
    return figures


def _peak(work: Callable[[], Any]) -> float:
    """Return the bytes of anonymous memory that a call takes at the most, over what was there before."""
    before, peak, is_done = _anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.wait(0.002):
            peak = max(peak, _anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        kept = work()
    finally:
        is_done.set()
        watcher.join()
    del kept
    return max(0, peak - before)


def _anonymous() -> int:
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def in_tree(tree: Path) -> dict[str, float]:
    """Measure a tree in a fresh process."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--measure"],
        cwd=tree, check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(other: Path, rounds: int) -> dict[str, Any]:
    """Return the figures of both trees and their ratios."""
    runs: list[tuple[Mapping[str, float], Mapping[str, float]]] = []
    for number in range(rounds):
        trees = (HERE, other) if number % 2 else (other, HERE)
        found = {tree: in_tree(tree) for tree in trees}
        runs.append((found[HERE], found[other]))
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    rows = []
    for name in runs[0][0]:
        ours, theirs = ([run[side][name] for run in runs] for side in (0, 1))
        ratios = [a / b for a, b in zip(ours, theirs, strict=True) if b]
        row = {"name": name, "case": "this tree over the other", "this": statistics.median(ours)}
        row |= {"other": statistics.median(theirs), "ratios": ratios}
        rows.append(row | {"ratio": statistics.median(ratios) if ratios else None})
    return {"this": _revision(HERE), "other": _revision(other), "rounds": rounds, "rows": rows}


def _revision(tree: Path) -> str:
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Compare, print a table, and write it if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("other", nargs="?", type=Path, help="the other tree")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--measure", action="store_true", help="measure the tree that is imported, for the parent")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure()))
        return
    if args.other is None:
        parser.error("the path of the other tree is missing")
    result = compare(args.other.resolve(), args.rounds)
    for row in result["rows"]:
        print(f"{row['name']:40} {row['this']:12.6g} {row['other']:12.6g} {row['ratio'] or float('nan'):6.2f}")
    if args.json is not None:
        from bench import _results

        _results.write(args.json, "trees", **result)


if __name__ == "__main__":
    main()
