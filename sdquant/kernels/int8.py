"""Products in 8-bit integers with packed weights of any scheme: what `compute="int8"` does.

The rows of activations are quantized as they come, each with a scale of its own, and so is each row of the weight
(a row of a convolution's activations is the patch that one output sees). Then

    y[m, n] = float32(sum_k x_code[m, k] * w_code[n, k]) * x_scale[m] * w_scale[n] + bias[n]

with an exact sum. A code is round(value * (127 / largest)), to the nearest and ties to even, its scale largest / 127,
where `largest` is the largest size in the row; all of it in float32. Weights that are bytes already, with one scale for
a row, are taken as they are. All others are decoded and quantized again, by row, at every call: what is in memory stays
what the scheme stores.

Few rows of activations are left to the exact product, which is as fast there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ..rows import cut
from ..rules import integers
from .native import int8 as native
from .scratch import scratch

if TYPE_CHECKING:
    from ..backends.base import Backend, Geometry, Packed
    from .forms import Form

NAME = "int8"
LARGEST = 127.0
# Rows whose largest value is below this count as zeros: the quotient 127 / largest would overflow.
LEAST = 2.0**-100

# Rows of activations from which the product is in integers. Measured on a Zen5 core with 3072 -> 3072, bfloat16 and
# float32 (bench/int8.py): the exact product takes as long at 16 rows.
LEAST_ROWS = 32
# The same where weights are quantized again, which takes as long as the product of that many rows.
LEAST_ROWS_AGAIN = 256
# Outputs of a convolution from which its patches are worth copying out and quantizing.
LEAST_CHANNELS = 512
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DEVICES = ("cpu", "cuda")
_TILE = 1 << 20  # sums, weights, and values of patches, that are in a scratch buffer at a time


def direct(form: Form | None) -> bool:
    """Whether the codes of a weight are multiplied as they are."""
    return (
        form is not None
        and form.by_row
        and form.packing in ("int8", "uint8")
        and not (form.table or form.nested or form.shift)
        and (isinstance(form.zero, int) or form.zero_packing in ("int8", "uint8"))
    )


def pays(form: Form | None, x: Tensor, rows: int) -> bool:
    """Whether the product of so many rows of activations like `x` is computed in integers."""
    if x.dtype not in _FLOATS or x.device.type not in _DEVICES or not integers.fast(x.device):
        return False
    return rows >= (LEAST_ROWS if direct(form) else LEAST_ROWS_AGAIN)


def pays_convolved(form: Form | None, shape: tuple[int, ...], x: Tensor, geometry: Geometry) -> bool:
    """The same for a convolution of x [b, in, ...] with a weight of `shape`."""
    if geometry.groups != 1 or isinstance(geometry.padding, str) or shape[0] < LEAST_CHANNELS:
        return False
    return pays(form, x, x.shape[0] * math.prod(_outputs(x.shape[2:], shape[2:], geometry)))


def linear(backend: Backend, packed: Packed, form: Form | None, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] times the transposed weight, and the bias: [..., out] in x's dtype."""
    rows = packed.spec.shape[0]
    flat = x.reshape(-1, x.shape[-1])
    if native.reads(form, packed.parts):
        assert form is not None
        return native.linear(form, packed.parts, _direct(packed, form), flat, bias).view(*x.shape[:-1], rows)
    out = torch.empty(flat.shape[0], rows, dtype=x.dtype, device=x.device)
    _multiply(backend, packed, form, flat, bias, out)
    return out.view(*x.shape[:-1], rows)


