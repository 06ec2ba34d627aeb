"""Kernel dispatch for packed weights: the fastest kernels that support the layout and pass a check, else torch.

The check compares a reader with the backend's own decoding, bit for bit, the first time that a kind of weight is used
on a kind of device. A kernel that a driver, compiler or processor makes wrong is not used; the log says so once.
"""

from __future__ import annotations

import importlib
import logging
import math
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import packed_rows
from . import blocked_gemm, fp8_linear, fp32_gemm, int8_linear
from .dispatch_guard import plain
from .hadamard import rotate
from .im2col import few_patches, outputs
from .linear_with_rotation import LinearWithRotation
from .workspace import scratch

if TYPE_CHECKING:
    from ..core import Backend, Geometry, LowRank, Packed, PackedLayout
    from .base import Prepared, Reader

__all__ = ["Way", "convolve", "decode_into", "linear", "prepared", "readers", "way"]

log = logging.getLogger(__name__)

# Module and name of the readers for each device type, in order of preference.
_TRITON = ("sdquant.kernels.triton.triton_kernels", "TritonReader")
_READERS: dict[str, tuple[tuple[str, str], ...]] = {
    "cpu": (("sdquant.kernels.cpu.cpu_kernels", "native"), ("sdquant.kernels.libgguf", "reader")),
    "cuda": (_TRITON,),
    "xpu": (_TRITON,),
}
_CHECKED_ROWS = 16
CONVOLUTIONS: tuple[Any, ...] = (F.conv1d, F.conv2d, F.conv3d)


@dataclass(frozen=True, kw_only=True)
class Way:
    """The kernels for weights of one kind.

    Attributes:
        reader: None for the backend's own decoding.
        few, few_patches: up to how many rows of activations, and patches of images, the reader's own product is used.
    """

    reader: Reader | None = None
    few: int = 0
    few_patches: int = 0


_TORCH = Way()
_ways: dict[tuple[object, ...], Way] = {}


@cache
def readers(device_type: str) -> tuple[Reader, ...]:
    """Return the installed readers for a device type."""
    candidates = (getattr(importlib.import_module(module), name)() for module, name in _READERS.get(device_type, ()))
    return tuple(reader for reader in candidates if reader is not None)


def way(backend: Backend, packed: Packed, form: PackedLayout | None, dtype: torch.dtype) -> Way:
    """Return the kernels that dequantize `packed`, whose layout is `form`, to `dtype`."""
    if form is None:
        return _TORCH
    parts = packed.parts
    if not all(plain(part) for part in parts.values()):
        return _TORCH
    device = parts[form.codes].device
    key = (form, dtype, device, *[part.dtype for part in parts.values()])
    kernels = _ways.get(key)
    if kernels is None:
        kernels = _ways[key] = _chosen(backend, packed, form, dtype, device)
    return kernels


def _chosen(backend: Backend, packed: Packed, form: PackedLayout, dtype: torch.dtype, device: torch.device) -> Way:
    for reader in readers(device.type):
        if reader.reads(form, packed.parts, dtype) and _passes(reader, backend, packed, form, dtype):
            of = form, packed.parts, dtype
            return Way(reader=reader, few=reader.few(*of), few_patches=reader.few_patches(*of))
    return _TORCH


_verdicts: dict[tuple[object, ...], bool] = {}


def _passes(reader: Reader, backend: Backend, packed: Packed, form: PackedLayout, dtype: torch.dtype) -> bool:
    """Return whether the reader gives correct results for weights like this one; checked once for each kind."""
    kind = replace(
        form,
        rows=0,
        columns=form.columns % 64,
        group=form.group if form.group < form.columns else 0,
        factor=1.0 if form.factor == 1.0 else 2.0,  # a number of each weight; whether there is one is another kernel
    )
    key = (reader.name, kind, dtype, packed.device, *[part.dtype for part in packed.parts.values()])
    if key not in _verdicts:
        _verdicts[key] = _right(reader, backend, packed, dtype)
    return _verdicts[key]


def _right(reader: Reader, backend: Backend, packed: Packed, dtype: torch.dtype) -> bool:
    if backend.by_row(packed):
        packed = packed_rows.take(packed, torch.arange(min(packed.spec.shape[0], _CHECKED_ROWS), device=packed.device))
    form = backend.form(packed)
    assert form is not None
    why = ""
    try:
        expected = backend.decode(packed, dtype).view(form.rows, form.columns)
        got = torch.full_like(expected, torch.nan)
        reader.decode_into(form, packed.parts, got)
        if not torch.equal(got, expected) and not torch.equal(got.nan_to_num(), expected.nan_to_num()):
            why = "the decoded weights are wrong"
        elif reader.few(form, packed.parts, dtype) and not _multiplies(reader, form, packed, expected):
            why = "the products are wrong"
        elif not _decodes_rows(reader, form, packed, expected):
            why = "some rows decoded alone are wrong"
        elif not _rounds(reader, form, packed, expected):
            why = "the rounded weights are wrong"
    except Exception as error:  # whatever it is: the kernel does not work here, and torch does
        why = f"{type(error).__name__}: {error}"
    if why:
        log.warning(
            "The %s kernels are not used for %s on %s: %s. Using torch instead, which is slower.",
            reader.name, packed.spec.scheme, packed.device.type, why,
        )  # fmt: skip
    return not why


