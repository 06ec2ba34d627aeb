"""The steps before and after an integer GEMM, in torch (the reference), in C and in Triton.

All give the same numbers; the formulas are in `int8_linear`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..core import packed_rows, torch_dtypes
from . import int_matmul
from .base import Coding, EightBit
from .cpu import extension, int8_epilogue
from .dispatch_guard import undisturbed
from .fastest import is_settled, prefers_other
from .row_codes import RowCodes
from .row_quantization import quantized_rows
from .triton import imports
from .workspace import scratch

if TYPE_CHECKING:
    from ..core import Backend, Packed, PackedLayout

log = logging.getLogger(__name__)

# Columns of one run are a multiple of this: what AMX multiplies at a time.
RUN = 64
# Those of a run when a weight is quantized again: with as many, 8 bits cost no more than SDNQ's groups.
AGAIN_RUN = 256
_FINE = ("q8_0",)  # packings of so little error that 8 bits with one scale for a row would cost as much again
# Formats without rotation or branch that lose 6 dB to channels of outliers if activations have one scale for a row.
_BOTH = ("fp8", "q8_0", "q6_k")
_BLOCKS = ("float8_e4m3fn", 32)  # packing and group of MXFP8, whose activations have such scales, too
# Sums, of 4 bytes each, that are in a GPU's memory at a time.
MOST_SUMS = 1 << 26
_CHECKED_ROWS = 16  # of a weight that a kernel is held against torch with


def coding(packed: Packed, form: PackedLayout | None) -> Coding:
    """Return which codes of a weight are multiplied."""
    taps = math.prod(packed.spec.shape[2:])
    if direct(form):
        return Coding.BY_ROW
    if form is not None and in_runs(form, taps):
        return Coding.BY_RUN
    if form is None or taps > 1 or form.columns <= AGAIN_RUN or form.columns % AGAIN_RUN:
        return Coding.AGAIN
    is_mx = (form.packing, form.group) == _BLOCKS and packed.parts[form.scale or form.codes].dtype is torch_dtypes.E8M0
    is_linear = packed.spec.scheme.name in _BOTH and len(packed.spec.shape) == 2  # on a card its cost is not known
    if is_mx or (is_linear and packed.device.type == "cpu" and int8_epilogue.recodes(form, packed.parts)):
        return Coding.AGAIN | Coding.BY_RUN | Coding.BOTH
    return Coding.AGAIN | Coding.BY_RUN if form.packing in _FINE else Coding.AGAIN


def scales_in(form: PackedLayout, coding: Coding) -> int:
    """Return the number of scales per row of codes."""
    if not coding & Coding.BY_RUN:
        return 1
    return form.columns // AGAIN_RUN if coding & Coding.AGAIN else form.columns // form.group * form.taps


def direct(form: PackedLayout | None) -> bool:
    """Return whether the codes of a weight are multiplied without requantizing, with one scale per row."""
    return (
        form is not None
        and form.by_row
        and form.packing in ("int8", "uint8")
        and not (form.table or form.nested or form.shift)
        and (isinstance(form.zero, int) or form.zero_packing in ("int8", "uint8"))
    )


def in_runs(form: PackedLayout, taps: int) -> bool:
    """Return whether rows consist of whole runs of columns with one scale each (in convolutions, of one of `taps`)."""
    return (
        form.packing == "int8"
        and form.zero == 0
        and bool(form.scale)
        and not (form.table or form.nested or form.shift)
        and form.taps == taps
        and form.columns % form.group == 0
        and form.group % (taps * RUN) == 0
    )


def runs(x: Tensor, weight: Tensor, scale: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield for each run of columns, in the order of the sums: the activations' codes [m, n], the weight's [rows, n],
    and the scales [rows].

    Runs go tap by tap of a convolution, and within a tap by channels, as its activations lie in memory.

    Args:
        x, weight: codes [m, columns] and [rows, columns]. scale: [rows, groups, taps].
    """
    rows, groups, taps = scale.shape
    x, weight = x.view(len(x), groups, -1, taps), weight.view(rows, groups, -1, taps)
    for tap in range(taps):
        for group in range(groups):
            yield x[:, group, :, tap], weight[:, group, :, tap], scale[:, group, tap]


def stored(packed: Packed, form: PackedLayout) -> RowCodes:
    """Return codes that are multiplied without requantizing."""
    parts = packed.parts
    return RowCodes(
        codes=parts[form.codes].view(form.rows, form.columns),
        scale=parts[form.scale] if form.scale else None,
        factor=form.factor,
        zero=form.zero if isinstance(form.zero, int) else parts[form.zero],
    )


