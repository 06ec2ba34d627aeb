"""Products in 8-bit integers with packed weights of any scheme: `compute="int8"`.

The rows of activations are quantized as they come, each with a scale of its own, and so is each row of the weight
(a row of a convolution's activations is the patch that one output sees). Then

    y[m, n] = float32(sum_k x_code[m, k] * w_code[n, k]) * x_scale[m] * w_scale[n] + bias[n]

with an exact sum, or, where a row of the weight has several scales, each for a run r of its columns,

    y[m, n] = (sum_r float32(sum_(k in r) x_code[m, k] * w_code[n, k]) * w_scale[n, r]) * x_scale[m] + bias[n]

with exact sums in runs. Where the format of a weight has scales for blocks of activations, too (MXFP8), so have these:

    y[m, n] = sum_r float32(sum_(k in r) x_code[m, k] * w_code[n, k]) * x_scale[m, r] * w_scale[n, r] + bias[n]

A code is round(value * (127 / largest)), to the nearest and ties to even, its scale largest / 127, where `largest` is
the largest magnitude in the row, or run; all of it in float32. Weights that are 8-bit codes already, with one scale for
a row or for runs of 64, 128, ... columns, are multiplied directly. All others are dequantized and requantized at every
call, by row or, if they are finer than that, by runs of 256 columns (`int8_reference.coding`): in memory stays what the
scheme stores.

Few rows of activations are left to the exact product, which is as fast there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core import Geometry, hadamard, packed_rows, torch_dtypes
from . import int8_or_torch, int8_reference, int_matmul
from .base import Coding, EightBit
from .cpu import int8 as native
from .dispatch_guard import undisturbed
from .fastest import by_the_faster
from .hadamard import rotate
from .im2col import outputs, patches, pieces
from .triton import imports

if TYPE_CHECKING:
    from ..core import Backend, Packed, PackedLayout
    from .row_codes import RowCodes

log = logging.getLogger(__name__)

NAME = "int8"
_CHECKED_ROWS = 40
_DEVICES = ("cpu", "cuda")
_TILE = 1 << 20  # sums, weights, and values of patches, that are in a scratch buffer at a time


@dataclass(frozen=True, kw_only=True)
class Least:
    """The sizes from which integers are faster. Measured with 3072 -> 3072 and the convolutions of SDXL's UNet on a
    Zen 5 core, for AMX on a Granite Rapids core; with AVX2 alone, linear layers on a Zen 3 core.

    Attributes:
        rows: of activations, for weights whose codes are multiplied directly. again: for those requantized.
        channels: outputs of a convolution. columns: its inputs times the size of its kernel.
    """

    rows: int
    again: int
    channels: int
    columns: int


# The C kernels; with AMX, where exact products of bf16 are as fast for longer; with AVX2 alone, where exact ones take
# twice as long from the second row on; torch, in which quantizing a weight again takes as long as a product of so many
# rows saves.
BY_C = Least(rows=16, again=16, channels=64, columns=1024)
BY_AMX = Least(rows=16, again=192, channels=64, columns=1024)
BY_AVX2 = Least(rows=2, again=16, channels=64, columns=1024)
BY_TORCH = Least(rows=32, again=2048, channels=512, columns=1024)


def _least(packed: Packed, form: PackedLayout | None, dtype: torch.dtype) -> Least:
    if form is None or not native.reads(form, packed.parts):
        return BY_TORCH
    by = native.instructions(form.columns)
    if by == "amx" and dtype == torch.bfloat16:
        return BY_AMX
    return BY_AVX2 if by == "avx2" else BY_C


def least(packed: Packed, form: PackedLayout | None, dtype: torch.dtype) -> int:
    """Return the number of rows of activations of `dtype` from which integers are faster."""
    limits = _least(packed, form, dtype)
    return limits.again if int8_reference.coding(packed, form) & Coding.AGAIN else limits.rows


def pays(packed: Packed, form: PackedLayout | None, x: Tensor, rows: int) -> bool:
    """Return whether the product of so many rows of activations like `x` is faster in integers."""
    if x.dtype not in torch_dtypes.COMPUTE_DTYPES or x.device.type not in _DEVICES:
        return False
    if rows < least(packed, form, x.dtype):
        return False
    if native.reads(form, packed.parts):
        return True
    if int8_reference.coding(packed, form) & Coding.BY_RUN:  # in torch a pass over the results for each run
        return x.is_cuda and imports.products(x.device) is not None
    return (x.is_cuda and imports.products(x.device) is not None) or int_matmul.beats_floats(x.device)


def pays_convolved(packed: Packed, form: PackedLayout | None, x: Tensor, geometry: Geometry) -> bool:
    """Return the same for a convolution of x [b, in, ...]."""
    shape, of_sizes = packed.spec.shape, _least(packed, form, x.dtype)
    if geometry.groups != 1 or isinstance(geometry.padding, str):
        return False
    if shape[0] < of_sizes.channels or math.prod(shape[1:]) < of_sizes.columns:
        return False
    return pays(packed, form, x, x.shape[0] * math.prod(outputs(x.shape[2:], shape[2:], geometry)))


def prepared(backend: Backend, packed: Packed, form: PackedLayout, dtype: torch.dtype) -> EightBit:
    """Return the product of activations of `dtype` for a reader that prepares it."""
    if packed.device.type != "cpu":
        return int8_reference.launched(backend, packed, form, dtype, least(packed, form, dtype))
    if dtype not in torch_dtypes.COMPUTE_DTYPES or not _by_c(backend, packed, form, dtype):
        return EightBit(least(packed, form, dtype), None)
    coding = int8_reference.coding(packed, form)
    return EightBit(least(packed, form, dtype), coding, left=int8_or_torch.left(packed, form, dtype))


def rotates(backend: Backend, packed: Packed, form: PackedLayout | None, x: Tensor, rotation: int) -> bool:
    """Return whether `linear` rotates activations itself, in float32 and without rounding before they are quantized."""
    if form is None or not pays(packed, form, x, x.numel() // x.shape[-1]):
        return False
    if x.is_cuda:
        return imports.rotation(x.device, rotation) is not None
    if int8_reference.coding(packed, form) & Coding.BOTH:  # the C kernels quantize runs of inputs as they are
        return False
    return x.is_cpu and hadamard.is_regular(rotation) and _by_c(backend, packed, form, x.dtype)


def linear(
    backend: Backend, packed: Packed, form: PackedLayout | None, x: Tensor, bias: Tensor | None, rotation: int = 0
) -> Tensor:
    """Multiply x [..., in] by the transposed weight and add the bias: [..., out] in x's dtype.

    Args:
        rotation: how many columns of x are to be rotated together; only where it `rotates`.
    """
    flat = x.reshape(-1, x.shape[-1])
    if form is None or not _by_c(backend, packed, form, x.dtype):
        out = by_steps(backend, packed, flat, bias, rotation=rotation)
    elif rotation or not int8_or_torch.may_be_torchs(packed, form, len(flat), x.dtype):
        out = native.linear(form, packed.parts, int8_reference.coding(packed, form), flat, bias, rotation)
    else:
        out = by_the_faster(
            int8_or_torch.kind(packed, form, x.dtype), len(flat),
            lambda: native.linear(form, packed.parts, int8_reference.coding(packed, form), flat, bias),
            lambda: by_steps(backend, packed, flat, bias, tile=int8_or_torch.TILE),
        )  # fmt: skip
    return out.view(*x.shape[:-1], packed.spec.shape[0])


def convolve(
    backend: Backend, packed: Packed, form: PackedLayout | None, x: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    """Convolve x [b, in, ...] with the weight and add the bias: [b, out, ...] in x's dtype and memory format."""
    if form is not None and len(packed.spec.shape) == 4 and _by_c(backend, packed, form, x.dtype):
        return _convolve_by_c(packed, form, x, bias, geometry)
    return convolve_by_steps(backend, packed, x, bias, geometry)


