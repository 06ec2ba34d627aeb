"""Convolutions of quantized tensors. What is scaled when: Qwix 0.1.8, core/conv_general.py.

More than there: weights alone can be quantized, activations and weights can have different types, and weights can have
zero points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .matmul import refuse_two_zero_points, sums_of_codes
from .qarray import QArray, dequantize
from .qtypes import qtype
from .rounding import from_codes

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
    space = (weight.qvalue if isinstance(weight, QArray) else weight).dim() - 2
    if not (isinstance(x, QArray) and isinstance(weight, QArray) and _scales_after(x) and _scales_after(weight)):
        left = dequantize(x) if isinstance(x, QArray) else x
        right = dequantize(weight) if isinstance(weight, QArray) else weight
        return CONVOLUTIONS[space](left, right.to(left.dtype), None, stride, padding, dilation, groups)
    refuse_two_zero_points(x, weight)
    kernel = weight.qvalue.shape[2:]
    steps, spread = _each(stride, space), _each(dilation, space)
    edges = _edges(padding, kernel, spread)

    def sums(codes: Tensor, taps: Tensor) -> Tensor:
        return _sums(codes, taps, (x.qtype, weight.qtype), steps, edges, spread, groups)

    found = sums(x.qvalue, weight.qvalue)
    if x.zero_point is not None:
        # Zeros of the padding have the code 0 and no zero point: only what lies inside takes part.
        found = found - sums(torch.ones_like(x.qvalue[:1]), weight.qvalue) * x.zero_point.to(found.dtype)
    if weight.zero_point is not None:
        zeros = weight.zero_point.to(found.dtype).reshape(1, -1, *[1] * space)
        found = found - sums(x.qvalue, torch.ones_like(weight.qvalue)) * zeros
    scale = weight.scale.reshape(1, -1, *[1] * space)
    return (found.to(x.scale.dtype) * x.scale * scale).to(x.dtype)


def _scales_after(array: QArray) -> bool:
    """Whether its scales can be applied to sums of codes."""
    return qtype(array.qtype).kind in ("int", "float") and array.scale.numel() in (1, array.scale.shape[0])


def _each(value: int | Sequence[int], space: int) -> tuple[int, ...]:
    return (value,) * space if isinstance(value, int) else tuple(value)


def _edges(padding: int | str | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    """Zeros before and after, for each axis of space. "same" has the odd one after, as in torch."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        spans = [(size - 1) * gap for size, gap in zip(kernel, dilation, strict=True)]
        return [(span // 2, span - span // 2) for span in spans]
    assert not isinstance(padding, str), padding
    return [(size, size) for size in _each(padding, len(kernel))]


def _sums(
    codes: Tensor,
    taps: Tensor,
    types: tuple[str, str],
    stride: Sequence[int],
    edges: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The convolution of codes: exact integers of integers, else float32."""
    rows = [qtype(name) for name in types]
    around = [size for pair in reversed(edges) for size in pair]
    integer = all(row.kind == "int" for row in rows)
    if integer and groups == 1:
        return _by_patches(F.pad(codes.movedim(1, -1), [0, 0, *around]), taps, types, stride, dilation)
    dtype = torch.float64 if integer else torch.float32
    left, right = (from_codes(one, row, dtype) for one, row in zip((codes, taps), rows, strict=True))
    with torch.autocast(codes.device.type, enabled=False):
        done = CONVOLUTIONS[len(stride)](F.pad(left, around), right, None, stride, 0, dilation, groups)
    # A convolution by way of Fourier transforms, as GPUs have them, would be off by a little.
    return done.round().to(torch.int64) if integer else done


def _by_patches(
    codes: Tensor, taps: Tensor, types: tuple[str, str], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """[batch, out, *space] of padded codes [batch, *space, channels]; channels last, so patches are copied in runs."""
    space, kernel = len(stride), taps.shape[2:]
    view = codes.contiguous()
    for axis, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True)):
        view = view.unfold(1 + axis, (size - 1) * gap + 1, step)[..., ::gap]
    view = view.movedim(1 + space, -1)  # [batch, *space, *kernel, channels]
    flat = taps.movedim(1, -1).reshape(taps.shape[0], -1)
    row = max(view[:, :1].numel() * view.element_size(), 1)
    parts = [
        sums_of_codes(part.reshape(-1, flat.shape[1]), flat, *types).reshape(*part.shape[: 1 + space], -1)
        for part in torch.split(view, max(PIECE // row, 1), 1)
    ]
    return (torch.cat(parts, 1) if len(parts) > 1 else parts[0]).movedim(-1, 1)
