"""Memory of a launch, in which every access is held against what is there."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .kinds import Array, unsigned

LINE = 16  # bytes that a thread reads at most at once: memory is looked at in pieces that begin at multiples of it
NO_ONES = 0xA5  # what memory and registers are filled with that nothing was written to


class Fault(Exception):
    """Something for which a card may do anything."""


@dataclass(frozen=True)
class Span:
    """Bytes of this process that belong to a launch, under a name for faults."""

    start: int
    size: int
    name: str


class Global:
    """The tensors of a launch, at their own addresses."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = sorted((span for span in spans if span.size), key=lambda span: (span.start, -span.size))
        self.starts = np.array([span.start for span in self.spans], np.int64)
        self.lines = [_lines(span) for span in self.spans]

    def load(self, address: Array, size: int, many: int) -> list[Array]:
        """Return `many` numbers of `size` bytes that lie side by side, as an array each."""
        made = [np.zeros(len(address), unsigned(size)) for _ in range(many)]
        for of, array, at in self._found(address, size, many):
            for i, one in enumerate(made):
                one[of] = array[at + i]
        return made

    def store(self, address: Array, values: list[Array]) -> None:
        """Write numbers side by side."""
        size = values[0].dtype.itemsize
        for of, array, at in self._found(address, size, len(values)):
            for i, value in enumerate(values):
                array[at + i] = value[of]
                if (array[at + i] != value[of]).any():
                    raise Fault("threads write different numbers to one place")

    def add(self, address: Array, value: Array, dtype: Any) -> Array:
        """Add to numbers one after the other, and return what was there."""
        before = np.zeros(len(address), dtype)
        for of, array, at in self._found(address, value.dtype.itemsize, 1):
            numbers = array.view(dtype)
            for lane, place in zip(np.arange(len(address))[of], at, strict=True):
                before[lane] = numbers[place]
                numbers[place] += value[lane]
        return before

    def _found(self, address: Array, size: int, many: int) -> Iterable[tuple[Any, Array, Array]]:
        """Yield for each tensor that is accessed: by which threads, its numbers of `size` bytes, and which of these."""
        address = address.astype(np.int64)
        if (address % (size * many)).any():
            raise Fault(f"an access of {size * many} bytes is not aligned")
        which = np.searchsorted(self.starts, address, side="right") - 1
        for index in np.unique(which):
            of = slice(None) if (which == index).all() else which == index
            at = address[of]
            if index < 0:
                raise Fault(f"an access in front of all tensors, to {at.min()}")
            span = self.spans[self._reaching(index, int(at.max()) + size * many)]
            over = int(at.max()) + size * many - span.start - span.size
            if over > 0:
                raise Fault(f"an access {over} bytes beyond the {span.size} bytes of {span.name}")
            first = span.start - span.start % LINE
            yield of, self.lines[self.spans.index(span)].view(unsigned(size)), (at - first) // size

    def _reaching(self, index: int, end: int) -> int:
        """Of tensors that share memory, and begin at or before `index`, the one that goes as far as `end`."""
        for other in range(index, -1, -1):
            if self.spans[other].start + self.spans[other].size >= end:
                return other
        return index


def _lines(span: Span) -> Array:
    """The lines that hold a span, as bytes. A line is within a page, so that all of it is there."""
    first = span.start - span.start % LINE
    size = -(-(span.start + span.size - first) // LINE) * LINE
    return np.frombuffer((ctypes.c_uint8 * size).from_address(first), np.uint8)


class Shared:
    """What the threads of a program share: so many bytes for each program."""

    def __init__(self, programs: int, size: int) -> None:
        self.size = size
        self.stride = -(-size // LINE) * LINE
        self.bytes = np.full(max(1, programs * self.stride), NO_ONES, np.uint8)

    def load(self, program: Array, address: Array, size: int, many: int) -> list[Array]:
        """Return `many` numbers of `size` bytes that lie side by side, as an array each."""
        numbers, at = self._found(program, address, size, many)
        return [numbers[at + i] for i in range(many)]

    def store(self, program: Array, address: Array, values: list[Array]) -> None:
        """Write numbers side by side."""
        numbers, at = self._found(program, address, values[0].dtype.itemsize, len(values))
        for i, value in enumerate(values):
            numbers[at + i] = value
            if (numbers[at + i] != value).any():
                raise Fault("threads write different numbers to one place of shared memory")

    def _found(self, program: Array, address: Array, size: int, many: int) -> tuple[Array, Array]:
        address = address.astype(np.int64)
        if (address % (size * many)).any():
            raise Fault(f"an access of {size * many} bytes of shared memory is not aligned")
        if len(address) and (address.min() < 0 or address.max() + size * many > self.size):
            worst = int(address.max()) + size * many
            raise Fault(f"an access to byte {worst} of {self.size} of shared memory")
        return self.bytes.view(unsigned(size)), (program * self.stride + address) // size
