"""Memory for large results."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from . import extension

if TYPE_CHECKING:
    from torch import Tensor

_MAPPED = 32 << 20  # bytes from which on glibc asks the kernel for every block of memory, and gives it back


def in_large_pages(out: Tensor) -> Tensor:
    """`out`, just made. If its memory is new, Linux is asked for pages of 2 MB, where it gives them on request.

    Pages come as they are written to: 10,000 of them for 42 MB, which takes longer than an SDXL layer's products.
    """
    found = extension()
    if found is not None and out.nbytes >= _MAPPED:
        found.large_pages(struct.pack("2q", out.data_ptr(), out.nbytes))
    return out
