"""Convolutions of quantized tensors. The order of scaling follows Qwix at aa623acb, core/conv_general.py.

Beyond Qwix: weights alone can be quantized, activations and weights can have different types, and weights can have
zero points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import int_matmul
from .dot_general import refuse_two_zero_points, sums_of_codes
from .numerics import from_codes
from .qarray import QArray, floats
from .qtypes import qtype

CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}

# Patches are laid out in pieces of about so many bytes, so that a large picture does not fill the memory with them.
PIECE = 1 << 26


def convolve(
    x: QArray | Tensor,
    weight: QArray | Tensor,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """x [batch, channels, *space] with weight [out, channels / groups, *kernel]: [batch, out, *space], without a bias.

    Both quantized, x with a scale per sample or one for all, weight with one per output channel or one for all, to
    integers or float8: the codes are multiplied, integers in exact sums, and the sums scaled. Else both are dequantized
    first, and the convolution is that of floats.

    Args:
        stride, padding, dilation, groups: as torch has them, "same" and "valid" included; padding is with zeros.

    Raises:
        SettingsError: both have zero points.
    """
    shape = weight.qvalue.shape if isinstance(weight, QArray) else weight.shape
    window = Window.of(shape, stride, padding, dilation, groups)
    if not (isinstance(x, QArray) and isinstance(weight, QArray) and _scales_after(x) and _scales_after(weight)):
        left, right = floats(x), floats(weight)
        return CONVOLUTIONS[window.space](left, right.to(left.dtype), None, stride, padding, dilation, groups)
    refuse_two_zero_points(x, weight)
    types, rest = (x.qtype, weight.qtype), [1] * window.space
    totals = sums(x.qvalue, weight.qvalue, types, window)
    if x.zero_point is not None:
        # Zeros of the padding have the code 0 and no zero point: only what lies inside takes part.
        inside = sums(torch.ones_like(x.qvalue[:1]), weight.qvalue, types, window)
        totals = totals - inside * x.zero_point.to(totals.dtype)
    if weight.zero_point is not None:
        zeros = weight.zero_point.to(totals.dtype).reshape(1, -1, *rest)
        totals = totals - sums(x.qvalue, torch.ones_like(weight.qvalue), types, window) * zeros
    done = (totals.to(x.scale.dtype) * x.scale * weight.scale.reshape(1, -1, *rest)).to(x.dtype)
    return done if _channels_last(x.qvalue) else done.contiguous()


def _channels_last(x: Tensor) -> bool:
    """Return whether x is in channels-last memory format; the result is then too, as with torch's convolutions."""
    return x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Window:
    """Geometry of a convolution, one entry for each spatial axis.

    Attributes:
        edges: zeros of padding before and after.
    """

    stride: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        stride: int | Sequence[int],
        padding: int | str | Sequence[int],
        dilation: int | Sequence[int],
        groups: int,
    ) -> Window:
        """Make the window for a weight of this shape from torch's arguments."""
        kernel = tuple(shape[2:])
        gaps = _each(dilation, len(kernel))
        return cls(_each(stride, len(kernel)), _edges(padding, kernel, gaps), gaps, groups)

    @property
    def space(self) -> int:
        """Return the number of spatial axes."""
        return len(self.stride)

    @property
    def around(self) -> list[int]:
        """Return the edges in the order of `F.pad`."""
        return [size for pair in reversed(self.edges) for size in pair]


def _scales_after(array: QArray) -> bool:
    """Return whether its scales can be applied to sums of codes, after the convolution."""
    return qtype(array.qtype).kind in ("int", "float") and array.scale.numel() in (1, array.scale.shape[0])


def _each(value: int | Sequence[int], space: int) -> tuple[int, ...]:
    return (value,) * space if isinstance(value, int) else tuple(value)


def _edges(
    padding: int | str | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return the zeros before and after for each spatial axis. "same" puts the odd one after, as in torch."""
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        spans = [(size - 1) * gap for size, gap in zip(kernel, dilation, strict=True)]
        return tuple((span // 2, span - span // 2) for span in spans)
    assert not isinstance(padding, str), padding
    return tuple((size, size) for size in _each(padding, len(kernel)))


def sums(codes: Tensor, taps: Tensor, types: tuple[str, str], window: Window) -> Tensor:
    """Convolve codes with those of a weight: exact integers if both are integers, else float32."""
    integer = all(qtype(name).kind == "int" for name in types)
    if integer and window.groups == 1:
        flat = taps.movedim(1, -1).reshape(taps.shape[0], -1)
        pieces = patches(codes, taps.shape[2:], window)
        products = (sums_of_codes(piece.reshape(-1, flat.shape[1]), flat, *types) for piece in pieces)
        shaped = zip(products, pieces, strict=True)
        parts = [part.view(*piece.shape[: 1 + window.space], len(flat)) for part, piece in shaped]
        return (torch.cat(parts, 1) if len(parts) > 1 else parts[0]).movedim(-1, 1)
    home = codes.device
    if integer and not int_matmul.has_float64(home):
        codes, taps = codes.cpu(), taps.cpu()
    left, right = as_floats(codes, taps, types)
    with torch.autocast(codes.device.type, enabled=False):
        convolution = CONVOLUTIONS[window.space]
        done = convolution(F.pad(left, window.around), right, None, window.stride, 0, window.dilation, window.groups)
    return as_integers(done).to(home) if integer else done


def patches(codes: Tensor, kernel: Sequence[int], window: Window) -> tuple[Tensor, ...]:
    """Return the patches under the kernel (im2col) as views [batch, *places, *kernel, channels], split along the first
    axis of places. Channels come last, so that patches are copied in runs."""
    view = F.pad(codes.movedim(1, -1), [0, 0, *window.around]).contiguous()
    for axis, (size, step, gap) in enumerate(zip(kernel, window.stride, window.dilation, strict=True)):
        view = view.unfold(1 + axis, (size - 1) * gap + 1, step)[..., ::gap]
    view = view.movedim(1 + window.space, -1)
    row = max(view[:, :1].numel() * view.element_size(), 1)
    return torch.split(view, max(PIECE // row, 1), 1)


def as_floats(left: Tensor, right: Tensor, types: tuple[str, str]) -> tuple[Tensor, Tensor]:
    """Convert codes to float64, in which every sum of integers is exact, or to float32 if either type is float."""
    rows = [qtype(name) for name in types]
    dtype = torch.float64 if all(row.kind == "int" for row in rows) else torch.float32
    return from_codes(left, rows[0], dtype), from_codes(right, rows[1], dtype)


def as_integers(totals: Tensor) -> Tensor:
    """Round float64 sums to int64: FFT convolutions, which GPUs may use, are slightly off."""
    return totals.round().to(torch.int64)
