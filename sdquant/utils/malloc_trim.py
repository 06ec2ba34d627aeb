"""Limit on the freed memory that a process keeps while a model runs on the CPU.

glibc keeps freed pieces below 32 MB for whoever asks next. It fills a request from the piece that fits best, wherever
that lies, and before 2.38 often cannot use a freed piece again for torch, which asks for aligned memory (its bug
14581): so one operation after another touches pages that none had touched, and the process comes to hold several times
its activations. `trim_if_worthwhile` hands such pages back when they have become many. What is handed back costs a page
fault when it is used again: doing it always (glibc.malloc.mmap_threshold) takes 20 to 33 % of a UNet's step; what it
takes here is in docs/benchmarks.md (bench/plan_memory.py), up to 17 % where faults are slow. `SDQUANT_TRIM=0` in the
environment leaves freed memory to the C library, if there is memory to spare.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.compiler import is_compiling

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

SHARE, LEAST = 0.04, 48 << 20  # of what is in use, and bytes at the least: may be held without being used
LARGE = 1 << 18  # elements of activations: an operation with fewer makes nothing much, and ends before it is looked up
OFTEN = 1 << 20  # elements of operations between two looks: each takes 20 us of a model's step, its own code not cached

_STATM = "/proc/self/statm"  # in pages: the whole, what is resident, what of that files back, ...
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0

_limit = 0  # bytes that the process may hold before it is looked at more closely
_since = 0  # elements of operations since the last look


def look_beside(x: Tensor) -> None:
    """Count an operation with the activations `x`, if on the CPU and large; `trim_if_worthwhile` now and then."""
    global _since
    if not x.is_cpu or x.numel() < LARGE:
        return
    _since += x.numel()
    if _since >= OFTEN:
        _since = 0
        trim_if_worthwhile()


def trim_after(*models: nn.Module) -> Callable[[], None]:
    """Call `look_beside` on the inputs of every layer of the models; return a function that undoes it.

    Layers do not do so by themselves: one that is called alone would pay for memory that others have freed.
    """
    hooks = [
        module.register_forward_pre_hook(_before)
        for model in models
        for module in model.modules()
        if next(module.children(), None) is None
    ]

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


def _before(_: nn.Module, args: tuple[Any, ...]) -> None:
    if not is_compiling() and args and type(args[0]) is Tensor:
        look_beside(args[0])


def trim_if_worthwhile() -> None:
    """Return freed pages to the system if the process holds more than it needed so far plus `spare`."""
    global _limit
    if not _looks() or anonymous_bytes() <= _limit:
        return
    trim()
    now = anonymous_bytes()
    _limit = max(_limit, now + spare(now))


def spare(nbytes: int) -> int:
    """Return the freed bytes that a process that uses `nbytes` may keep; 0 if trimming is off."""
    return max(LEAST, int(SHARE * nbytes)) if _looks() else 0


def forget() -> None:
    """Reset the measurements: a model was loaded or released, so the memory needed so far is no guide."""
    global _limit, _since
    _limit = _since = 0


def anonymous_bytes() -> int:
    """Return the resident bytes of this process that no file backs; 0 if the system does not tell."""
    try:
        file = os.open(_STATM, os.O_RDONLY)
    except OSError:  # no /proc, or no more files may be open: nothing that a computing model should end for
        return 0
    try:
        _, resident, shared, *_ = os.read(file, 128).split()
    finally:
        os.close(file)
    return (int(resident) - int(shared)) * _PAGE


@cache
def _looks() -> bool:
    return os.environ.get("SDQUANT_TRIM") != "0" and _malloc_trim() is not None and anonymous_bytes() > 0


class Trimmer:
    """Calls `trim` whenever `step` bytes have been processed, so that freed memory does not pile up."""

    def __init__(self, step: int = 8 << 20) -> None:
        self._step, self._since = step, 0

    def add(self, nbytes: int) -> None:
        """Record that `nbytes` more bytes were processed."""
        self._since += nbytes
        if self._since >= self._step:
            self._since = 0
            trim()


def trim() -> None:
    """Let the C library hand freed memory to the system; glibc keeps up to twice the model otherwise."""
    returns = _malloc_trim()
    if returns is not None:
        returns(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's function of that name; None if there is none (musl, other systems)."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
