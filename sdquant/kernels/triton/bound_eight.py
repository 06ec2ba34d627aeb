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
from .bound_linear import BoundLinear

if TYPE_CHECKING:
    from ...core import PackedLayout
    from ..base import EightBit, Parts
    from .bound_linear import BoundWeight, Own
    from .launch_config import Launch

_FLOAT8 = torch.float8_e4m3fn
_AGAIN = ("codes", "scale", "nested", "zero", "shift")  # pointers of a weight, for kernels that decode it


def _quantized(
    bound: BoundWeight, x: Tensor, dtype: torch.dtype, sums: bool, run: int = 0
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return the rows of x, rotated as the weight is, as codes of `dtype` [m, columns], their scales [m, 1], or of each
    `run` columns [m, runs], and their sums [m, 1]."""
    m = x.numel() // bound.columns
    codes = empty(m, bound.columns, dtype=dtype, device=x.device)
    scale = empty(m, bound.columns // run if run else 1, dtype=float32, device=x.device)
    total = empty(m, 1, dtype=int32, device=x.device) if sums else None
    at = {
        "x": x.data_ptr(), "codes": codes.data_ptr(), "scale": scale.data_ptr(),
        "sums": (scale if total is None else total).data_ptr(),
    }  # fmt: skip

    def make() -> Launch:
        rows = (x.view(-1, run), codes.view(-1, run)) if run else (x.view(m, -1), codes)
        return int8_gemm.quantization(*rows, scale, total, bound.rotation)

    return (codes, scale, total) if bound.launched(("rows", dtype, m), make, at) else None


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
        if self.left is not None and self.left(x.numel() // bound.columns):
            return None
        quantized = _quantized(bound, x, int8, self.sums, self.run)
        if quantized is None:
            return None
        codes, row_scale, sums = quantized
        m, rows = len(codes), bound.rows
        out = empty(*x.shape[:-1], rows, dtype=bound.dtype, device=x.device)
        at = {"x": codes.data_ptr(), "row_scale": row_scale.data_ptr(), "out": out.data_ptr()}
        at["bias"] = at["out"] if bias is None else weight["bias"]
        if not self.again:
            at |= {"weight": weight["codes"], "zero": weight["zero"]}
            at["scale"] = weight["scale"] if self.form.scale else at["row_scale"]
            at["sums"] = at["row_scale"] if sums is None else sums.data_ptr()

            def direct() -> Launch:
                parts, form = bound.tensors(own), self.form
                zero = form.zero if isinstance(form.zero, int) else parts[form.zero]
                scale = parts[form.scale] if form.scale else None
                of = RowCodes(parts[form.codes].view(rows, -1), scale, form.factor, zero)
                return int8_gemm.product(codes, row_scale, of, bias, out.view(m, rows), sums)

            return out if bound.launched(("int8", m, bias is None), direct, at) else None
        again = empty(rows, bound.columns, dtype=int8, device=x.device)
        scale = empty(self.stored.rows, dtype=float32, device=x.device)
        parts_at = {"out": again.data_ptr(), "out_scale": scale.data_ptr()} | {name: weight[name] for name in _AGAIN}
        if not bound.launched(
            ("again",), lambda: int8_gemm.requantization(self.stored, bound.tensors(own), again, scale), parts_at
        ):
            return None
        at |= {"weight": again.data_ptr(), "scale": scale.data_ptr()}
        if self.by_run:

            def runs() -> Launch:
                by_run = scale.view(rows, -1, 1)
                return int8_gemm.product_by_run(codes, again, by_run, row_scale, bias, out.view(m, rows))

            return out if bound.launched(("runs", m, bias is None), runs, at) else None
        at |= {"sums": at["row_scale"], "zero": at["weight"]}

        def by_row() -> Launch:
            return int8_gemm.product(codes, row_scale, RowCodes(again, scale), bias, out.view(m, rows), None)

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
        quantized = _quantized(bound, x, _FLOAT8, False)
        if quantized is None:
            return None
        codes, row_scale, _ = quantized
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
