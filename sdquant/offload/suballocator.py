"""Suballocate one buffer for blocks, so that small ones do not each take the memory of the largest."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ALIGN = 256  # bytes: the alignment of GPU allocators


class Places:
    """Allocator of parts within `slots` slots of `slot` bytes each. Small parts share a slot, so that other slots stay
    whole for large ones, which would otherwise have to wait for adjacent parts to be freed."""

    def __init__(self, slots: int, slot: int) -> None:
        self._slot = slot
        self._taken: list[dict[int, int]] = [{} for _ in range(slots)]  # begin -> end

    def take(self, nbytes: int) -> int | None:
        """Allocate `nbytes` in the smallest gap that fits, preferably in a slot in use. Return the offset in bytes, or
        None if there is no gap."""
        gaps = [
            (not taken, stop - start, number, start)
            for number, taken in enumerate(self._taken)
            for start, stop in _gaps(taken, self._slot)
            if stop - start >= nbytes
        ]
        if not gaps:
            return None
        _, _, number, start = min(gaps)
        self._taken[number][start] = start + nbytes
        return number * self._slot + start

    def give(self, begin: int) -> None:
        """Free the part that begins at this offset."""
        number, start = divmod(begin, self._slot)
        del self._taken[number][start]


class Arena:
    """Allocator of parts of `flat` (uint8 [n * slot]), each within one of n slots."""

    def __init__(self, flat: Tensor, slot: int) -> None:
        self._flat = flat
        self._places = Places(flat.numel() // slot if slot else 0, slot)

    def take(self, nbytes: int) -> Tensor | None:
        """Allocate a part, uint8 [nbytes]; None if there is no room."""
        begin = self._places.take(nbytes)
        return None if begin is None else self._flat[begin : begin + nbytes]

    def give(self, part: Tensor) -> None:
        """Free a part."""
        self._places.give(part.data_ptr() - self._flat.data_ptr())


def _gaps(taken: dict[int, int], size: int) -> list[tuple[int, int]]:
    """Return the gaps of a slot as (begin, end) in bytes; each begins at a multiple of ALIGN."""
    begins = [0, *(-(-stop // ALIGN) * ALIGN for _, stop in sorted(taken.items()))]
    return list(zip(begins, [*sorted(taken), size], strict=True))
