"""Kernel dispatch for packed weights: the fastest kernels that support the layout and pass a check, else torch.

The check compares a reader with the backend's own decoding, bit for bit, the first time that a kind of weight is used
on a kind of device. A kernel that a driver, compiler or processor makes wrong is not used; the log says so once.
"""

from __future__ import annotations

import importlib
import logging
import math
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import input_columns, packed_rows
from . import block_scaled, blocked_gemm, exact_or_eight, fp8_linear, fp32_gemm, int8_linear, linear_with_branch
from .branch_preparation import with_branch
from .dispatch_guard import plain, require_beside
from .hadamard import rotate
from .im2col import few_patches, is_of_one_pixel, outputs
from .input_gathering import gather_inputs
from .linear_of_integers import multiply_decoded
from .reader_checks import is_right
from .workspace import scratch

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..core import Backend, Geometry, Packed, PackedLayout
    from .base import Prepared, Reader

__all__ = ["Way", "convolve", "decode_into", "linear", "multiply", "readers", "way"]

log = logging.getLogger(__name__)

LIBRARY = "library"  # as what products are in: the kernels of the scheme's library
# Module and name of the readers for each device type, in order of preference.
_TRITON = ("sdquant.kernels.triton.triton_kernels", "TritonReader")
_READERS: dict[str, tuple[tuple[str, str], ...]] = {
    "cpu": (("sdquant.kernels.cpu.cpu_kernels", "native"), ("sdquant.kernels.libgguf", "reader")),
    "cuda": (_TRITON,),
    "xpu": (_TRITON,),
}
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
        _verdicts[key] = is_right(reader, backend, packed, dtype)
    return _verdicts[key]


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
        some = packed_rows.take(packed, indices.reshape(-1))
        reader = way(backend, packed, form, dtype).reader if indices.numel() else None
        form = None if reader is None else backend.form(some)
        if reader is None or form is None or not reader.reads(form, some.parts, dtype):
            return backend.decode(some, dtype).view(*indices.shape, width)
        values = torch.empty(form.rows, form.columns, dtype=dtype, device=packed.device)
        reader.decode_into(form, some.parts, values)
        return values.view(*indices.shape, width)
    table = scratch(packed.spec.shape, dtype, packed.device)
    decode_into(backend, packed, form, table)
    return F.embedding(indices, table)


def linear(
    backend: Backend, packed: Packed, form: PackedLayout | None, x: Tensor, bias: Tensor | None,
    compute: str | None = None,
) -> Tensor:  # fmt: skip
    """Multiply x [..., in] by the transposed weight and add the bias: [..., out] in x's dtype. Saves nothing for
    gradients.

    Args:
        compute: "int8" for integer products, "fp8" for products of 8-bit floats, where that is faster, "fp4" for those
            with weights in blocks of 4-bit floats; LIBRARY.
    """
    require_beside(packed, x)
    if not x.ndim or x.shape[-1] != packed.spec.shape[1]:
        return F.linear(x, _decoded(backend, packed, form, x), bias)  # torch says that it does not fit
    if compute == LIBRARY:
        y = backend.library_linear(packed, x, bias)
        return linear(backend, packed, form, x, bias) if y is None else y
    expand = backend.integers(packed)
    if expand is not None:
        y = multiply_decoded(expand, packed, x, bias, compute)
        if y is not None:
            return y
        packed = expand()
        backend = packed.spec.scheme.codec
        form = backend.form(packed)
    y = _with_branch(backend, packed, x, bias, compute)
    if y is not None:
        return y
    if packed.spec.rotation:
        codes, rotation = packed.without_rotation, packed.spec.rotation
        form = backend.form(codes)

        def exact() -> Tensor:
            return linear(backend, codes, form, rotate(x, rotation), bias)

        in_eight = _in_eight(backend, codes, form, x, bias, compute, rotation)
        if in_eight is not None:
            assert compute is not None
            of_codes = exact_or_eight.kind_of_linear(compute, codes, form, x.dtype)
            return exact_or_eight.linear((rotation, of_codes), x, in_eight, exact)
        return linear(backend, codes, form, rotate(x, rotation), bias, compute)
    if input_columns.has_any(packed):
        codes = input_columns.without(packed)
        return linear(backend, codes, backend.form(codes), gather_inputs(packed, x), bias, compute)
    branch = backend.low_rank(packed)
    if branch is not None:
        residual = replace(packed, parts=branch.residual_of(packed.parts))
        by_residual = partial(multiply, backend, backend.form(residual), compute, residual)
        is_rounded = compute == int8_linear.NAME
        return linear_with_branch.linear(branch, packed.parts, x, bias, by_residual, is_rounded=is_rounded)
    block = block_scaled.block_of(packed, form, compute, x.dtype)
    if block and form is not None and block_scaled.has_enough_rows(x):
        return block_scaled.linear(block, packed, form, x, bias, lambda x: linear(backend, packed, form, x, None))
    in_eight = _in_eight(backend, packed, form, x, bias, compute)
    if in_eight is not None:
        assert compute is not None
        kind = exact_or_eight.kind_of_linear(compute, packed, form, x.dtype)
        return exact_or_eight.linear(kind, x, in_eight, lambda: linear(backend, packed, form, x, bias))
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


