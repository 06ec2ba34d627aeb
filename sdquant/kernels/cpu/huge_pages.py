"""Huge pages for large results."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from . import extension

if TYPE_CHECKING:
    from torch import Tensor

_MAPPED = 32 << 20  # bytes from which on glibc asks the kernel for every block of memory, and gives it back


def in_large_pages(out: Tensor) -> Tensor:
    """Return `out`, just allocated, after asking Linux for pages of 2 MB if its memory is new.

    Ordinary pages are mapped when they are first written: 10,000 page faults for 42 MB, which take longer than the
    GEMM of an SDXL layer.
    """
    module = extension()
    if module is not None and out.nbytes >= _MAPPED:
        module.large_pages(struct.pack("2q", out.data_ptr(), out.nbytes))
    return out