def _convolve_by_c(packed: Packed, form: PackedLayout, x: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    _, _, high, wide = packed.spec.shape
    places = outputs(x.shape[2:], (high, wide), geometry)
    return native.convolve(
        form, packed.parts, int8_reference.coding(packed, form), (high, wide), x, bias, geometry, (places[0], places[1])
    )


def by_steps(
    backend: Backend,
    packed: Packed,
    x: Tensor,
    bias: Tensor | None,
    by: type[int8_reference.Steps] | None = None,
    rotation: int = 0,
    tile: int = _TILE,
) -> Tensor:
    """Multiply x [m, in] in integers, step by step.

    Args:
        by: the implementation; None for the fastest. rotation: of x, as in `linear`. tile: sums, or weights, that are
            in memory at a time on a CPU.
    """
    impl = int8_reference.fastest(x) if by is None else by(x.device)
    out = torch.empty(x.shape[0], packed.spec.shape[0], dtype=x.dtype, device=x.device)
    form = backend.form(packed)
    operands = _operands(impl, backend, packed, len(x), tile)
    if int8_reference.coding(packed, form) & Coding.BOTH:
        _times(impl, impl.runs(rotate(x.float(), rotation) if rotation else x), operands, bias, out)
    else:
        _multiply(impl, x, int8_reference.needs_sums(form), operands, bias, out, rotation)
    return out


def convolve_by_steps(
    backend: Backend,
    packed: Packed,
    x: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    by: type[int8_reference.Steps] | None = None,
) -> Tensor:
    """Convolve x [b, in, ...] in integers: im2col, a tile of patches at a time, and the product.

    A GPU has as large tiles as its memory allows, and the codes of the weight once for all of them.
    """
    impl = int8_reference.fastest(x) if by is None else by(x.device)
    rows, kernel = packed.spec.shape[0], packed.spec.shape[2:]
    windows = patches(x, kernel, geometry)
    places = windows.shape[: 1 + len(kernel)]  # b, and the places of an output
    columns = math.prod(packed.spec.shape[1:])
    out = torch.empty(*places, rows, dtype=x.dtype, device=x.device)
    needs_sums = int8_reference.needs_sums(backend.form(packed))
    operands: list[_Operand] = []
    for some in pieces(places, columns, most_patches(x.device)):
        part, to = windows[some].reshape(-1, columns), out[some].view(-1, rows)
        if x.device.type == "cpu":  # where they are in the workspace, which the next ones take
            _multiply(impl, part, needs_sums, _operands(impl, backend, packed, len(part)), bias, to)
            continue
        operands = operands or [*_operands(impl, backend, packed, len(part))]
        _multiply(impl, part, needs_sums, operands, bias, to)
    last = x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return out.movedim(-1, 1) if last else out.movedim(-1, 1).contiguous()


@cache
def most_patches(device: torch.device) -> int:
    """Return how many values of patches are in memory at a time: on a GPU, with their codes, a twentieth of it."""
    if device.type == "cpu":
        return 8 * _TILE
    known = device.type == "cuda" and torch.cuda.is_available()
    memory = torch.cuda.get_device_properties(device).total_memory if known else 0
    return max(int(memory) // 64, int8_reference.MOST_SUMS)


_verdicts: dict[tuple[object, ...], bool] = {}


@lru_cache(maxsize=4096)
def _of_any_size(form: PackedLayout) -> PackedLayout:
    return replace(form, rows=0, factor=1.0 if form.factor == 1.0 else 2.0)  # each NVFP4 weight has a factor of its own


def _by_c(backend: Backend, packed: Packed, form: PackedLayout, dtype: torch.dtype) -> bool:
    """Return whether the C kernels multiply such a weight; they are checked against torch once per kind."""
    if not native.reads(form, packed.parts):
        return False
    key = (_of_any_size(form), dtype, packed.spec.shape[1:], *[part.dtype for part in packed.parts.values()])
    if key not in _verdicts:
        _verdicts[key] = _right(backend, packed, dtype)
    return _verdicts[key]


@undisturbed
def _right(backend: Backend, packed: Packed, dtype: torch.dtype) -> bool:
    rows = packed.spec.shape[0]
    if backend.by_row(packed) and rows > _CHECKED_ROWS:
        packed = packed_rows.cut(packed, [(0, _CHECKED_ROWS)])
    form = backend.form(packed)
    assert form is not None
    x = torch.linspace(-1, 1, 5 * form.columns, dtype=torch.float32, device="cpu").sin().view(5, form.columns).to(dtype)
    bias = torch.linspace(-1, 1, packed.spec.shape[0], dtype=torch.float32, device="cpu").to(dtype)
    if len(packed.spec.shape) == 2:
        result = native.linear(form, packed.parts, int8_reference.coding(packed, form), x, bias)
        same = torch.equal(result, by_steps(backend, packed, x, bias, int8_reference.Steps))
    else:
        image = x.view(-1)[: packed.spec.shape[1] * 4].view(1, -1, 2, 2)
        one = (1, 1)
        pad = (packed.spec.shape[2] // 2, packed.spec.shape[3] // 2)
        how = Geometry(stride=one, padding=pad, dilation=one, groups=1)
        by_torch = convolve_by_steps(backend, packed, image, bias, how, int8_reference.Steps)
        same = torch.equal(_convolve_by_c(packed, form, image, bias, how), by_torch)
    if not same:
        log.warning(
            "The C kernels are not used for integer products with %s: their results are wrong. Using torch "
            "instead, which is slower.",
            packed.spec.scheme,
        )
    return same


@dataclass(frozen=True)
class _Operand:
    """Rows `start` to `stop` of a weight, of `whole` or not, as codes and scales: see `Steps`."""

    start: int
    stop: int
    whole: bool
    by_row: RowCodes | None = None
    by_run: tuple[Tensor, Tensor] | None = None


def _operands(
    impl: int8_reference.Steps, backend: Backend, packed: Packed, m: int, tile: int = _TILE
) -> Iterator[_Operand]:
    """Yield the weight for products of `m` rows of activations, in tiles of rows; on CPUs valid until the next one."""
    for start, stop, part in _tiles(backend, packed, m if impl.sums_in_memory else 1, tile):
        form = backend.form(part)
        if form is not None and int8_reference.coding(part, form) & Coding.BY_RUN:
            by_run = impl.weight_by_run(backend, part, form)
            yield _Operand(start, stop, part is packed, by_run=by_run)
        else:
            yield _Operand(start, stop, part is packed, by_row=impl.weight(backend, part, form))


def _multiply(
    impl: int8_reference.Steps,
    x: Tensor,
    needs_sums: bool,
    operands: Iterable[_Operand],
    bias: Tensor | None,
    out: Tensor,
    rotation: int = 0,
) -> None:
    """Multiply x [m, columns] by the transposed weight and add the bias, into `out` [m, rows]."""
    if rotation and isinstance(impl, int8_reference.InTriton):
        quantized = impl.rows(x, needs_sums, rotation)
    else:
        quantized = impl.rows(rotate(x.float(), rotation) if rotation else x, needs_sums)
    _times(impl, quantized, operands, bias, out)


def _times(
    impl: int8_reference.Steps,
    quantized: tuple[Tensor, Tensor, Tensor | None],
    operands: Iterable[_Operand],
    bias: Tensor | None,
    out: Tensor,
) -> None:
    codes, x_scale, sums = quantized
    for of in operands:
        of_bias = bias if bias is None or of.whole else bias[of.start : of.stop]
        of_out = out if of.whole else out[:, of.start : of.stop]
        if of.by_run is not None:
            impl.by_run(codes, *of.by_run, x_scale, of_bias, of_out)
        else:
            assert of.by_row is not None
            impl.by_row(codes, x_scale, sums, of.by_row, of_bias, of_out)


def _tiles(backend: Backend, packed: Packed, m: int, tile: int) -> Iterator[tuple[int, int, Packed]]:
    """Yield ranges of a weight's rows, each as a packed weight, so that their codes and the sums for `m` rows of x are
    few."""
    rows, columns = packed.spec.shape[0], math.prod(packed.spec.shape[1:])
    tile = tile if packed.device.type == "cpu" else int8_reference.MOST_SUMS
    step = max(tile // max(m, columns), 128) // 64 * 64
    if step >= rows or not backend.by_row(packed):
        yield 0, rows, packed
        return
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield start, stop, packed_rows.cut(packed, [(start, stop)])