def needs_sums(form: PackedLayout | None) -> bool:
    """Return whether products with a weight depend on the sums of the activations' codes."""
    if form is None or not direct(form):
        return False
    return form.zero != (128 if form.packing == "uint8" else 0)


class Steps:
    """The steps in torch, on any device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    # Whether the sums of a product are in memory, [m, rows], before they are scaled.
    sums_in_memory: ClassVar[bool] = True

    def rows(self, x: Tensor, sums: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
        """Quantize x [m, k]: codes, int8 [m, k]; scales, float32 [m, 1]; if asked, sums of the codes, int32 [m, 1]."""
        codes, scale = quantized_rows(x)
        return codes, scale, codes.sum(1, keepdim=True, dtype=torch.int32) if sums else None

    def runs(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        """Quantize x [m, k] with a scale for each AGAIN_RUN columns: codes, int8 [m, k]; scales, float32 [m, runs]."""
        codes, scale, _ = self.rows(x.reshape(-1, AGAIN_RUN), False)
        return codes.view(x.shape), scale.view(len(x), -1), None

    def weight(self, backend: Backend, packed: Packed, form: PackedLayout | None) -> RowCodes:
        """Return a weight as codes with one scale per row. They may be in the workspace."""
        if form is not None and direct(form):
            return stored(packed, form)
        codes = scratch((packed.spec.shape[0], math.prod(packed.spec.shape[1:])), torch.int8, self.device)
        return RowCodes(codes, self.again(backend, packed, form, codes))

    def weight_by_run(self, backend: Backend, packed: Packed, form: PackedLayout) -> tuple[Tensor, Tensor]:
        """Return the same with several scales per row: codes [rows, columns], float32 scales [rows, groups, taps]."""
        if coding(packed, form) is Coding.BY_RUN:
            scale = packed.parts[form.scale].view(form.rows, -1, form.taps).to(torch.float32) * form.factor
            return packed.parts[form.codes].view(form.rows, form.columns), scale
        codes = scratch((form.rows, form.columns), torch.int8, self.device)
        return codes, self.again(backend, packed, form, codes.view(-1, AGAIN_RUN)).view(form.rows, -1, 1)

    def again(self, backend: Backend, packed: Packed, form: PackedLayout | None, codes: Tensor) -> Tensor:
        """Requantize a weight into `codes`, whose rows may be parts of the weight's rows. Return their scales."""
        weight = backend.decode(packed, torch.float32).view(codes.shape)
        return quantized_rows(weight, codes)[1]

    def by_row(
        self, codes: Tensor, row_scale: Tensor, sums: Tensor | None, weight: RowCodes, bias: Tensor | None, out: Tensor
    ) -> None:
        """Compute the whole product of the results of `rows` and `weight`, into `out` [m, rows]."""
        self.finish(int_matmul.product(codes, weight.signed()), row_scale, sums, weight, bias, out)

    def finish(
        self, total: Tensor, row_scale: Tensor, sums: Tensor | None, weight: RowCodes, bias: Tensor | None, out: Tensor
    ) -> None:
        """Write (total [m, n] + sums * added) * row_scale * scales + bias to `out` [m, n]. `total` is overwritten."""
        if weight.shifted:
            assert sums is not None
            total += sums * weight.added()
        tile = total.to(torch.float32).mul_(row_scale).mul_(weight.scales())
        out.copy_(tile if bias is None else tile.add_(bias))

    def by_run(
        self, codes: Tensor, weight: Tensor, scale: Tensor, row_scale: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        """Compute the whole product of the results of `rows`, or `runs`, and `weight_by_run`, into `out` [m, rows]."""
        total: Tensor | float = 0.0
        both = row_scale.shape[1] > 1
        for run, (x, w, of_run) in enumerate(runs(codes, weight, scale)):
            part = int_matmul.product(x, w).to(torch.float32)
            part = part.mul_(row_scale[:, run, None]) if both else part
            total = part.mul_(of_run).add_(total)
        assert isinstance(total, Tensor)
        total = total if both else total.mul_(row_scale)
        out.copy_(total if bias is None else total.add_(bias))


class InC(Steps):
    """The steps in C on the CPU, each in one pass over memory; used if no kernel computes the whole product."""

    def rows(self, x: Tensor, sums: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
        x = x if x.stride(-1) == 1 else x.contiguous()
        codes = x.new_empty(x.shape, dtype=torch.int8)
        scale, found = (x.new_empty(len(x), 1, dtype=dtype) for dtype in (torch.float32, torch.int32))
        int8_epilogue.quantize_rows(x, codes, scale, found)
        return codes, scale, found

    def again(self, backend: Backend, packed: Packed, form: PackedLayout | None, codes: Tensor) -> Tensor:
        if form is None or not int8_epilogue.recodes(form, packed.parts):
            return super().again(backend, packed, form, codes)
        scale = codes.new_empty(len(codes), dtype=torch.float32)
        int8_epilogue.recode(_of_width(form, codes.shape[1]), packed.parts, codes, scale)
        return scale

    def finish(
        self, total: Tensor, row_scale: Tensor, sums: Tensor | None, weight: RowCodes, bias: Tensor | None, out: Tensor
    ) -> None:
        assert sums is not None  # of `rows`, which computes them unasked
        added = weight.added()
        if not isinstance(added, Tensor):
            added = total.new_full((total.shape[1],), added, dtype=torch.int32)
        scale = weight.scales().contiguous()
        int8_epilogue.finish(total.contiguous(), sums, added, row_scale, scale, bias, out)


class InTriton(Steps):
    """The steps in Triton on GPUs, in one launch each."""

    @property
    def kernels(self) -> ModuleType:
        """Return the Triton kernels for this device."""
        module = imports.eight(self.device)
        assert module is not None
        return module

    def rows(self, x: Tensor, sums: bool = True, rotation: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
        """Do the same, and before that rotate runs of `rotation` columns, in float32, if it is not 0."""
        quantized: tuple[Tensor, Tensor, Tensor | None] = self.kernels.quantize_rows(x, sums=sums, rotation=rotation)
        return quantized

    def again(self, backend: Backend, packed: Packed, form: PackedLayout | None, codes: Tensor) -> Tensor:
        scale = torch.empty(len(codes), dtype=torch.float32, device=self.device)
        if form is None or not self.quantizes(backend, packed, form):  # as rows of activations are
            weight = backend.decode(packed, torch.float32).view(codes.shape)
            self.kernels.quantization(weight, codes, scale, None)(self.device)
            return scale
        self.kernels.requantization(_of_width(form, codes.shape[1]), packed.parts, codes, scale)(self.device)
        return scale

    def quantizes(self, backend: Backend, packed: Packed, form: PackedLayout) -> bool:
        """Return whether the kernel requantizes such weights; it is checked against torch at the first of a kind."""
        key = (replace(form, rows=0), self.device, *[part.dtype for part in packed.parts.values()])
        if key not in _quantize:
            _quantize[key] = self.kernels.quantizes(form) and self._right(backend, packed)
        return _quantize[key]

    def _right(self, backend: Backend, packed: Packed) -> bool:
        why = "its codes are wrong"
        try:
            if self._agrees(backend, packed):
                return True
        except Exception as error:  # whatever it is: the kernel does not work here, and torch does
            why = f"{type(error).__name__}: {error}"
        log.warning(
            "The Triton kernel that quantizes %s to int8 is not used on %s: %s. Using torch instead, which is slower.",
            packed.spec.scheme, self.device, why,
        )  # fmt: skip
        return False

    def _agrees(self, backend: Backend, packed: Packed) -> bool:
        if backend.by_row(packed):
            packed = packed_rows.take(
                packed, torch.arange(min(packed.spec.shape[0], _CHECKED_ROWS), device=self.device)
            )
        form = backend.form(packed)
        assert form is not None
        if coding(packed, form) & Coding.BY_RUN:
            form = _of_width(form, AGAIN_RUN)  # a kernel of its own
        codes, target = torch.empty(2, form.rows, form.columns, dtype=torch.int8, device=self.device)
        scale = torch.empty(form.rows, dtype=torch.float32, device=self.device)
        self.kernels.requantization(form, packed.parts, codes, scale)(self.device)
        return torch.equal(super().again(backend, packed, form, target).view(-1), scale) and torch.equal(codes, target)

    def finish(
        self, total: Tensor, row_scale: Tensor, sums: Tensor | None, weight: RowCodes, bias: Tensor | None, out: Tensor
    ) -> None:
        self.kernels.finishing(total.contiguous(), row_scale, weight, bias, out, sums)(self.device)


class WholeInTriton(InTriton):
    """The same with products that are computed and scaled in one launch."""

    sums_in_memory: ClassVar[bool] = False

    def weight_by_run(self, backend: Backend, packed: Packed, form: PackedLayout) -> tuple[Tensor, Tensor]:
        if coding(packed, form) is not Coding.BY_RUN or form.factor != 1.0:
            return super().weight_by_run(backend, packed, form)
        scale = packed.parts[form.scale].view(form.rows, -1, form.taps)  # of any dtype
        return packed.parts[form.codes].view(form.rows, form.columns), scale

    def by_row(
        self, codes: Tensor, row_scale: Tensor, sums: Tensor | None, weight: RowCodes, bias: Tensor | None, out: Tensor
    ) -> None:
        def ours() -> None:
            self.kernels.product(codes, row_scale, weight, bias, out, sums)(self.device)

        def by_torch() -> None:
            super(WholeInTriton, self).by_row(codes, row_scale, sums, weight, bias, out)

        (rows, inner), columns = codes.shape, out.shape[1]
        kind = (inner, columns, weight.codes.dtype, out.dtype)
        if _fits_torch(rows, inner, columns) and prefers_other(kind, rows, self.device, ours, by_torch):
            by_torch()
        else:
            ours()

    def by_run(
        self, codes: Tensor, weight: Tensor, scale: Tensor, row_scale: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        self.kernels.product_by_run(codes, weight, scale, row_scale, bias, out)(self.device)


def _fits_torch(rows: int, inner: int, columns: int) -> bool:
    """Return whether torch's product has a kernel for the sizes, and sums that do not take much memory."""
    whole = inner % int_matmul.CUDA_MULTIPLE == 0 and columns % int_matmul.CUDA_MULTIPLE == 0
    return whole and rows >= int_matmul.CUDA_LEAST_ROWS and rows * columns <= MOST_SUMS


def launched(backend: Backend, packed: Packed, form: PackedLayout, dtype: torch.dtype, least: int) -> EightBit:
    """Return the product with a weight on a GPU for a reader that launches its kernels without more ado."""
    device, of = packed.device, coding(packed, form)
    if device.type != "cuda" or imports.products(device) is None:
        return EightBit(least, None)
    if of is Coding.BY_RUN:
        return EightBit(least, of)
    if of & Coding.AGAIN and not WholeInTriton(device).quantizes(backend, packed, form):
        return EightBit(least, None)
    if of & Coding.BY_RUN:
        return EightBit(least, of, run=AGAIN_RUN)
    of_codes = torch.int8 if of & Coding.AGAIN else packed.parts[form.codes].dtype
    kind = (form.columns, form.rows, of_codes, dtype)

    def left(rows: int) -> bool:
        return _fits_torch(rows, form.columns, form.rows) and not is_settled(kind, rows, device)

    return EightBit(least, of, sums=needs_sums(form), left=left)


def _of_width(form: PackedLayout, columns: int) -> PackedLayout:
    """Return the form with its rows split into more rows of `columns`."""
    return form if columns == form.columns else replace(form, rows=form.rows * form.columns // columns, columns=columns)


_quantize: dict[tuple[object, ...], bool] = {}


def fastest(x: Tensor) -> Steps:
    """Return the fastest available implementation that is correct for activations like these."""
    if x.is_cuda and imports.products(x.device) is not None:
        return WholeInTriton(x.device)
    if x.is_cuda and imports.eight(x.device) is not None:
        return InTriton(x.device)
    return InC(x.device) if x.device.type == "cpu" and steps_in_c(x.dtype) else Steps(x.device)


def steps_in_c(dtype: torch.dtype) -> bool:
    """Return whether the steps in C can be used for activations of `dtype`."""
    return extension() is not None and _c_is_right(dtype)


@cache
@undisturbed
def _c_is_right(dtype: torch.dtype) -> bool:
    device = torch.device("cpu")
    x = torch.linspace(-3, 3, 5 * 70, dtype=torch.float32, device="cpu").sin().view(5, 70).to(dtype)
    x[1] = 0
    one, other = Steps(device).rows(x), InC(device).rows(x)
    total = torch.arange(-200, 200, dtype=torch.int32, device="cpu").view(5, 80) * 9973
    scale, zero = (
        torch.linspace(0.01, 0.02, 80, dtype=torch.float32, device="cpu"),
        -torch.arange(80, dtype=torch.int32, device="cpu"),
    )
    weight = RowCodes(total.new_empty(80, 0, dtype=torch.int8), scale, 1.0, zero)
    bias = torch.linspace(-1, 1, 80, dtype=torch.float32, device="cpu").to(dtype)
    outs = torch.empty(2, 5, 80, dtype=dtype, device="cpu")
    for steps, out in zip((Steps(device), InC(device)), outs, strict=True):
        steps.finish(total.clone(), one[1], one[2], weight, bias, out)
    return all(torch.equal(a, b) for a, b in zip((*one, outs[0]), (*other, outs[1]), strict=True))  # type: ignore[arg-type]
