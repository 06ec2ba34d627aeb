"""Products in 8-bit integers by the C extension: `kernels.int8` with the same numbers, and no more passes over memory
than it takes. int8.h says how."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..int8_steps import Coding, scales_in
from ..scratch import address
from . import extension
from .integers import recodes
from .pages import in_large_pages
from .plans import TYPES, addresses, plan
from .threads import over_rows

if TYPE_CHECKING:
    from ...backends.base import Geometry
    from ..forms import Activations, Form
    from ..reader import Parts

_PANEL = 32  # rows of a weight that are multiplied together
_MOST_COLUMNS = 1 << 15  # sums of products of a code from 0 to 255 and one from -127 to 127 stay below 2 ** 31
_CPU = torch.device("cpu")
_NOT_PATCHES = (0,) * 15
_CODES = 5  # the type of activations that are codes
_NO_SCALES = (0, 1)  # of a source that is no codes
_BY_RUN = int(Coding.BY_RUN)  # a plain number, which compares faster


@dataclass(frozen=True)
class Sizes:
    """Columns with what they are padded with; bytes of a panel and of the spare memory of a thread; rows of activations
    up to which panels of the weight are made where they are used, and in a group."""

    wide: int
    panel: int
    spare: int
    most: int
    tall: int


@lru_cache(maxsize=256)
def sizes(columns: int) -> Sizes | None:
    """Those for weights of so many columns; None where there are no kernels for them here."""
    found = extension()
    if found is None or columns > _MOST_COLUMNS:
        return None
    made = found.int8_sizes(columns)
    return None if made is None else Sizes(*made)


def reads(form: Form | None, parts: Parts) -> bool:
    """Whether products with such a weight are computed here."""
    if form is None or sizes(form.columns) is None:
        return False
    return all(part.device.type == "cpu" and part.is_contiguous() for part in parts.values()) and recodes(form, parts)


def linear(form: Form, parts: Parts, coding: Coding, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [m, columns] times the transposed weight, and the bias: [m, rows] in x's dtype.

    Args:
        coding: which codes of the weight are multiplied.
    """
    x = x.contiguous()
    out = in_large_pages(torch.empty(x.shape[0], form.rows, dtype=x.dtype))
    floats = None if bias is None else bias.detach().to(torch.float32).contiguous()
    sizes_of = (form.rows, form.columns, scales_in(form, coding))
    if len(x):
        rows_times(plan(form, parts), (*addresses(form, parts), coding, 1), sizes_of, x, len(x), floats, out)
    return out