def _decodes_rows(reader: Reader, form: PackedLayout, packed: Packed, weight: Tensor) -> bool:
    """Return whether rows of the weight decoded alone, if the reader can do so, are the same."""
    first = len(weight) // 3
    got = torch.full_like(weight[first:], torch.nan)
    if not reader.rows_into(form, packed.parts, first, len(weight), got):
        return True
    return torch.equal(got.nan_to_num(), weight[first:].nan_to_num())


def _rounds(reader: Reader, form: PackedLayout, packed: Packed, weight: Tensor) -> bool:
    """Return whether rounded rows in float32, if the reader has them, are those of the weight."""
    first = len(weight) // 3
    got = torch.full((len(weight) - first, form.columns), torch.nan, dtype=torch.float32, device=weight.device)
    if not fp32_gemm.is_profitable(weight.dtype) or not reader.rounded(
        form, packed.parts, weight.dtype, first, len(weight), got
    ):
        return True
    return torch.equal(got.nan_to_num(), weight[first:].float().nan_to_num())


def _multiplies(reader: Reader, form: PackedLayout, packed: Packed, weight: Tensor) -> bool:
    """Return whether products of one, a few and many rows are as close to the exact ones as float32 sums, rounded once,
    are: readers have different kernels for them."""
    dtype = weight.dtype
    if reader.unrounded(form, packed.parts, dtype):
        weight = torch.empty_like(weight, dtype=torch.float32)
        reader.decode_into(replace(form, arithmetic="float32"), packed.parts, weight)
    most = reader.few_patches(form, packed.parts, dtype)
    numbers = sorted({1, min(3, most), min(64, most)})
    return all(_multiplies_rows(m, reader, form, packed, weight, dtype) for m in numbers)


def _multiplies_rows(
    m: int, reader: Reader, form: PackedLayout, packed: Packed, weight: Tensor, dtype: torch.dtype
) -> bool:
    x = torch.linspace(-1, 1, m * form.columns, dtype=torch.float32, device=weight.device).view(m, -1).to(dtype)
    out = torch.empty(m, form.rows, dtype=dtype, device=weight.device)
    bias = torch.linspace(1, -1, form.rows, dtype=torch.float32, device=weight.device).to(dtype)
    reader.product(form, packed.parts, x, bias, out)
    wide, matrix, added = x.cpu().double(), weight.cpu().double().T, bias.cpu().double()  # some cards have no float64
    exact, sizes = wide @ matrix + added, wide.abs() @ matrix.abs() + added.abs()
    allowed = torch.finfo(out.dtype).eps * exact.abs() + 1e-5 * sizes + torch.finfo(out.dtype).tiny
    return bool(((out.cpu().double() - exact).abs() <= allowed).all()) or not bool(exact.isfinite().all())


def decode_into(backend: Backend, packed: Packed, form: PackedLayout | None, out: Tensor) -> None:
    """Dequantize into `out`, [*packed.spec.shape]; bit-equal to `backend.decode_into`."""
    reader = way(backend, packed, form, out.dtype).reader
    if reader is None or not out.is_contiguous():
        backend.decode_into(packed, out)
    else:
        assert form is not None
        reader.decode_into(form, packed.parts, out.view(form.rows, form.columns))


def embedding(
    backend: Backend, packed: Packed, form: PackedLayout | None, indices: Tensor, dtype: torch.dtype
) -> Tensor:
    """Look up `indices` in an embedding table: [*indices.shape, width] in `dtype`. Only these rows are dequantized if
    they are fewer than the table has and its packing allows it."""
    rows, width = packed.spec.shape
    # Beside a branch the sums of some rows may be rounded in another way than those of all.
    if indices.numel() < rows and backend.by_row(packed) and backend.low_rank(packed) is None:
        values = backend.decode(packed_rows.take(packed, indices.reshape(-1)), dtype)
        return values.view(*indices.shape, width)
    table = scratch(packed.spec.shape, dtype, packed.device)
    decode_into(backend, packed, form, table)
    return F.embedding(indices, table)


