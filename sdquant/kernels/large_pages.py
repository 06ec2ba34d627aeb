"""Pages of 2 MB for large results on a CPU, where those are faster.

Ordinary pages are mapped when they are first written: 10,000 page faults for 42 MB, which can take longer than the GEMM
of an SDXL layer. Large ones take fewer, but a virtual machine may have given them back to its host, which then takes
milliseconds for each: on a Zen 4 they took a third of the time of a product whose results are 113 MB. So the first
results of a size are written once in either, by turns.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from . import fastest, verdicts
from .cpu import extension

_MAPPED = 32 << 20  # bytes from which on glibc asks the kernel for every block of memory, and gives it back
_PAGE = 4096
_KIND = "pages"
_CPU = torch.device("cpu")


def in_large_pages(out: Tensor) -> Tensor:
    """Return `out`, just allocated, after asking Linux for pages of 2 MB if its memory is new and that is faster."""
    module = extension()
    if module is None or out.nbytes < _MAPPED:
        return out
    verdict = fastest.verdict_of(_KIND, out.nbytes >> 20, _CPU) if verdicts.tunes() else True
    if verdict is None:
        fastest.by_the_faster(_KIND, out.nbytes >> 20, lambda: _touched(out), lambda: _touched(_asked(out)))
    elif verdict:
        _asked(out)
    return out


def _asked(out: Tensor) -> Tensor:
    module = extension()
    assert module is not None
    module.large_pages(struct.pack("2q", out.data_ptr(), out.nbytes))
    return out


def _touched(out: Tensor) -> Tensor:
    """Return `out` after a write to each page, which maps it."""
    out.new_empty(0, dtype=torch.uint8).set_(out.untyped_storage())[::_PAGE].zero_()
    return out