def codes_times(
    made: Any,
    weight: tuple[int, ...],
    sizes_of: tuple[int, int, int],
    codes: Tensor,
    scale: tuple[Tensor, int],
    m: int,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    """As `rows_times`, of activations that are codes already, int8 [m, columns], and with `Target.by_steps`.

    Args:
        scale: float32, and how many rows have one of them.
    """
    rows, columns, _ = sizes_of
    shifted = bool(weight[-2] & _BY_RUN)
    source = (_CODES, codes.data_ptr(), columns, columns, *_NOT_PATCHES, shifted, scale[0].data_ptr(), scale[1])
    target = (
        TYPES[out.dtype], out.data_ptr(), rows, 1, m, 0, 0 if bias is None else bias.data_ptr(), out.nbytes, 1
    )  # fmt: skip
    _run(made, weight, sizes_of, m, source, target)


def codes_of(x: Tensor, m: int, how: Activations, known: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows x [m, columns], contiguous, as codes int8 of as many numbers, and their scales, float32 [m] or `known`.

    Args:
        known: float32, one for all rows or for each.
    """
    columns = x.numel() // m
    codes = torch.empty(x.shape, dtype=torch.int8)
    scale = torch.empty(m) if known is None else known
    step = -1 if known is None else int(known.numel() > 1)
    kind, of, to, by, size = TYPES[x.dtype], x.data_ptr(), codes.data_ptr(), scale.data_ptr(), x.element_size()
    call, more = _c().int8_codes, 4 if step else 0  # bytes of a row's scale

    def some(start: int, stop: int) -> None:
        at = start * columns
        numbers = (kind, of + at * size, columns, stop - start, by + start * more, to + at)
        call(how.bound, how.low, how.high, step, _packed(numbers))

    over_rows(m, columns, some)
    return codes, scale


def rows_times(
    made: Any,
    weight: tuple[int, ...],
    sizes_of: tuple[int, int, int],
    x: Tensor,
    m: int,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    """`linear` of what is there already: x and `out`, contiguous and of m rows, at least one, and the bias in float32.

    Args:
        made: the plan of the weight's form. weight: addresses of its parts, its coding, and 1.
        sizes_of: the rows and columns of the weight, and the scales of a row.
    """
    rows, columns, _ = sizes_of
    kind = TYPES[x.dtype]
    source = (kind, x.data_ptr(), columns, columns, *_NOT_PATCHES, bool(weight[-2] & _BY_RUN), *_NO_SCALES)
    target = (kind, out.data_ptr(), rows, 1, m, 0, 0 if bias is None else bias.data_ptr(), out.nbytes, 0)
    _run(made, weight, sizes_of, m, source, target)


def convolve(
    form: Form,
    parts: Parts,
    coding: Coding,
    kernel: tuple[int, int],
    x: Tensor,
    bias: Tensor | None,
    how: Geometry,
    places: tuple[int, int],
) -> Tensor:
    """x [b, in, h, w] convolved with the weight, and the bias: [b, rows, *places] in x's dtype and order in memory."""
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    x = _channels_last(x)
    batch, channels, high, wide = x.shape
    largest = torch.empty(batch * high * wide, dtype=torch.float32)
    size = x.element_size() * channels

    def look(start: int, stop: int) -> None:
        numbers = (TYPES[x.dtype], x.data_ptr() + start * size, channels, stop - start, largest.data_ptr() + 4 * start)
        _c().int8_largest(_packed(numbers))

    over_rows(len(largest), channels, look)
    assert not isinstance(how.padding, str)
    source = (
        TYPES[x.dtype], x.data_ptr(), form.columns, 0, 1, high, wide, channels, *places, *kernel,
        *how.stride, *how.padding, *how.dilation, largest.data_ptr(), bool(coding & Coding.BY_RUN), *_NO_SCALES,
    )  # fmt: skip
    order = torch.channels_last if last else torch.contiguous_format
    out = in_large_pages(torch.empty(batch, form.rows, *places, dtype=x.dtype, memory_format=order))
    here = math.prod(places)
    steps = (form.rows, 1, here, here * form.rows) if last else (1, here, here, here * form.rows)
    floats = None if bias is None else bias.detach().to(torch.float32).contiguous()
    target = (TYPES[out.dtype], out.data_ptr(), *steps, 0 if floats is None else floats.data_ptr(), out.nbytes, 0)
    weight = (*addresses(form, parts), coding, math.prod(kernel))
    if batch * here:
        sizes_of = (form.rows, form.columns, scales_in(form, coding))
        _run(plan(form, parts), weight, sizes_of, batch * here, source, target)
    return out


def _channels_last(x: Tensor) -> Tensor:
    """x [b, c, h, w] with the channels of a pixel together."""
    if x.is_contiguous(memory_format=torch.channels_last):
        return x
    x = x.contiguous()
    out = torch.empty_like(x, memory_format=torch.channels_last)
    channels, pixels = x.shape[1], math.prod(x.shape[2:])
    for one, other in zip(x, out, strict=True):
        common = (TYPES[x.dtype], one.data_ptr(), channels, pixels)

        def turn(start: int, stop: int, common: tuple[int, ...] = common, to: int = other.data_ptr()) -> None:
            _c().int8_last(_packed((*common, start, stop, to)))

        over_rows(pixels, channels, turn)
    return out


def _run(
    made: Any,
    weight: tuple[int, ...],
    sizes_of: tuple[int, int, int],
    m: int,
    source: tuple[int, ...],
    target: tuple[int, ...],
) -> None:
    """Few activations are quantized once, and panels of the weight are made where they are used; for more, the panels
    are made first, and threads share the rows of activations."""
    count, columns, each = sizes_of
    size = sizes(columns)
    assert size is not None
    call = _c()
    if m <= size.most:
        most = -(-m // size.tall) * size.tall  # groups may be stored whole
        room = most * (size.wide + 8)  # codes, scales and sums
        at = address(room + size.spare)
        held = (at, at + most * size.wide, at + most * (size.wide + 4))
        call.int8_quantize(_packed((*source, m, *held, at + room)))

        def panels(start: int, stop: int) -> None:
            spare = torch.empty(size.spare, dtype=torch.int8) if start else None
            to = at + room if spare is None else spare.data_ptr()
            call.int8_panels(made, _packed((*weight, *target, start, stop, m, *held, to)))

        over_rows(count, columns * m, panels)
        return
    rows = -(-count // _PANEL)
    room = 0 if call.int8_lies_right(made, _packed(weight)) else rows * size.panel
    numbers = 4 * rows * _PANEL * each  # bytes of the scales, and of what is subtracted
    at = address(room + 2 * numbers + size.spare)
    held = (at, at + room, at + room + numbers)

    def spare_of(start: int) -> tuple[int, Tensor | None]:
        """Memory for the thread whose share begins there, and what it belongs to."""
        own = torch.empty(size.spare, dtype=torch.int8) if start else None
        return (at + room + 2 * numbers if own is None else own.data_ptr()), own

    def stage(start: int, stop: int) -> None:
        spare, _kept = spare_of(start)
        call.int8_stage(made, _packed((*weight, start, stop, *held, spare)))

    def multiply(start: int, stop: int) -> None:
        spare, _kept = spare_of(start)
        call.int8_rows(made, _packed((*weight, *source, *target, start, stop, *held, spare)))

    over_rows(count, columns, stage)
    over_rows(m, columns * count, multiply)


def _c() -> Any:
    found = extension()
    assert found is not None
    return found


def _packed(numbers: tuple[int, ...]) -> bytes:
    return struct.pack(f"{len(numbers)}q", *numbers)