def linear(
    backend: Backend,
    packed: Packed,
    form: PackedLayout | None,
    x: Tensor,
    bias: Tensor | None,
    compute: str | None = None,
) -> Tensor:
    """Multiply x [..., in] by the transposed weight and add the bias: [..., out] in x's dtype. Saves nothing for
    gradients.

    Args:
        compute: "int8" for integer products, "fp8" for products of 8-bit floats, where that is faster.
    """
    _beside(packed, x)
    if not x.ndim or x.shape[-1] != packed.spec.shape[1]:
        return F.linear(x, _decoded(backend, packed, form, x), bias)  # torch says that it does not fit
    if packed.spec.rotation:
        codes, rotation = packed.without_rotation, packed.spec.rotation
        form = backend.form(codes)
        if compute == int8_linear.NAME and int8_linear.rotates(backend, codes, form, x, rotation):
            return int8_linear.linear(backend, codes, form, x, bias, rotation)
        return linear(backend, codes, form, rotate(x, rotation), bias, compute)
    branch = backend.low_rank(packed)
    if branch is not None:
        return _linear_with_branch(backend, packed, branch, x, bias, compute)
    if compute == int8_linear.NAME and int8_linear.pays(packed, form, x, x.numel() // max(x.shape[-1], 1)):
        return int8_linear.linear(backend, packed, form, x, bias)
    if compute == fp8_linear.NAME and fp8_linear.pays(packed, form, x):
        return fp8_linear.linear(
            packed, form, None if fp8_linear.direct(form) else _decoded(backend, packed, form, x), x, bias
        )
    kernels = way(backend, packed, form, x.dtype)
    if kernels.few and form is not None and x.numel() <= kernels.few * form.columns:
        return _product(kernels, packed, form, x.reshape(-1, form.columns), bias).view(*x.shape[:-1], form.rows)
    if x.is_cpu and x.numel() <= blocked_gemm.most(x.dtype) * x.shape[-1]:
        done = _tiled(kernels, packed, form, x.reshape(-1, x.shape[-1]), bias)
        if done is not None:
            return done.view(*x.shape[:-1], packed.spec.shape[0])
    if x.is_cpu and fp32_gemm.is_profitable(x.dtype):
        return fp32_gemm.linear(x, bias, packed.spec.shape[0], _rounded(backend, packed, form, x.dtype))
    return F.linear(x, _decoded(backend, packed, form, x), bias)


def _linear_with_branch(
    backend: Backend, packed: Packed, branch: LowRank, x: Tensor, bias: Tensor | None, compute: str | None
) -> Tensor:
    """Return the product with the residual, and beside it that with the narrow factors."""
    residual = replace(packed, parts=branch.residual)
    # In float32: of bfloat16, small factors would be zeros in float16.
    inputs = x if branch.smooth is None else (x / branch.smooth.float()).to(x.dtype)
    y = linear(backend, residual, backend.form(residual), inputs, bias if branch.rows is None else None, compute)
    if branch.rows is not None:
        y = y * branch.rows.to(x.dtype)
        y = y if bias is None else y + bias
    return branch.add_product(y, x)


def _beside(packed: Packed, x: Tensor) -> None:
    """Check that x is on the weight's device: kernels read memory by its address."""
    if x.device != packed.device:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but the input is on {x.device} and the quantized weight "
            f"({packed.spec.scheme}) on {packed.device}: move one of them, or load with an offload mode, which moves "
            "the weights"
        )


def prepared(
    backend: Backend, packed: Packed, form: PackedLayout | None, dtype: torch.dtype, compute: str | None, prefix: str
) -> Prepared | None:
    """Return `linear` for activations of `dtype` as far as it can be prepared; see `Reader.prepared`."""
    if packed.spec.rotation:
        return _prepared_with_rotation(backend, packed, dtype, compute, prefix)
    kernels = way(backend, packed, form, dtype)
    if form is None or kernels.reader is None:
        return None
    eight = None
    if compute == int8_linear.NAME:
        eight = int8_linear.prepared(backend, packed, form, dtype)
    elif compute == fp8_linear.NAME:
        if packed.device.type != "cuda":  # it has no effect there, which `linear` says
            return None
        eight = fp8_linear.prepared(packed, form, dtype)
    few = kernels.few if eight is None else min(kernels.few, eight.least - 1)
    return kernels.reader.prepared(form, packed.parts, dtype, few, prefix, eight)


