"""Products in 8 bits bound to a layer's weight on a GPU: `int8_linear` and `fp8_linear` with all lookups done.

Rows of activations are quantized in one launch, a weight whose codes are not multiplied as they are in another, and the
product is a third.
"""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, empty, float32, int8, int32

from ..base import Coding
from ..row_codes import RowCodes
from . import int8_gemm
from .bound_launch import MOST_KEPT, LaunchSequence
from .bound_linear import BIAS, BoundLinear, X, after, piece
from .launch import decode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...core import PackedLayout
    from ..base import EightBit, Parts
    from .bound_linear import BoundWeight, Own
    from .launch_config import Launch

_FLOAT8 = torch.float8_e4m3fn
_AGAIN = ("codes", "scale", "nested", "zero", "shift")  # pointers of a weight, for kernels that decode it


def bind(
    form: PackedLayout, parts: Parts, dtype: torch.dtype, few: int, prefix: str, eight: EightBit | None,
    rotation: int = 0, most: int = 0,
) -> BoundLinear:  # fmt: skip
    """Return the product for the layers that hold a weight; see `Reader.prepared`, `prepared_with_rotation`, `most`."""
    bound = BoundLinear(form, parts, dtype, few, prefix, None if eight is None else eight.least, rotation, most)
    if eight is not None and eight.coding is not None:
        bound.eight = Int8(form, eight) if eight.floats is None else Float8(form, eight)
        bound.timed, bound.kind_of_eight = eight.timed, name_of(eight, rotation, bound.sizes)
    return bound


def name_of(eight: EightBit, rotation: int, sizes: tuple[object, ...]) -> tuple[object, ...]:
    """Return what a product in 8 bits is called among what is measured; `sizes`: of the layer."""
    assert eight.coding is not None
    return "bound", "int8" if eight.floats is None else "fp8", int(eight.coding), rotation, *sizes


class _Eight:
    """What both have: a call's launches, by the shape of x and whether there is a bias."""

    __slots__ = ("again", "form", "steps")

    def __init__(self, form: PackedLayout, coding: Coding) -> None:
        self.form, self.again = form, bool(coding & Coding.AGAIN)
        self.steps: dict[tuple[object, ...], LaunchSequence] = {}

    def keep(self, key: tuple[object, ...], steps: LaunchSequence) -> LaunchSequence:
        """Keep what is not launched yet."""
        if len(self.steps) >= MOST_KEPT:
            self.steps = {}  # another thread may be about to read the one before
        return self.steps.setdefault(key, steps)


