"""One piece of memory of which blocks take parts, so that small ones do not each take the room of the largest."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ALIGN = 256  # bytes: what the allocators of cards align to


class Places:
    """Where parts go: each into one of some slots of so many bytes. Small parts share a slot, and leave others whole
    for large ones, which would have to wait for parts beside each other to come back."""

    def __init__(self, slots: int, slot: int) -> None:
        self._slot = slot
        self._taken: list[dict[int, int]] = [{} for _ in range(slots)]  # begin -> end

    def take(self, nbytes: int) -> int | None:
        """The beginning of so many bytes, in the smallest gap that is as large, in a slot in use where there is one;
        None where there is none."""
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
        """Take what begins there back."""
        number, start = divmod(begin, self._slot)
        del self._taken[number][start]


class Arena:
    """Parts of `flat` (uint8 [n * slot]), each within one of n slots."""

    def __init__(self, flat: Tensor, slot: int) -> None:
        self._flat = flat
        self._places = Places(flat.numel() // slot if slot else 0, slot)

    def take(self, nbytes: int) -> Tensor | None:
        """A part of so many bytes, uint8 [nbytes]; None where there is no room."""
        begin = self._places.take(nbytes)
        return None if begin is None else self._flat[begin : begin + nbytes]

    def give(self, part: Tensor) -> None:
        """Take a part back."""
        self._places.give(part.data_ptr() - self._flat.data_ptr())


def _gaps(taken: dict[int, int], size: int) -> list[tuple[int, int]]:
    """What is free of a slot: where each gap begins, at a whole multiple of ALIGN, and where it ends."""
    begins = [0, *(-(-stop // ALIGN) * ALIGN for _, stop in sorted(taken.items()))]
    return list(zip(begins, [*sorted(taken), size], strict=True))
