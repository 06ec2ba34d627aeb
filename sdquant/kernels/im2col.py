"""im2col: the patch of the input that each output of a convolution reads."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

from torch.nn import functional as F

from .cpu import extension
from .cpu.threads import over_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ..core import Geometry


def copies(x: Tensor) -> bool:
    """Return whether the C extension can copy the patches of such a tensor."""
    return extension() is not None and x.device.type == "cpu" and x.ndim == 4 and x.element_size() in (2, 4)


def copied(x: Tensor, kernel: tuple[int, ...], how: Geometry, places: tuple[int, ...]) -> Tensor:
    """Return the patch of x [b, c, h, w] that each output of `places` [h', w'] reads: [b * h' * w', c * kernel]."""
    assert not isinstance(how.padding, str)
    x = x.contiguous()
    rows, columns = len(x) * math.prod(places), x.shape[1] * math.prod(kernel)
    out = x.new_empty(rows, columns)
    images = (x.element_size(), x.data_ptr(), *x.shape[1:], *places, *kernel, *how.stride, *how.padding, *how.dilation)
    run = extension().patches  # type: ignore[union-attr]
    to = out.data_ptr()
    over_rows(rows, columns, lambda start, stop: run(struct.pack("18q", *images, start, stop, to)))
    return out


def outputs(sizes: tuple[int, ...], kernel: tuple[int, ...], how: Geometry) -> tuple[int, ...]:
    """Return the number of outputs along each dimension of an input of these sizes.

    Raises:
        RuntimeError: the input is smaller than the kernel, as torch's convolutions raise it.
    """
    assert not isinstance(how.padding, str)
    padded = [n + 2 * pad for n, pad in zip(sizes, how.padding, strict=True)]
    spans = [step * (k - 1) + 1 for k, step in zip(kernel, how.dilation, strict=True)]
    if any(n < span for n, span in zip(padded, spans, strict=True)):
        raise RuntimeError(f"the convolution kernel, which spans {spans}, is larger than the padded input, {padded}")
    return tuple((n - span) // stride + 1 for n, span, stride in zip(padded, spans, how.stride, strict=True))


def is_of_one_pixel(kernel: tuple[int, ...], how: Geometry) -> bool:
    """Return whether a convolution multiplies the channels of each pixel by the same matrix, and does nothing else."""
    ones = (*kernel, *how.stride, how.groups)
    return all(size == 1 for size in ones) and not isinstance(how.padding, str) and not any(how.padding)


def patches(x: Tensor, kernel: tuple[int, ...], how: Geometry) -> Tensor:
    """Return the patches of x [b, in, ...], [b, *places, in, *kernel], as a view of the padded x."""
    assert not isinstance(how.padding, str)
    places = outputs(x.shape[2:], kernel, how)
    x = F.pad(x, [pad for pad in reversed(how.padding) for _ in range(2)]) if any(how.padding) else x
    batch, channel, *steps = x.stride()
    strides = [step * by for step, by in zip(steps, how.stride, strict=True)]
    inner = [step * by for step, by in zip(steps, how.dilation, strict=True)]
    return x.as_strided((len(x), *places, x.shape[1], *kernel), (batch, *strides, channel, *inner))


def pieces(places: tuple[int, ...], columns: int, most: int) -> Iterator[tuple[slice, ...]]:
    """Yield parts of a batch's outputs [b, h', ...], the first the largest: images, or else rows of an image, whose
    patches of `columns` are about `most` values."""
    batch, high, *wide = places
    row = max(columns * math.prod(wide), 1)
    images = most // max(row * high, 1)
    if images:
        yield from ((slice(start, start + images),) for start in range(0, batch, images))
        return
    step = max(most // row, 1)
    for image in range(batch):
        yield from ((slice(image, image + 1), slice(start, start + step)) for start in range(0, high, step))


# Rows up to which copying patches out, by torch or by the C extension, takes less than decoding the weight instead:
# measured with 320 to 2560 channels, kernels of 3 x 3.
_BY_TORCH, _BY_C = 64, 256


def few_patches(x: Tensor, kernel: tuple[int, ...], how: Geometry, few: int) -> Tensor | None:
    """Return `patches` copied to [rows, columns]; None if there are more than `few` rows, or copying is too slow."""
    places = outputs(x.shape[2:], kernel, how)
    rows, fast = len(x) * math.prod(places), copies(x)
    if rows > min(few, _BY_C if fast else _BY_TORCH):
        return None
    return (
        copied(x, kernel, how, places)
        if fast
        else patches(x, kernel, how).reshape(rows, x.shape[1] * math.prod(kernel))
    )
