"""8-bit integer GEMM in the C extension: the numbers of `int8_linear`, with as few passes over memory as possible.
See int8.h."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base import Coding
from ..int8_reference import AGAIN_RUN, scales_in
from ..large_pages import in_large_pages
from .int8_epilogue import quantize_rows, recodes
from .int8_gemm import NO_BRANCH, c_functions, packed_numbers, run
from .int8_gemm import sizes as sizes
from .layout_descriptors import TYPES, addresses, describe_layout
from .threads import over_rows

if TYPE_CHECKING:
    from ...core import Activations, Geometry, PackedLayout
    from ..base import Parts

KINDS = ("int", "float8_e4m3fn", "float8_e5m2")  # of `numbers_of`
_NOT_PATCHES = (0,) * 15
LEAST_SCALE = 2.0**-63  # as int8.h's
_CODES = 5  # the type of activations that are codes
_NO_STEPS = (0, 0)  # of a target without
_NO_SCALES = (0, 1)  # of a source that is no codes
_NO_CHANGES = (0, 0)  # of a source that is neither rotated nor divided
_BY_RUN, _BOTH = int(Coding.BY_RUN), int(Coding.BOTH)  # plain numbers, which compare faster


def instructions(columns: int) -> str:
    """Return the instructions used for weights of so many columns: "amx", "vnni" or "avx2"; "" for none."""
    size = sizes(columns)
    return "" if size is None else size.name


def reads(form: PackedLayout | None, parts: Parts) -> bool:
    """Return whether these kernels can multiply by such a weight."""
    if form is None or sizes(form.columns) is None:
        return False
    return all(part.device.type == "cpu" and part.is_contiguous() for part in parts.values()) and recodes(form, parts)


def linear(
    form: PackedLayout, parts: Parts, coding: Coding, x: Tensor, bias: Tensor | None, rotation: int = 0
) -> Tensor:
    """Multiply x [m, columns] by the transposed weight and add the bias: [m, rows] in x's dtype.

    Args:
        coding: which codes of the weight are multiplied. rotation: see `rows_times`.
    """
    x = x.contiguous()
    out = in_large_pages(x.new_empty(x.shape[0], form.rows))
    floats = None if bias is None else bias.detach().to(torch.float32).contiguous()
    sizes_of = (form.rows, form.columns, scales_in(form, coding))
    if len(x):
        weight = (*addresses(form, parts), coding, 1)
        rows_times(describe_layout(form, parts), weight, sizes_of, x, len(x), floats, out, rotation)
    return out


def codes_times(
    descriptor: Any,
    weight: tuple[int, ...],
    sizes_of: tuple[int, int, int],
    codes: Tensor,
    scale: tuple[Tensor, int],
    m: int,
    bias: Tensor | None,
    out: Tensor,
    by_steps: bool = True,
) -> None:
    """Do as `rows_times` for activations that are already codes, int8 [m, columns].

    Args:
        scale: float32, and how many rows share each. With runs of columns: one for each run of each row.
        by_steps: as `Target.by_steps`.
    """
    rows, columns, _ = sizes_of
    by_run, at = bool(weight[-2] & _BY_RUN), scale[0].data_ptr()
    source = (_CODES, codes.data_ptr(), columns, columns, *_NOT_PATCHES, by_run, at, scale[1], *_NO_CHANGES)
    to, added = out.data_ptr(), 0 if bias is None else bias.data_ptr()
    target = (TYPES[out.dtype], to, rows, 1, m, 0, added, out.nbytes, by_steps, at if by_run else 0)
    run(descriptor, weight, sizes_of, m, source, target)


def codes_of(x: Tensor, m: int, how: Activations, known: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize rows x [m, columns], contiguous. Return int8 codes of x's shape and scales, float32 [m] or `known`.

    Args:
        known: float32, one for all rows or for each.
    """
    columns = x.numel() // m
    codes = x.new_empty(x.shape, dtype=torch.int8)
    scale = x.new_empty(m, dtype=torch.float32) if known is None else known
    step = -1 if known is None else int(known.numel() > 1)
    kind, of, to, by, size = TYPES[x.dtype], x.data_ptr(), codes.data_ptr(), scale.data_ptr(), x.element_size()
    call, more = c_functions().int8_codes, 4 if step else 0  # bytes of a row's scale

    def some(start: int, stop: int) -> None:
        at = start * columns
        numbers = (kind, of + at * size, columns, stop - start, by + start * more, to + at)
        call(how.bound, how.low, how.high, step, packed_numbers(numbers))

    over_rows(m, columns, some)
    return codes, scale