class Int8(_Eight):
    """The product in integers of a weight, whose codes are multiplied as they are or quantized again."""

    __slots__ = ("by_run", "left", "run", "stored", "sums")

    def __init__(self, form: PackedLayout, eight: EightBit) -> None:
        assert eight.coding is not None
        super().__init__(form, eight.coding)
        self.by_run, self.sums, self.left = bool(eight.coding & Coding.BY_RUN), eight.sums, eight.left
        self.run = eight.run if eight.coding & Coding.BOTH else 0
        # Rows as those that are quantized again: of one run each.
        self.stored = form
        if self.by_run and self.again:
            self.stored = replace(form, rows=form.rows * form.columns // eight.run, columns=eight.run)

    def __call__(
        self, bound: BoundWeight, x: Tensor, own: Own, addresses: list[int], bias: Tensor | None
    ) -> Tensor | None:
        """Return x [..., columns] times the transposed weight, plus the bias: [..., rows] in x's dtype."""
        key = (x.shape, bias is None)
        steps = self.steps.get(key) or self.keep(key, self._sizes(bound, x))
        if self.left is not None and self.left(steps.m):
            return None
        memory = empty(steps.size, dtype=int8, device=bound.where)
        out = empty(steps.out, dtype=bound.dtype, device=bound.where)
        base = memory.data_ptr()
        addresses += (out.data_ptr(), base, *[base + at for at in steps.pieces])
        if steps.launches is None:
            steps.first(self._launches(bound, x, own, memory, out, bias, steps), bound.where)
            return out
        return out if steps.again(bound.device, addresses) else None

    def _sizes(self, bound: BoundWeight, x: Tensor) -> LaunchSequence:
        """Codes of x, their scales and sums, and the codes and scales of the weight, in one piece of memory. What there
        is none of lies where what it stands for does."""
        columns, rows, run = bound.columns, bound.rows, self.run
        m = x.numel() // columns
        scale = after(0, m * columns)
        sums = after(scale, 4 * m * (columns // run if run else 1))
        again = after(sums, 4 * m) if self.sums else sums
        again_scale = after(again, rows * columns)
        size = again_scale + 4 * self.stored.rows if self.again else again
        return LaunchSequence(m, (*x.shape[:-1], rows), size, (scale, sums if self.sums else scale, again, again_scale))

    def _launches(
        self,
        bound: BoundWeight,
        x: Tensor,
        own: Own,
        memory: Tensor,
        out: Tensor,
        bias: Tensor | None,
        steps: LaunchSequence,
    ) -> Iterator[tuple[Launch, dict[str, int]]]:
        """Yield the launches, and which address each pointer is."""
        columns, rows, run, m, form = bound.columns, bound.rows, self.run, steps.m, self.form
        to, x_codes, x_scale, x_sums, again, again_scale = range(bound.more, bound.more + 6)
        codes_at, scales_at = steps.pieces[2:4]
        codes, scale, sums = self.codes_of(bound, memory, steps)
        flat = (x.view(-1, run), codes.view(-1, run)) if run else (x.view(m, -1), codes)
        rows_of_x = int8_gemm.quantization(*flat, scale, sums, bound.rotation)
        yield rows_of_x, {"x": X, "codes": x_codes, "scale": x_scale, "sums": x_sums}
        parts, results = bound.tensors(own), out.view(m, rows)
        at = {"x": x_codes, "row_scale": x_scale, "out": to, "bias": to if bias is None else BIAS}
        if self.by_run and not self.again:
            at |= {"weight": bound.at["codes"], "scale": bound.at["scale"]}
            of_runs = parts[form.codes].view(rows, -1), parts[form.scale].view(rows, -1, form.taps)
            yield int8_gemm.product_by_run(codes, *of_runs, scale, bias, results, factor=form.factor), at
            return
        if not self.again:
            zero = form.zero if isinstance(form.zero, int) else parts[form.zero]
            of = RowCodes(
                parts[form.codes].view(rows, -1), parts[form.scale] if form.scale else None, form.factor, zero
            )
            at |= {"weight": bound.at["codes"], "zero": bound.at["zero"], "sums": x_sums}
            at["scale"] = bound.at["scale"] if form.scale else x_scale
            yield int8_gemm.product(codes, scale, of, bias, results, sums), at
            return
        again_codes = piece(memory, codes_at, int8, rows, columns)
        row_scales = piece(memory, scales_at, float32, self.stored.rows)
        of_weight = {name: bound.at[name] for name in _AGAIN}
        requantization = int8_gemm.requantization(self.stored, parts, again_codes, row_scales)
        yield requantization, {"out": again, "out_scale": again_scale, **of_weight}
        at |= {"weight": again, "scale": again_scale}
        if self.by_run:
            yield int8_gemm.product_by_run(codes, again_codes, row_scales.view(rows, -1, 1), scale, bias, results), at
            return
        at |= {"sums": x_scale, "zero": again}
        yield int8_gemm.product(codes, scale, RowCodes(again_codes, row_scales), bias, results, None), at

    def codes_of(
        self, bound: BoundWeight, memory: Tensor, steps: LaunchSequence
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the codes of x, their scales, and their sums if the product needs them."""
        scale_at, sums_at, *_ = steps.pieces
        codes = piece(memory, 0, int8, steps.m, bound.columns)
        scale = piece(memory, scale_at, float32, steps.m, bound.columns // self.run if self.run else 1)
        return codes, scale, piece(memory, sums_at, int32, steps.m, 1) if self.sums else None


class Float8(_Eight):
    """The product in 8-bit floats of a weight, whose codes are multiplied as they are or quantized again."""

    __slots__ = ("at_once", "product")

    def __init__(self, form: PackedLayout, eight: EightBit) -> None:
        assert eight.coding is not None and eight.floats is not None
        super().__init__(form, eight.coding)
        self.product, self.at_once = eight.floats, eight.at_once

    def __call__(
        self, bound: BoundWeight, x: Tensor, own: Own, addresses: list[int], bias: Tensor | None
    ) -> Tensor | None:
        """Return x [..., columns] times the transposed weight, plus the bias: [..., rows] in x's dtype."""
        operands = self.operands(bound, x, own, addresses)
        if operands is None:
            return None
        y = self.product(*operands, bias).view(*x.shape[:-1], bound.rows)
        return y if y.dtype is x.dtype else y.to(x.dtype)  # on most cards it is bfloat16

    def operands(
        self, bound: BoundWeight, x: Tensor, own: Own, addresses: list[int], between: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Return codes and scales of x and of the weight.

        Args:
            between: of the sides of a branch, which is written if there is one.
        """
        key, rows, columns, where = (x.shape,), bound.rows, bound.columns, bound.where
        steps = self.steps.get(key) or self.keep(key, self._sizes(bound, x))
        codes = empty(steps.m, columns, dtype=_FLOAT8, device=where)
        if self.again:  # tensors of one piece of memory
            scale, floats, row_scale = empty(steps.size, 1, dtype=float32, device=where).split_with_sizes(steps.pieces)
            weight = empty(rows, columns, dtype=_FLOAT8, device=where)
            begin = scale.data_ptr()
            floats_at = begin + 4 * rows
            addresses += (codes.data_ptr(), floats_at + 4 * steps.pieces[1], floats_at, weight.data_ptr(), begin)
        else:
            weight, scale, floats = self._stored(bound, own), bound.part(own, "scale"), codes
            row_scale = empty(steps.m, 1, dtype=float32, device=where)
            addresses += (codes.data_ptr(), row_scale.data_ptr())
        if between is not None:
            addresses.append(between.data_ptr())
        if steps.launches is None:
            steps.first(self._launches(bound, x, own, codes, row_scale, floats, weight, scale, between), where)
        elif not steps.again(bound.device, addresses):
            return None
        return codes, row_scale, weight, scale

    def _stored(self, bound: BoundWeight, own: Own) -> Tensor:
        codes = bound.part(own, "codes")
        codes = codes if codes.dtype is _FLOAT8 else codes.view(_FLOAT8)
        return codes if codes.ndim == 2 else codes.view(bound.rows, bound.columns)

    def _sizes(self, bound: BoundWeight, x: Tensor) -> LaunchSequence:
        """Scales of the weight, the weight itself, and scales of x, as numbers of float32: sides of the weight are
        multiples of 16, so that all begin where kernels want them."""
        m, decoded = x.numel() // bound.columns, bound.rows * bound.columns * bound.dtype.itemsize // 4
        decoded = 0 if self.at_once else decoded
        return LaunchSequence(m, (*x.shape[:-1], bound.rows), bound.rows + decoded + m, (bound.rows, decoded, m))

    def _launches(
        self, bound: BoundWeight, x: Tensor, own: Own, codes: Tensor, row_scale: Tensor, floats: Tensor, weight: Tensor,
        scale: Tensor, between: Tensor | None,
    ) -> Iterator[tuple[Launch, dict[str, int]]]:  # fmt: skip
        """Yield the launches, and which address each pointer is."""
        floats_at, to, scale_at = range(bound.more + 2, bound.more + 5)
        yield self.of_rows(bound, x.view(len(codes), -1), own, codes, row_scale, between)
        if self.at_once:
            requantization = int8_gemm.requantization(bound.form, bound.tensors(own), weight, scale)
            yield requantization, {"out": to, "out_scale": scale_at, **{name: bound.at[name] for name in _AGAIN}}
        elif self.again:
            decoded = floats.view(-1).view(bound.dtype).view(bound.rows, bound.columns)
            yield decode(bound.form, bound.tensors(own), decoded), {"out": floats_at, **bound.at}
            quantization = int8_gemm.quantization(decoded, weight, scale, None)
            yield quantization, {"x": floats_at, "codes": to, "scale": scale_at, "sums": scale_at}

    def of_rows(
        self, bound: BoundWeight, x: Tensor, own: Own, codes: Tensor, scale: Tensor, between: Tensor | None
    ) -> tuple[Launch, dict[str, int]]:
        """Return the launch that quantizes x [m, columns], and which address each pointer is."""
        rows_of_x = int8_gemm.quantization(x, codes, scale, None, bound.rotation)
        x_codes, x_scale = bound.more, bound.more + 1
        return rows_of_x, {"x": X, "codes": x_codes, "scale": x_scale, "sums": x_scale}
