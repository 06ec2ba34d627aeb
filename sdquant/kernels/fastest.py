"""Which of two implementations is faster for products of a size on a GPU: measured when the first one is computed.

Some milliseconds for each power of two of rows, kept while the process runs. With SDQUANT_TUNE=0 nothing is measured,
and while a CUDA graph is recorded nothing can be: the usual implementation is taken then.
"""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Callable, Hashable
from itertools import pairwise
from typing import Any

import torch

log = logging.getLogger(__name__)

_WARM, _TIMED = 3, 5
# Clock cycles that the GPU waits before what is timed, about a millisecond: launching it must not be what takes longer.
_CYCLES = 2_000_000
_found: dict[Hashable, bool] = {}


def prefers_other(
    kind: Hashable, rows: int, device: torch.device, usual: Callable[[], object], other: Callable[[], object]
) -> bool:
    """Return whether `other` is faster than `usual`, which compute the same but for rounding, for products like this
    one.

    Args:
        kind: what the choice depends on, but for the device and the number of `rows`.
    """
    key = (device, (rows - 1).bit_length(), kind)
    known = _found.get(key)
    if known is None:
        tunes = device.type == "cuda" and os.environ.get("SDQUANT_TUNE") != "0"
        if tunes and torch.cuda.is_current_stream_capturing():
            return False
        known = _found[key] = tunes and _slower(usual, other, device)
    return known


def is_settled(kind: Hashable, rows: int, device: torch.device) -> bool:
    """Return whether `prefers_other` has said that it prefers the usual implementation."""
    return _found.get((device, (rows - 1).bit_length(), kind)) is False


def _slower(usual: Callable[[], object], other: Callable[[], object], device: torch.device) -> bool:
    try:
        seconds = _seconds(other, device)
    except RuntimeError as error:  # too large for the memory that is free, or for the library
        log.debug("An implementation is not used on %s: %s", device, error)
        return False
    return seconds < _seconds(usual, device)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    cuda: Any = torch.cuda
    with cuda.device(device):
        for _ in range(_WARM):
            run()
        cuda._sleep(_CYCLES)
        marks = [cuda.Event(enable_timing=True) for _ in range(_TIMED + 1)]
        for mark in marks[:-1]:
            mark.record()
            run()
        marks[-1].record()
        marks[-1].synchronize()
    return float(statistics.median(one.elapsed_time(two) for one, two in pairwise(marks)))
