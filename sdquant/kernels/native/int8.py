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
from ..scratch import scratch
from . import extension
from .integers import recodes
from .plans import TYPES, addresses, plan
from .threads import over_rows

if TYPE_CHECKING:
    from ...backends.base import Geometry
    from ..forms import Form
    from ..reader import Parts

_PANEL = 32  # rows of a weight that are multiplied together
_MOST_COLUMNS = 1 << 15  # sums of products of a code from 0 to 255 and one from -127 to 127 stay below 2 ** 31
_CPU = torch.device("cpu")


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
    out = torch.empty(x.shape[0], form.rows, dtype=x.dtype)
    source = (TYPES[x.dtype], x.data_ptr(), form.columns, form.columns, *[0] * 15, bool(coding & Coding.BY_RUN))
    target = _target(out, (form.rows, 1, max(len(x), 1), 0), bias)
    _run(form, parts, coding, 1, len(x), source, target)
    return out


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
        *how.stride, *how.padding, *how.dilation, largest.data_ptr(), bool(coding & Coding.BY_RUN),
    )  # fmt: skip
    order = torch.channels_last if last else torch.contiguous_format
    out = torch.empty(batch, form.rows, *places, dtype=x.dtype, memory_format=order)
    here = math.prod(places)
    steps = (form.rows, 1, here, here * form.rows) if last else (1, here, here, here * form.rows)
    _run(form, parts, coding, math.prod(kernel), batch * here, source, _target(out, steps, bias))
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


def _target(out: Tensor, steps: tuple[int, int, int, int], bias: Tensor | None) -> tuple[tuple[int, ...], list[Tensor]]:
    """Numbers of a target, and what has to live as long as they do."""
    floats = None if bias is None else bias.detach().to(torch.float32).contiguous()
    kept = [out] if floats is None else [out, floats]
    of_bias = 0 if floats is None else floats.data_ptr()
    return (TYPES[out.dtype], out.data_ptr(), *steps, of_bias, out.nbytes), kept


def _run(
    form: Form,
    parts: Parts,
    coding: Coding,
    taps: int,
    m: int,
    source: tuple[int, ...],
    target: tuple[tuple[int, ...], list[Tensor]],
) -> None:
    """Few activations are quantized once, and panels of the weight are made where they are used; for more, the panels
    are made first, and threads share the rows of activations."""
    if not m:
        return
    size = sizes(form.columns)
    assert size is not None
    made, call = plan(form, parts), _c()
    weight = (*addresses(form, parts), coding, taps)
    if m <= size.most:
        most = -(-m // size.tall) * size.tall  # groups may be stored whole
        room = most * (size.wide + 8)  # codes, scales and sums
        memory = scratch((room + size.spare,), torch.int8, _CPU)
        at = memory.data_ptr()
        held = (at, at + most * size.wide, at + most * (size.wide + 4))
        call.int8_quantize(_packed((*source, m, *held, at + room)))

        def panels(start: int, stop: int) -> None:
            spare = torch.empty(size.spare, dtype=torch.int8) if start else None
            to = at + room if spare is None else spare.data_ptr()
            call.int8_panels(made, _packed((*weight, *target[0], start, stop, m, *held, to)))

        over_rows(form.rows, form.columns * m, panels)
        return
    count = -(-form.rows // _PANEL)
    room = 0 if call.int8_lies_right(made, _packed(weight)) else count * size.panel
    staged = scratch((room + size.spare,), torch.int8, _CPU)
    each = scales_in(form, coding)
    scale, minus_all = torch.empty(count * _PANEL * each), torch.empty(count * _PANEL * each, dtype=torch.int32)

    def stage(start: int, stop: int) -> None:
        spare = torch.empty(size.spare, dtype=torch.int8) if start else staged[room:]
        where = (staged.data_ptr(), scale.data_ptr(), minus_all.data_ptr(), spare.data_ptr())
        call.int8_stage(made, _packed((*weight, start, stop, *where)))

    over_rows(form.rows, form.columns, stage)

    def rows(start: int, stop: int) -> None:
        spare = torch.empty(size.spare, dtype=torch.int8) if start else staged[room:]
        held = (staged.data_ptr(), scale.data_ptr(), minus_all.data_ptr(), spare.data_ptr())
        call.int8_rows(made, _packed((*weight, *source, *target[0], start, stop, *held)))

    over_rows(m, form.columns * form.rows, rows)


def _c() -> Any:
    found = extension()
    assert found is not None
    return found


def _packed(numbers: tuple[int, ...]) -> bytes:
    return struct.pack(f"{len(numbers)}q", *numbers)
