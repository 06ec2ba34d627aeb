"""Rows of a weight split among as many threads as torch uses; kernels release the GIL while they run."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Any

import torch

_LARGE = 1 << 20  # weights a thread: below, starting it costs more than it saves
ALONE = 2 * _LARGE  # so many are left to one thread
_STEP = 32  # rows: so that no two threads write into one cache line, and panels are full


def over_rows(rows: int, work: int, run: Callable[[int, int], Any], step: int = _STEP) -> None:
    """Call `run(start, stop)` for all rows, a multiple of `step` at a time. `work`: multiplications per row."""
    count = min(torch.get_num_threads(), rows * work // _LARGE, rows // step)
    if count < 2:
        run(0, rows)
        return
    share = -(-rows // (count * step)) * step
    spans = [(start, min(start + share, rows)) for start in range(0, rows, share)]
    others = [_pool(os.getpid(), count - 1).submit(run, *span) for span in spans[1:]]
    try:
        run(*spans[0])
    finally:
        wait(others)  # they write into the caller's memory
    for one in others:
        one.result()


@lru_cache(maxsize=1)
def _pool(process: int, size: int) -> ThreadPoolExecutor:
    """Return the thread pool of this process: a fork has none of its parent's threads."""
    return ThreadPoolExecutor(size, thread_name_prefix="sdquant")