def numbers_of(
    x: Tensor, m: int, limits: tuple[float, float, float], kind: str, decoded: bool
) -> tuple[Tensor, Tensor]:
    """Fake-quantize rows x [m, columns], contiguous. Return the rounded values, shaped like x, and scales, float32 [m].

    The values are of `scale_dtype`: in units of the scale or, if `decoded`, multiplied by it.

    Args:
        limits: the bound, the least and the largest number, as in `packed_layout.Activations`.
        kind: one of KINDS.
    """
    columns, out = x.numel() // m, x.new_empty(x.shape, dtype=scale_dtype(x.dtype))
    scale, of_kind = x.new_empty(m, dtype=torch.float32), KINDS.index(kind)
    of, to, by = x.data_ptr(), out.data_ptr(), scale.data_ptr()
    call = c_functions().int8_numbers

    def some(start: int, stop: int) -> None:
        at = start * columns
        numbers = (columns, stop - start, by + 4 * start, to + at * out.element_size())
        call(*limits, of_kind, decoded, packed_numbers((TYPES[x.dtype], of + at * x.element_size(), *numbers)))

    over_rows(m, columns, some)
    return out, scale


def rows_times(
    descriptor: Any,
    weight: tuple[int, ...],
    sizes_of: tuple[int, int, int],
    x: Tensor,
    m: int,
    bias: Tensor | None,
    out: Tensor,
    rotation: int = 0,
    smooth: int = 0,
    branch: tuple[int, ...] = NO_BRANCH,
) -> None:
    """Do `linear` for prepared tensors: x and `out`, contiguous, of m >= 1 rows, and the bias in float32.

    Args:
        descriptor: `layout_descriptors.describe_layout` of the weight. weight: addresses of its parts, coding, 1.
        sizes_of: the rows and columns of the weight, and the scales of a row.
        rotation: how many columns of x are rotated together, as `hadamard.rotate` does, before they are quantized.
        smooth: the address of what divides the columns of x before that, as `narrow.factors` has it; 0 for nothing.
            Quotients are rounded to x's dtype.
        branch: see `int8_gemm.run`. It is of x's dtype, to which rows of bfloat16 are rounded again when they are
            rotated.
    """
    if weight[-2] & _BOTH:
        assert not rotation and not smooth and not branch[0], "inputs are quantized by runs, as they are"
        return _runs_times(descriptor, weight, sizes_of, x, m, bias, out)
    rows, columns, _ = sizes_of
    kind = TYPES[x.dtype]
    source = (
        kind,
        x.data_ptr(),
        columns,
        columns,
        *_NOT_PATCHES,
        bool(weight[-2] & _BY_RUN),
        *_NO_SCALES,
        rotation,
        smooth,
    )
    target = (kind, out.data_ptr(), rows, 1, m, 0, 0 if bias is None else bias.data_ptr(), out.nbytes, *_NO_STEPS)
    run(descriptor, weight, sizes_of, m, source, target, branch)


