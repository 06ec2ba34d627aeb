"""Convolutions of schemes that quantize activations themselves, on GPUs: the codes of images are made in one launch,
and those of their patches multiplied in another, as in linear layers.

The largest number of an image is torch's to find: a program of Triton's would read a whole image alone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from .im2col import patches, pieces
from .int8_linear import most_patches
from .triton import imports

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ..core import Activations, Geometry, PackedLayout

_MOST_TILE = 4096  # numbers of an image that share a program's turn


def convolve(
    form: PackedLayout,
    parts: Mapping[str, Tensor],
    how: Activations,
    kernel: tuple[int, ...],
    x: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    size: Any = None,
) -> Tensor:
    """Convolve x [b, in, h, w] with the weight and add the bias, as `Backend.convolve` does: [b, rows, h', w'].

    Args:
        kernel: its height and width. size: the tile to compute in; None for the best one.
    """
    device = x.device
    kernels: Any = imports.scheme_kernels(device)
    codes, scale = _codes_of_images(kernels, how, parts, x)
    weight = parts[form.codes]
    if form.packing != "int8":
        weight = torch.empty(form.rows, form.columns, dtype=torch.int8, device=device)
        kernels.decode(replace(form, scale="", factor=1.0), parts, weight)(device)
    windows = patches(codes, kernel, geometry)
    places = windows.shape[: 1 + len(kernel)]
    each = scale.view(-1, *[1] * len(kernel)).expand(places)
    out = torch.empty(*places, form.rows, dtype=x.dtype, device=device)
    added = None if bias is None else bias.to(x.dtype).contiguous()
    for some in pieces(places, form.columns, most_patches(device)):
        rows, to = windows[some].reshape(-1, form.columns).contiguous(), out[some].view(-1, form.rows)
        sums = rows.sum(1, keepdim=True, dtype=torch.int32) if isinstance(form.zero, str) else None
        of_rows = each[some].reshape(-1, 1).contiguous()
        kernels.tiled_product(rows, of_rows, sums, form, weight, parts, added, to, size)(device)
    last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return out.movedim(-1, 1) if last else out.movedim(-1, 1).contiguous()


def _codes_of_images(kernels: Any, how: Activations, parts: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of x [b, in, ...], int8 of its shape, contiguous, and their scales, float32 [b, 1]."""
    images = x.reshape(len(x), -1).contiguous()
    count = images.shape[1]
    tile = math.gcd(count, _MOST_TILE)
    codes = torch.empty(images.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(len(x), count // tile, dtype=torch.float32, device=x.device)
    known = parts[how.scale] if how.scale else None
    largest = None if how.scale else images.abs().amax(1)
    kernels.activation_codes(images, how, known, codes, scale, None, largest)(x.device)
    return codes.view(x.shape), scale[:, :1].contiguous()
