"""Whether the Triton kernels give the right numbers on the card: the cases of their tests, in many processes at once.

Most of the time is the compiler's, and what it makes stays in Triton's cache for the phases that follow.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Of the machine's processors, how many compile at once.
MOST_PROCESSES = 14
# After so many seconds what was looked at by then is told, before the phase is ended with all it knows.
SECONDS = 115
# Parts for each process: one that did not end loses what it looked at.
PARTS = 4


def measure(device: torch.device, small: bool) -> Iterator[dict[str, Any]]:
    """A row for each kind of check, with what is wrong in it, a line each."""
    processes = 1 if small else min(MOST_PROCESSES, max(1, (os.cpu_count() or 1) - 2))
    parts = 60 if small else processes * PARTS  # small: one part of so many
    if device.type != "cuda":
        os.environ["TRITON_INTERPRET"] = "1"  # before the processes import triton
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        begin = time.perf_counter()
        kinds = {"kernels": _kernels, "what backends encode": _encoded}
        waiting = {
            kind: [pool.submit(look, device.type, index, parts, small) for index in range(1 if small else parts)]
            for kind, look in kinds.items()
        }
        wait([future for futures in waiting.values() for future in futures], SECONDS)
        for kind, futures in waiting.items():
            row: dict[str, Any] = {"name": kind, "case": "right", "looked": 0, "wrong": []}
            for future in futures:
                if not future.done():
                    future.cancel()
                    row["wrong"].append("it did not end in time")
                    continue
                try:
                    looked, wrong = future.result()
                    row["looked"] += looked
                    row["wrong"] += wrong
                except Exception as error:  # a process that died: what it would have looked at is not known
                    row["wrong"].append(f"{type(error).__name__}: {error}"[:300])
            row["seconds"] = time.perf_counter() - begin
            if row["wrong"]:
                row["error"] = f"{len(row['wrong'])} of {row['looked']} are wrong"
            yield row


class _Heard(logging.Handler):
    """The warnings that kernels are not used."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _kernels(device: str, index: int, count: int, small: bool) -> tuple[int, list[str]]:
    """Part `index` of `count` of the kernels' cases: how many were looked at, and a line for each that is wrong."""
    from tests.kernels import triton_cases

    heard = _Heard()
    logging.getLogger("sdquant").addHandler(heard)
    looked, wrong = 0, []
    for name, look in list(triton_cases.looks(device, thorough=not small))[index::count]:
        looked += 1
        try:
            why = look()
        except Exception as error:  # a kernel that does not compile or launch is one of the things looked for
            why = f"{type(error).__name__}: {error}"[:300]
        if why:
            wrong.append(f"{name}: {why}")
    return looked, wrong + heard.lines


def _encoded(device: str, index: int, count: int, small: bool) -> tuple[int, list[str]]:
    """The same of weights as the backends encode them."""
    from tests.kernels import test_triton

    *wrong, last = test_triton.of_backends(device, index, count)
    return int(last.split()[0]), wrong
