"""The 8-bit integer GEMM as the C extension has it: blocks of activations by panels of the weight. See int8.h."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ..workspace import address
from . import extension
from .threads import over_rows

_PANEL = 32  # rows of a weight that are multiplied together
_MOST_COLUMNS = 1 << 15  # sums of products of a code from 0 to 255 and one from -127 to 127 stay below 2 ** 31
_CPU = torch.device("cpu")
NO_BRANCH = (0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Sizes:
    """Sizes for weights of some number of columns: bytes of a padded row of activations (`wide`), of a panel, and of a
    thread's spare memory; the number of rows of activations up to which panels of the weight are packed where they are
    used (`most`), and the number in a group (`tall`); the name of the instruction set."""

    wide: int
    panel: int
    spare: int
    most: int
    tall: int
    name: str


@lru_cache(maxsize=256)
def sizes(columns: int) -> Sizes | None:
    """Return the sizes for weights of so many columns; None if this machine has no kernels for them."""
    module = extension()
    if module is None or columns > _MOST_COLUMNS:
        return None
    numbers = module.int8_sizes(columns)
    return None if numbers is None else Sizes(*numbers)


def run(
    descriptor: Any,
    weight: tuple[int, ...],
    sizes_of: tuple[int, int, int],
    m: int,
    source: tuple[int, ...],
    target: tuple[int, ...],
    branch: tuple[int, ...] = NO_BRANCH,
) -> None:
    """Run the GEMM. A few rows of activations are quantized once, and panels of the weight are packed where they are
    used; for more rows the panels are packed first, and threads split the rows of activations.

    Args:
        branch: see `narrow.factors`; of x's dtype.
    """
    count, columns, each = sizes_of
    size, rank = sizes(columns), branch[0]
    assert size is not None
    call = c_functions()
    if m <= size.most:
        most = -(-m // size.tall) * size.tall  # groups may be stored whole
        room = most * (size.wide + 8)  # codes, scales and sums
        at = address(room + size.spare + most * rank * 4)
        buffers = (at, at + most * size.wide, at + most * (size.wide + 4))
        beside = *branch, at + room + size.spare

        def spare_from(start: int) -> tuple[int, torch.Tensor | None]:
            own = torch.empty(size.spare, dtype=torch.int8, device=_CPU) if start else None
            return (at + room if own is None else own.data_ptr()), own

        def quantize(start: int, stop: int) -> None:
            spare, _kept = spare_from(start)
            call.int8_quantize(packed_numbers((*source, *beside, m, *buffers, spare, start, stop)))

        def panels(start: int, stop: int) -> None:
            spare, _kept = spare_from(start)
            call.int8_panels(descriptor, packed_numbers((*weight, *target, *beside, start, stop, m, *buffers, spare)))

        over_rows(most // size.tall, columns * size.tall * (rank or 1), quantize, step=1)
        over_rows(count, columns * m, panels)
        return
    rows = -(-count // _PANEL)
    room = 0 if call.int8_lies_right(descriptor, packed_numbers(weight)) else rows * size.panel
    numbers = 4 * rows * _PANEL * each  # bytes of the scales, and of what is subtracted
    spare = size.spare + size.most * rank * 4
    at = address(room + 2 * numbers + spare)
    buffers = (at, at + room, at + room + numbers)

    def spare_of(start: int) -> tuple[int, torch.Tensor | None]:
        """Return the address of spare memory for the thread that begins at `start`, and the tensor that owns it."""
        own = torch.empty(spare, dtype=torch.int8, device=_CPU) if start else None
        return (at + room + 2 * numbers if own is None else own.data_ptr()), own

    def stage(start: int, stop: int) -> None:
        here, _kept = spare_of(start)
        call.int8_stage(descriptor, packed_numbers((*weight, start, stop, *buffers, here)))

    def multiply(start: int, stop: int) -> None:
        here, _kept = spare_of(start)
        ends = *branch, here + size.spare, start, stop, *buffers, here
        call.int8_rows(descriptor, packed_numbers((*weight, *source, *target, *ends)))

    over_rows(count, columns, stage)
    over_rows(m, columns * count, multiply)


def c_functions() -> Any:
    """Return the functions of the extension, which there has to be."""
    module = extension()
    assert module is not None
    return module


def packed_numbers(numbers: tuple[int, ...]) -> bytes:
    """Return numbers and addresses as the C functions take them."""
    return struct.pack(f"{len(numbers)}q", *numbers)