def _in_eight(
    backend: Backend, packed: Packed, form: PackedLayout | None, x: Tensor, bias: Tensor | None, compute: str | None,
    rotation: int = 0,
) -> Callable[[], Tensor] | None:  # fmt: skip
    """Return the product in 8 bits, where `compute` asks for it and it can pay.

    Args:
        rotation: how many columns of x are rotated together, by kernels that do so while they quantize; 0 for none.
    """
    if compute == int8_linear.NAME:
        rows = x.numel() // max(x.shape[-1], 1)
        if rotation:
            can = int8_linear.rotates(backend, packed, form, x, rotation)
        else:
            can = int8_linear.pays(packed, form, x, rows)
        return partial(int8_linear.linear, backend, packed, form, x, bias, rotation) if can else None
    if compute == fp8_linear.NAME:
        can = fp8_linear.rotates(packed, form, x, rotation) if rotation else fp8_linear.pays(packed, form, x)

        def in_floats() -> Tensor:
            weight = None if fp8_linear.needs_none(packed, form) else _decoded(backend, packed, form, x)
            return fp8_linear.linear(packed, form, weight, x, bias, rotation)

        return in_floats if can else None
    return None


def multiply(
    backend: Backend, form: PackedLayout | None, compute: str | None, packed: Packed, x: Tensor, bias: Tensor | None
) -> Tensor:
    """Do as `linear`, with the arguments that stay the same first."""
    return linear(backend, packed, form, x, bias, compute)


def _decoded(backend: Backend, packed: Packed, form: PackedLayout | None, x: Tensor) -> Tensor:
    """Return the dequantized weight in the dtype of x, in the workspace."""
    weight = scratch(packed.spec.shape, x.dtype, x.device)
    decode_into(backend, packed, form, weight)
    return weight


def of_residual(backend: Backend, packed: Packed, dtype: torch.dtype) -> tuple[PackedLayout | None, Way]:
    """Return the layout of what is beside a weight's low-rank branch, and the kernels for it."""
    branch = backend.low_rank(packed)
    residual = packed if branch is None else replace(packed, parts=branch.residual_of(packed.parts))
    form = backend.form(residual)
    return form, way(backend, residual, form, dtype)


_with_branches: dict[tuple[object, ...], Prepared | None] = {}


def _with_branch(
    backend: Backend, packed: Packed, x: Tensor, bias: Tensor | None, compute: str | None
) -> Tensor | None:
    """Multiply x by a weight with a low-rank branch in the few launches that layers take, which weights of one form
    share; None without such kernels."""
    codes = packed.without_rotation if packed.spec.rotation else packed
    branch = None if x.is_cpu else backend.low_rank(codes)
    if branch is None:
        return None
    of = [(name, part.dtype, part.shape) for name, part in codes.parts.items()]
    key = (packed.spec.scheme.name, packed.spec.rotation, branch, x.dtype, x.device, compute, *of)
    if key not in _with_branches:
        form, kernels = of_residual(backend, codes, x.dtype)
        of_weight = backend, codes, form, kernels.reader, kernels.few
        _with_branches[key] = with_branch(*of_weight, x.dtype, compute, "", packed.spec.rotation)
    bound = _with_branches[key]
    return None if bound is None else bound(x.contiguous(), {**codes.parts, "bias": bias})


def convolve(
    backend: Backend, packed: Packed, form: PackedLayout | None, x: Tensor, bias: Tensor | None, how: Geometry,
    compute: str | None = None,
) -> Tensor:  # fmt: skip
    """Convolve x [b, in, ...] with the weight and add the bias: [b, out, ...] in x's dtype. See `linear`."""
    require_beside(packed, x)
    shape = packed.spec.shape
    fits = x.ndim == len(shape) and x.shape[1] == shape[1] * how.groups
    if fits and is_of_one_pixel(shape[2:], how) and backend.low_rank(packed) is not None:
        matrix = replace(packed, spec=replace(packed.spec, shape=shape[:2]))
        return linear(backend, matrix, None, x.movedim(1, -1), bias, compute).movedim(-1, 1)
    if fits and compute == int8_linear.NAME and int8_linear.pays_convolved(packed, form, x, how):
        in_eight = partial(int8_linear.convolve, backend, packed, form, x, bias, how)
        exact = partial(convolve, backend, packed, form, x, bias, how)
        return exact_or_eight.convolve(packed, form, x, how, in_eight, exact)
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