def convolve(
    backend: Backend, packed: Packed, form: Form | None, x: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    """x [b, in, ...] convolved with the weight, and the bias: [b, out, ...] in x's dtype."""
    rows, kernel = packed.spec.shape[0], packed.spec.shape[2:]
    if len(kernel) == 2 and native.reads(form, packed.parts):
        assert form is not None
        places = _outputs(x.shape[2:], kernel, geometry)
        return native.convolve(form, packed.parts, _direct(packed, form), kernel, x, bias, geometry, places)
    patches = _patches(x, kernel, geometry)
    places = patches.shape[: 1 + len(kernel)]  # b, and the places of an output
    out = torch.empty(math.prod(places), rows, dtype=x.dtype, device=x.device)
    columns = math.prod(packed.spec.shape[1:])
    _multiply(backend, packed, form, patches.reshape(-1, columns), bias, out)
    return out.view(*places, rows).movedim(-1, 1).contiguous()


def _outputs(sizes: torch.Size, kernel: tuple[int, ...], how: Geometry) -> tuple[int, ...]:
    assert not isinstance(how.padding, str)
    rows = zip(sizes, kernel, how.stride, how.padding, how.dilation, strict=True)
    return tuple((n + 2 * pad - step * (k - 1) - 1) // stride + 1 for n, k, stride, pad, step in rows)


def _patches(x: Tensor, kernel: tuple[int, ...], how: Geometry) -> Tensor:
    """What each output sees: [b, *places, in, *kernel], a view of x with its padding."""
    assert not isinstance(how.padding, str)
    places = _outputs(x.shape[2:], kernel, how)
    x = F.pad(x, [pad for pad in reversed(how.padding) for _ in range(2)]) if any(how.padding) else x
    batch, channel, *steps = x.stride()
    strides = [step * by for step, by in zip(steps, how.stride, strict=True)]
    inner = [step * by for step, by in zip(steps, how.dilation, strict=True)]
    return x.as_strided((len(x), *places, x.shape[1], *kernel), (batch, *strides, channel, *inner))


def quantized_rows(x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The codes, int8 [m, k], and scales, float32 [m, 1], of rows x [m, k] of any float dtype; see the module.

    A row that is not finite has a scale that is not.
    """
    values = x.to(torch.float32)
    largest = values.abs().amax(1, keepdim=True)
    zero = largest < LEAST
    # A number divided by a tensor would be its reciprocal times the number, rounded twice.
    factor = largest.new_full((), LARGEST).div(largest).masked_fill_(zero, 0.0)
    codes = values.mul(factor).round_()
    scale = (largest / LARGEST).masked_fill_(zero, 0.0)
    if out is None:
        return codes.to(torch.int8), scale
    return out.copy_(codes), scale


def _direct(packed: Packed, form: Form) -> native.Direct | None:
    """The scales and zero points of a weight whose codes are taken as they are; None for others."""
    return native.Direct(*_of_rows(packed, form)) if direct(form) else None


def _of_rows(packed: Packed, form: Form) -> tuple[Tensor, Tensor]:
    """The scale of each row, float32 [rows], and what is subtracted from each code in it, int32 [rows]."""
    codes, rows = packed.parts[form.codes], form.rows
    scale = packed.parts[form.scale].flatten().to(torch.float32) if form.scale else codes.new_ones(1).float()
    scale = scale * form.factor
    if isinstance(form.zero, int):
        zero = torch.full((rows,), form.zero, dtype=torch.int32, device=codes.device)
    else:
        zero = packed.parts[form.zero].flatten().to(torch.int32)
    return tuple(one if len(one) == rows else one.repeat_interleave(rows // len(one)) for one in (scale, zero))


def weight_codes(backend: Backend, packed: Packed, form: Form | None) -> tuple[Tensor, Tensor, Tensor | int]:
    """A weight as int8 codes [rows, columns], the scale of each row [rows] in float32, and what is to be added to each
    code: an int32 number for each row, or one for all."""
    if form is None or not direct(form):
        weight = backend.decode(packed, torch.float32).view(packed.spec.shape[0], -1)
        codes, scale = quantized_rows(weight, scratch(tuple(weight.shape), torch.int8, weight.device))
        return codes, scale.view(-1), 0
    codes = packed.parts[form.codes].view(form.rows, form.columns)
    scale, zero = _of_rows(packed, form)
    added: Tensor | int = -form.zero if isinstance(form.zero, int) else -zero
    if codes.dtype == torch.uint8:
        codes = torch.bitwise_xor(
            codes.view(torch.int8), -128, out=scratch(tuple(codes.shape), torch.int8, codes.device)
        )
        added = added + 128
    return codes, scale, added


def _multiply(backend: Backend, packed: Packed, form: Form | None, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """x [m, columns] times the transposed weight, and the bias, into `out` [m, rows]; in tiles of the weight's rows."""
    codes, x_scale = quantized_rows(x)
    sums = codes.sum(1, keepdim=True, dtype=torch.int32)
    for start, stop, part in _tiles(backend, packed, len(x)):
        weight, scale, added = weight_codes(backend, part, backend.form(part))
        total = integers.product(codes, weight)
        if isinstance(added, Tensor) or added:
            total += sums * added
        tile = total.to(torch.float32).mul_(x_scale).mul_(scale)
        out[:, start:stop] = tile if bias is None else tile.add_(bias[start:stop])


def _tiles(backend: Backend, packed: Packed, m: int) -> Iterator[tuple[int, int, Packed]]:
    """Ranges of a weight's rows, each as a packed weight, such that the sums for `m` rows of activations are few."""
    rows, columns = packed.spec.shape[0], math.prod(packed.spec.shape[1:])
    step = max(_TILE // max(m, columns), 128) // 64 * 64
    if step >= rows or not backend.by_row(packed):
        yield 0, rows, packed
        return
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield start, stop, cut(packed, [(start, stop)])