def _runs_times(
    descriptor: Any,
    weight: tuple[int, ...],
    sizes_of: tuple[int, int, int],
    x: Tensor,
    m: int,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    """Do as `rows_times` with a scale for each run of columns of x, too."""
    columns = sizes_of[1]
    codes, runs = x.new_empty((m, columns), dtype=torch.int8), m * columns // AGAIN_RUN
    scale, sums = x.new_empty(runs, dtype=torch.float32), x.new_empty(runs, dtype=torch.int32)
    quantize_rows(x.view(runs, AGAIN_RUN), codes, scale, sums)
    codes_times(descriptor, weight, sizes_of, codes, (scale, 1), m, bias, out, by_steps=False)


def convolve(
    form: PackedLayout,
    parts: Parts,
    coding: Coding,
    kernel: tuple[int, int],
    x: Tensor,
    bias: Tensor | None,
    how: Geometry,
    places: tuple[int, int],
) -> Tensor:
    """Convolve x [b, in, h, w] with the weight and add the bias: [b, rows, *places] in x's dtype and memory format."""
    images = _channels_last(x)
    largest = _largest(images)
    numbers = (largest.data_ptr(), bool(coding & Coding.BY_RUN), *_NO_SCALES)
    out = _empty_images(x, form.rows, places)
    _patches_times(form, parts, coding, kernel, images, numbers, bias, how, out, _NO_STEPS)
    return out


def convolve_codes(
    form: PackedLayout,
    parts: Parts,
    coding: Coding,
    kernel: tuple[int, int],
    x: Tensor,
    quantized: Activations,
    known: Tensor | None,
    bias: Tensor | None,
    how: Geometry,
    places: tuple[int, int],
) -> Tensor:
    """Do the same with the integers that the scheme itself makes of each image, with `Target.by_steps`.

    Args:
        known: the scale of all images, float32; None: each has its own.
    """
    images = _channels_last(x)
    scale, each = _scales(images, quantized) if known is None else known, math.prod(places)
    codes = _codes_of_images(images, quantized, scale.expand(len(images)).contiguous())
    numbers = (0, 0, scale.data_ptr(), each * (1 if known is None else len(images)))
    out = _empty_images(x, form.rows, places)
    _patches_times(form, parts, coding, kernel, codes, numbers, bias, how, out, (1, 0))
    return out


def _patches_times(
    form: PackedLayout,
    parts: Parts,
    coding: Coding,
    kernel: tuple[int, int],
    images: Tensor,
    numbers: tuple[int, ...],
    bias: Tensor | None,
    how: Geometry,
    out: Tensor,
    steps: tuple[int, int],
) -> None:
    """Multiply the patches of images [b, in, h, w], channels last, by the weight, into `out` [b, rows, h', w'].

    Args:
        numbers: the last of the source. steps: of the target.
    """
    assert not isinstance(how.padding, str)
    batch, channels, high, wide = images.shape
    places, here = out.shape[2:], math.prod(out.shape[2:])
    source = (
        TYPES.get(images.dtype, _CODES), images.data_ptr(), form.columns, 0, 1, high, wide, channels, *places, *kernel,
        *how.stride, *how.padding, *how.dilation, *numbers, *_NO_CHANGES,
    )  # fmt: skip
    apart = (1, here) if out.is_contiguous() else (form.rows, 1)  # of results in a row of the image and in a column
    floats = None if bias is None else bias.detach().to(torch.float32).contiguous()
    added = 0 if floats is None else floats.data_ptr()
    target = (TYPES[out.dtype], out.data_ptr(), *apart, here, here * form.rows, added, out.nbytes, *steps)
    weight = (*addresses(form, parts), coding, math.prod(kernel))
    if batch * here:
        sizes_of = (form.rows, form.columns, scales_in(form, coding))
        run(describe_layout(form, parts), weight, sizes_of, batch * here, source, target)


def _empty_images(x: Tensor, channels: int, places: tuple[int, int]) -> Tensor:
    """Return an empty [b, channels, *places] in the dtype and memory format of x."""
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    order = torch.channels_last if last else torch.contiguous_format
    return in_large_pages(torch.empty(len(x), channels, *places, dtype=x.dtype, device=x.device, memory_format=order))


def _largest(images: Tensor) -> Tensor:
    """Return the largest magnitude in each pixel of images, channels last: float32 [pixels]."""
    channels = images.shape[1]
    largest = images.new_empty(images.numel() // max(channels, 1), dtype=torch.float32)
    size = images.element_size() * channels

    def look(start: int, stop: int) -> None:
        at = images.data_ptr() + start * size
        c_functions().int8_largest(
            packed_numbers((TYPES[images.dtype], at, channels, stop - start, largest.data_ptr() + 4 * start))
        )

    over_rows(len(largest), channels, look)
    return largest


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that scales of activations of `dtype` are rounded to; see `packed_layout.Activations`."""
    return torch.bfloat16 if dtype is torch.bfloat16 else torch.float32


def _scales(images: Tensor, how: Activations) -> Tensor:
    """Return the scale of each image, float32 [b]; as `codes512` computes those of rows."""
    scales = _largest(images).view(len(images), -1).amax(1).to(scale_dtype(images.dtype)) / how.bound
    return scales.masked_fill_(scales < LEAST_SCALE, 1.0).to(torch.float32)


def _codes_of_images(images: Tensor, how: Activations, scale: Tensor) -> Tensor:
    """Quantize images, channels last, to int8 codes in the same order. scale: of each image, float32 [b]."""
    codes = torch.empty_like(images, dtype=torch.int8, memory_format=torch.preserve_format)
    channels, size, kind = images.shape[1], images.element_size(), TYPES[images.dtype]
    pixels = math.prod(images.shape[2:])
    for index in range(len(images)):
        start_at, by = index * pixels * channels, scale.data_ptr() + 4 * index
        of, to = images.data_ptr() + start_at * size, codes.data_ptr() + start_at

        def some(start: int, stop: int, of: int = of, to: int = to, by: int = by) -> None:
            at = start * channels
            numbers = (kind, of + at * size, channels, stop - start, by, to + at)
            c_functions().int8_codes(how.bound, how.low, how.high, 0, packed_numbers(numbers))

        over_rows(pixels, channels, some)
    return codes


def _channels_last(x: Tensor) -> Tensor:
    """Return x [b, c, h, w] in channels-last memory format."""
    if x.is_contiguous(memory_format=torch.channels_last):
        return x
    x = x.contiguous()
    out = torch.empty_like(x, memory_format=torch.channels_last)
    channels, pixels = x.shape[1], math.prod(x.shape[2:])
    for one, other in zip(x, out, strict=True):
        common = (TYPES[x.dtype], one.data_ptr(), channels, pixels)

        def turn(start: int, stop: int, common: tuple[int, ...] = common, to: int = other.data_ptr()) -> None:
            c_functions().int8_last(packed_numbers((*common, start, stop, to)))

        over_rows(pixels, channels, turn)
    return out
