"""One piece of memory of which blocks take parts, so that small ones do not each take the room of the largest."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ALIGN = 256  # bytes: what the allocators of cards align to


class Arena:
    """Parts of `flat` (uint8 [n]), each from the first gap that is large enough."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        self._taken: dict[int, int] = {}  # where a part begins, and where it ends

    def take(self, nbytes: int) -> Tensor | None:
        """A part of so many bytes, uint8 [nbytes]; None where no gap is as large."""
        begin = 0
        for start, stop in sorted(self._taken.items()):
            if begin + nbytes <= start:
                break
            begin = -(-stop // ALIGN) * ALIGN
        if begin + nbytes > self._flat.numel():
            return None
        self._taken[begin] = begin + nbytes
        return self._flat[begin : begin + nbytes]

    def give(self, part: Tensor) -> None:
        """Take a part back."""
        del self._taken[part.data_ptr() - self._flat.data_ptr()]