def _prepared_with_rotation(
    backend: Backend, packed: Packed, dtype: torch.dtype, compute: str | None, prefix: str
) -> Prepared:
    codes = packed.without_rotation
    form = backend.form(codes)

    def multiply(codes: Packed, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(backend, codes, form, x, bias, compute)

    at_once, least = None, 0
    reader = None if form is None else way(backend, codes, form, dtype).reader
    if form is not None and reader is not None and compute == int8_linear.NAME:
        eight = int8_linear.prepared(backend, codes, form, dtype)
        at_once = reader.prepared_with_rotation(form, codes.parts, dtype, prefix, eight, packed.spec.rotation)
        least = eight.least
    inner = prepared(backend, codes, form, dtype, compute, prefix)
    names = {name: prefix + name for name in packed.parts}
    return LinearWithRotation(packed.spec, names, dtype, at_once, least, inner, multiply)


def _decoded(backend: Backend, packed: Packed, form: PackedLayout | None, x: Tensor) -> Tensor:
    """Return the dequantized weight in the dtype of x, in the workspace."""
    weight = scratch(packed.spec.shape, x.dtype, x.device)
    decode_into(backend, packed, form, weight)
    return weight


def convolve(
    backend: Backend, packed: Packed, form: PackedLayout | None, x: Tensor, bias: Tensor | None, how: Geometry,
    compute: str | None = None,
) -> Tensor:  # fmt: skip
    """Convolve x [b, in, ...] with the weight and add the bias: [b, out, ...] in x's dtype. See `linear`."""
    _beside(packed, x)
    shape = packed.spec.shape
    fits = x.ndim == len(shape) and x.shape[1] == shape[1] * how.groups
    if fits and compute == int8_linear.NAME and int8_linear.pays_convolved(packed, form, x, how):
        return int8_linear.convolve(backend, packed, form, x, bias, how)
    kernels = way(backend, packed, form, x.dtype)
    plainly = fits and how.groups == 1 and not isinstance(how.padding, str)
    if kernels.few_patches and form is not None and plainly and x.is_cpu:  # elsewhere nobody has measured it
        kernel = packed.spec.shape[2:]
        most = max(kernels.few_patches, blocked_gemm.most_patches(x.dtype, math.prod(shape)))
        rows = few_patches(x, kernel, how, most)
        y = None
        if rows is not None:
            few = len(rows) <= kernels.few_patches
            y = (_product if few else _tiled)(kernels, packed, form, rows, bias)
        if y is not None:
            return y.view(len(x), *outputs(x.shape[2:], kernel, how), shape[0]).movedim(-1, 1).contiguous()

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        run: Any = CONVOLUTIONS[len(how.stride) - 1]
        done: Tensor = run(x, weight, bias, how.stride, how.padding, how.dilation, how.groups)
        return done

    if fits and x.is_cpu and fp32_gemm.is_profitable(x.dtype):
        return fp32_gemm.convolve(x, bias, shape, how.groups, _rounded(backend, packed, form, x.dtype), run)
    return run(x, _decoded(backend, packed, form, x), bias)


def _tiled(kernels: Way, packed: Packed, form: PackedLayout | None, x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Multiply x [m, columns] by the transposed weight, part by part; None if the reader cannot decode parts."""
    reader = kernels.reader
    if reader is None or form is None:
        return None

    def rows(start: int, stop: int) -> Tensor | None:
        out = scratch((stop - start, x.shape[1]), x.dtype, x.device)
        return out if reader.rows_into(form, packed.parts, start, stop, out) else None

    return blocked_gemm.linear(x, bias, packed.spec.shape[0], rows)


def _rounded(backend: Backend, packed: Packed, form: PackedLayout | None, dtype: torch.dtype) -> blocked_gemm.Rows:
    """Return a function for rows of the dequantized weight, rounded to `dtype`, as float32, in the workspace."""
    reader = way(backend, packed, form, dtype).reader
    columns = math.prod(packed.spec.shape[1:])
    whole: list[Tensor] = []

    def rows(start: int, stop: int) -> Tensor:
        shape = (stop - start, columns)
        if not whole and reader is not None and form is not None:
            out = scratch(shape, torch.float32, packed.device)
            if reader.rounded(form, packed.parts, dtype, start, stop, out):
                return out
        if not whole:
            whole.append(scratch(packed.spec.shape, dtype, packed.device))
            decode_into(backend, packed, form, whole[0])
        part = whole[0][start:stop].view(shape)  # a float32 weight is in the very buffer that a copy would be made in
        return part if dtype == torch.float32 else scratch(shape, torch.float32, packed.device).copy_(part)

    return rows


def _product(kernels: Way, packed: Packed, form: PackedLayout, x: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [m, columns] by the transposed weight and add the bias, with the reader."""
    assert kernels.reader is not None
    out = torch.empty(len(x), form.rows, dtype=x.dtype, device=x.device)
    added = bias if bias is None else bias.detach().to(x.dtype).contiguous()
    kernels.reader.product(form, packed.parts, x.contiguous(), added, out)
    return out
