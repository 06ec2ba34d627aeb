"""im2col: patches of images, copied by the C extension."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

from . import extension
from .threads import over_rows

if TYPE_CHECKING:
    from torch import Tensor

    from ...core.backend import Geometry


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
