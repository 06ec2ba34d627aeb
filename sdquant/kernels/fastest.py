"""Which of two implementations is faster for products of a size: measured where the first ones are computed.

On a GPU some milliseconds for each power of two of rows. Between two calls its caches are written over, as the other
layers of a model do: else a weight of fewer bytes than the cache holds is read from there each time, and whoever reads
the most of it looks the best. What takes the processor longer than the card counts as that, since the card then waits.

On a CPU the first products are computed by turns by one and by the other, whose results have to be the same bits, so
that measuring costs next to nothing; a single thread is timed by its own clock, which stands while other programs run.
What is found is kept for the process, and in a file for the next one (`verdicts`). With SDQUANT_TUNE=0 nothing is
measured, and while a CUDA graph is recorded nothing can be: the usual implementation is taken then.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from time import get_clock_info, perf_counter, thread_time
from typing import Any, TypeVar

import torch

from . import verdicts

log = logging.getLogger(__name__)

_WARM, _TIMED = 3, 5
# Clock cycles that the GPU waits before what is timed, about a millisecond: launching it must not be what takes longer.
_CYCLES = 2_000_000
_LARGE_CACHE = 64 << 20  # bytes, where torch does not say how large a card's is
CALLS = 5  # of each implementation on a CPU, or 2 if all take so many seconds
_LONG = 0.5
_CLEARLY = 0.95  # of the usual one's least time: what the other one has to take at most on a CPU, in the median
# On Windows it is said to count 100 ns, and counts ticks of 16 ms.
_HAS_THREAD_TIME = sys.platform != "win32" and get_clock_info("thread_time").resolution < 1e-6
_verdicts: dict[Hashable, bool] = {}
_seen: dict[Hashable, tuple[list[float], list[float]]] = {}
_lookups: set[Hashable] | None = None
# Of what is found here, and around what is timed on a card, where products of two threads would slow each other down.
_lock = threading.RLock()
_T = TypeVar("_T")


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # the thread that held it, maybe for seconds, is not in the new process


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def prefers_other(
    kind: Hashable, rows: int, device: torch.device, usual: Callable[[], object], other: Callable[[], object]
) -> bool:
    """Return whether `other` is faster than `usual`, which compute the same but for rounding, for products like this
    one.

    Args:
        kind: what the choice depends on, but for the device and the number of `rows`. Its `repr` is kept in a file.
    """
    key = _key(kind, rows, device)
    verdict = _known(key)
    if verdict is None:
        may = _may_measure(device)
        if may and torch.cuda.is_current_stream_capturing():
            return False
        with _lock:
            verdict = _known(key)
            if verdict is None:
                verdict = _settle(key, _both(usual, other, device) if may else None)
    return verdict


def by_the_faster(kind: Hashable, rows: int, usual: Callable[[], _T], other: Callable[[], _T]) -> _T:
    """Compute a product on the CPU by whichever of two implementations is faster for such ones, and return it.

    Args:
        kind: as for `prefers_other`.
    """
    key = _key(kind, rows, torch.device("cpu"))
    verdict = _known(key)
    if verdict is None:
        if verdicts.tunes():
            return _by_turns(key, usual, other)
        _verdicts[key] = verdict = False
    return other() if verdict else usual()


def verdict_of(kind: Hashable, rows: int, device: torch.device) -> bool | None:
    """Return whether the other implementation was found to be faster; None if that is not known yet."""
    return _known(_key(kind, rows, device))


def is_settled(kind: Hashable, rows: int, device: torch.device) -> bool:
    """Return whether the usual implementation is to be preferred: as has been found, or while a CUDA graph is recorded,
    in which what is computed to find out would be computed again each time."""
    key = _key(kind, rows, device)
    verdict = _known_here(key)
    if verdict is None and _may_measure(device) and torch.cuda.is_current_stream_capturing():
        return not _known(key)
    return verdict is False


def verdicts_so_far() -> dict[Hashable, bool]:
    """Return what has been found in this process: by device, power of two of rows, and kind."""
    return dict(_verdicts)


@contextmanager
def lookups() -> Iterator[set[Hashable]]:
    """Yield the keys of `verdicts_so_far` that products look up meanwhile, those of other threads among them."""
    global _lookups
    before, _lookups = _lookups, set()
    try:
        yield _lookups
    finally:
        _lookups = before


def start_over(device: torch.device) -> None:
    """Forget what was found on a device, also in earlier runs of the program."""
    with _lock:
        for key in [key for key in list(_verdicts) if isinstance(key, tuple) and key[0] == device]:
            _verdicts.pop(key, None)
        _seen.clear()
    verdicts.drop_verdicts(device)


def _may_measure(device: torch.device) -> bool:
    return device.type == "cuda" and verdicts.tunes()


def _key(kind: Hashable, rows: int, device: torch.device) -> tuple[torch.device, int, Hashable]:
    return device, (rows - 1).bit_length(), kind


def _known_here(key: tuple[torch.device, int, Hashable]) -> bool | None:
    seen = _lookups  # another thread may stop recording
    if seen is not None:
        seen.add(key)
    return _verdicts.get(key)


def _known(key: tuple[torch.device, int, Hashable]) -> bool | None:
    verdict = _known_here(key)
    if verdict is None:
        value = verdicts.known(key[0], key[1:])
        if isinstance(value, bool) or (value is not None and len(value) == 2):
            verdict = _verdicts[key] = _is_faster(key[0], value) if isinstance(value, list) else value
    return verdict


def _settle(key: tuple[torch.device, int, Hashable], seconds: list[float] | None) -> bool:
    """Keep what two implementations take, None if the other one does not work, and return whether that is taken."""
    verdict = _verdicts[key] = seconds is not None and _is_faster(key[0], seconds)
    verdicts.keep(key[0], key[1:], seconds or False)
    return verdict


def _is_faster(device: torch.device, seconds: list[float]) -> bool:
    usual, other = seconds
    return other < usual * (_CLEARLY if device.type == "cpu" else 1.0)


def _by_turns(key: tuple[torch.device, int, Hashable], usual: Callable[[], _T], other: Callable[[], _T]) -> _T:
    with _lock:
        times = _seen.setdefault(key, ([], []))
        turn = len(times[1]) < len(times[0])
    clock = thread_time if _HAS_THREAD_TIME and torch.get_num_threads() == 1 else perf_counter
    start = clock()
    try:
        result = other() if turn else usual()
    except RuntimeError as error:
        if not turn:
            raise
        log.debug("An implementation is not used on the CPU: %s", error)
        _verdicts[key] = False
        return usual()
    seconds = clock() - start
    with _lock:
        times[turn].append(seconds)
        if _are_enough(*times) and _seen.get(key) is times:  # else another thread has decided meanwhile
            del _seen[key]
            _settle(key, [min(times[0]), statistics.median(times[1])])
    return result


def _are_enough(usual: list[float], other: list[float]) -> bool:
    both = min(len(usual), len(other))
    return both >= CALLS or (both >= 2 and sum(usual) + sum(other) >= _LONG)


def _both(usual: Callable[[], object], other: Callable[[], object], device: torch.device) -> list[float] | None:
    try:
        seconds = gpu_seconds(other, device)
    except RuntimeError as error:  # too large for the memory that is free, or for the library
        log.debug("An implementation is not used on %s: %s", device, error)
        return None
    return [gpu_seconds(usual, device), seconds]


def gpu_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that something takes on a GPU whose caches are cold, without launching it, or those of the
    processor for launching it, if that is more."""
    cuda: Any = torch.cuda
    with cuda.device(device):
        for _ in range(_WARM):
            run()
        waste = _waste(device)
        marks = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(_TIMED)]
        launching = []
        cuda._sleep(_CYCLES)
        for begin, end in marks:
            waste.zero_()
            begin.record()
            start = perf_counter()
            run()
            launching.append(perf_counter() - start)
            end.record()
        marks[-1][1].synchronize()
    on_card = statistics.median(begin.elapsed_time(end) for begin, end in marks) / 1e3
    return max(float(on_card), statistics.median(launching))


def _waste(device: torch.device) -> torch.Tensor:
    """Return memory on a card of twice the bytes of its second level of cache, or no more than is free."""
    bytes_of = torch.cuda.get_device_properties(device)
    size = 2 * int(getattr(bytes_of, "L2_cache_size", _LARGE_CACHE))
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:  # its caches stay warm then
        return torch.empty(0, dtype=torch.uint8, device=device)
