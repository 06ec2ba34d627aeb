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
from .bound_linear import BoundLinear, after, piece

if TYPE_CHECKING:
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
    return bound


class Int8:
    """The product in integers of a weight, whose codes are multiplied as they are or quantized again."""

    __slots__ = ("again", "by_run", "form", "left", "run", "stored", "sums")

    def __init__(self, form: PackedLayout, eight: EightBit) -> None:
        assert eight.coding is not None
        self.again, self.by_run = bool(eight.coding & Coding.AGAIN), bool(eight.coding & Coding.BY_RUN)
        self.form, self.sums, self.left = form, eight.sums, eight.left
        self.run = eight.run if eight.coding & Coding.BOTH else 0
        # Rows as those that are quantized again: of one run each.
        self.stored = form
        if self.by_run:
            self.stored = replace(form, rows=form.rows * form.columns // eight.run, columns=eight.run)

    def __call__(
        self, bound: BoundWeight, x: Tensor, own: Own, weight: dict[str, int], bias: Tensor | None
    ) -> Tensor | None:
        """Return x [..., columns] times the transposed weight, plus the bias: [..., rows] in x's dtype."""
        columns, rows, run = bound.columns, bound.rows, self.run
        m = x.numel() // columns
        if self.left is not None and self.left(m):
            return None
        # Codes of x, their scales and sums, and the codes and scales of the weight, in one piece of memory.
        runs, stored = (columns // run if run else 1), self.stored.rows
        scale_at = after(0, m * columns)
        sums_at = after(scale_at, 4 * m * runs)
        again_at = after(sums_at, 4 * m) if self.sums else sums_at
        again_scale_at = after(again_at, rows * columns)
        size = again_scale_at + 4 * stored if self.again else again_at
        memory = empty(size, dtype=int8, device=x.device)
        base = memory.data_ptr()

        def of_rows() -> tuple[Tensor, Tensor, Tensor | None]:
            codes, scale = piece(memory, 0, int8, m, columns), piece(memory, scale_at, float32, m, runs)
            return codes, scale, piece(memory, sums_at, int32, m, 1) if self.sums else None

        def rows_of_x() -> Launch:
            codes, scale, total = of_rows()
            flat = (x.view(-1, run), codes.view(-1, run)) if run else (x.view(m, -1), codes)
            return int8_gemm.quantization(*flat, scale, total, bound.rotation)

        row_scale = base + scale_at
        sums = base + sums_at if self.sums else row_scale
        at = {"x": x.data_ptr(), "codes": base, "scale": row_scale, "sums": sums}
        if not bound.launched(("rows", int8, m), rows_of_x, at):
            return None
        out = empty(*x.shape[:-1], rows, dtype=bound.dtype, device=x.device)
        to = out.data_ptr()
        at = {"x": base, "row_scale": row_scale, "out": to, "bias": to if bias is None else weight["bias"]}
        if not self.again:
            at["weight"], at["zero"], at["sums"] = weight["codes"], weight["zero"], sums
            at["scale"] = weight["scale"] if self.form.scale else row_scale

            def direct() -> Launch:
                parts, form = bound.tensors(own), self.form
                zero = form.zero if isinstance(form.zero, int) else parts[form.zero]
                scale = parts[form.scale] if form.scale else None
                of = RowCodes(parts[form.codes].view(rows, -1), scale, form.factor, zero)
                codes, scales, total = of_rows()
                return int8_gemm.product(codes, scales, of, bias, out.view(m, rows), total)

            return out if bound.launched(("int8", m, bias is None), direct, at) else None
        again, scale = base + again_at, base + again_scale_at
        parts_at = {"out": again, "out_scale": scale}
        for name in _AGAIN:
            parts_at[name] = weight[name]

        def of_weight() -> tuple[Tensor, Tensor]:
            return piece(memory, again_at, int8, rows, columns), piece(memory, again_scale_at, float32, stored)

        if not bound.launched(
            ("again",), lambda: int8_gemm.requantization(self.stored, bound.tensors(own), *of_weight()), parts_at
        ):
            return None
        at["weight"], at["scale"] = again, scale
        if self.by_run:

            def runs_of_both() -> Launch:
                (codes, scales, _), (weights, by_run) = of_rows(), of_weight()
                by_run = by_run.view(rows, -1, 1)
                return int8_gemm.product_by_run(codes, weights, by_run, scales, bias, out.view(m, rows))

            return out if bound.launched(("runs", m, bias is None), runs_of_both, at) else None
        at["sums"], at["zero"] = row_scale, again

        def by_row() -> Launch:
            (codes, scales, _), of = of_rows(), RowCodes(*of_weight())
            return int8_gemm.product(codes, scales, of, bias, out.view(m, rows), None)

        return out if bound.launched(("int8", m, bias is None), by_row, at) else None


class Float8:
    """The product in 8-bit floats of a weight, whose codes are multiplied as they are or quantized again."""

    __slots__ = ("again", "form", "product")

    def __init__(self, form: PackedLayout, eight: EightBit) -> None:
        assert eight.coding is not None and eight.floats is not None
        self.form, self.again, self.product = form, bool(eight.coding & Coding.AGAIN), eight.floats

    def __call__(
        self, bound: BoundWeight, x: Tensor, own: Own, weight: dict[str, int], bias: Tensor | None
    ) -> Tensor | None:
        """Return x [..., columns] times the transposed weight, plus the bias: [..., rows] in x's dtype."""
        m = x.numel() // bound.columns
        codes = empty(m, bound.columns, dtype=_FLOAT8, device=x.device)
        row_scale = empty(m, 1, dtype=float32, device=x.device)
        at = {"x": x.data_ptr(), "codes": codes.data_ptr(), "scale": row_scale.data_ptr()}
        at["sums"] = at["scale"]

        def rows_of_x() -> Launch:
            return int8_gemm.quantization(x.view(m, -1), codes, row_scale, None, bound.rotation)

        if not bound.launched(("rows", _FLOAT8, m), rows_of_x, at):
            return None
        if self.again:
            floats = bound.decoded(own, weight, x)
            if floats is None:
                return None
            again = empty(bound.rows, bound.columns, dtype=_FLOAT8, device=x.device)
            scale = empty(bound.rows, 1, dtype=float32, device=x.device)
            at = {"x": floats.data_ptr(), "codes": again.data_ptr(), "scale": scale.data_ptr()}
            at["sums"] = at["scale"]
            if not bound.launched(("weight",), lambda: int8_gemm.quantization(floats, again, scale, None), at):
                return None
        else:
            parts = bound.tensors(own)
            again = parts[self.form.codes].view(_FLOAT8).view(bound.rows, bound.columns)
            scale = parts[self.form.scale]
        return self.product(codes, row_scale, again, scale, bias).view(*x.shape[:-1], bound.rows)
