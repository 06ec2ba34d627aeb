"""`scheme_gemm` bound to a layer's weight: two launches, or three where codes of few bits are unpacked first."""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, empty, float32, int8, int32

from . import scheme_gemm
from .bound_linear import ALIGNED, BoundWeight, after, piece
from .launch import decode

if TYPE_CHECKING:
    import torch

    from ...core import Activations, PackedLayout
    from ..base import Parts
    from .bound_linear import Own
    from .launch_config import Launch


class BoundScheme(BoundWeight):
    """`Backend.linear` plus the bias, for layers that hold a weight in codes that `scheme_activations.coding` knows."""

    __slots__ = ("how", "integers", "known", "sums", "tiles")

    def __init__(self, form: PackedLayout, parts: Parts, dtype: torch.dtype, how: Activations, prefix: str) -> None:
        super().__init__(form, parts, dtype, prefix)
        self.how, self.tiles = how, form.columns // (how.tile or form.columns)
        self.known = prefix + how.scale if how.scale else ""
        self.sums = isinstance(form.zero, str)
        # The layout of the codes alone, where they are not multiplied as they are.
        self.integers = None if form.packing == "int8" else replace(form, scale="", factor=1.0)

    def __call__(self, x: Tensor, own: Own) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this does not apply."""
        size, known = x.numel(), own[self.known] if self.known else None
        weight = self.addresses(x, own) if size else None
        if weight is None or (known is not None and known.get_device() != self.device):
            return None
        columns, rows, tiles = self.columns, self.rows, self.tiles
        m = size // columns
        # Codes of x, their scales and sums, and the codes of the weight, in one piece of memory.
        scale_at = after(0, m * columns)
        sums_at = after(scale_at, 4 * m * tiles)
        weight_at = after(sums_at, 4 * m * tiles) if self.sums else sums_at
        memory = empty(weight_at + rows * columns * (self.integers is not None), dtype=int8, device=x.device)
        base = memory.data_ptr()

        def of_rows() -> tuple[Tensor, Tensor, Tensor | None]:
            codes, scale = piece(memory, 0, int8, m, columns), piece(memory, scale_at, float32, m, tiles)
            return codes, scale, piece(memory, sums_at, int32, m, tiles) if self.sums else None

        def rows_of_x() -> Launch:
            codes, scale, sums = of_rows()
            return scheme_gemm.activation_codes(x.view(m, -1), self.how, known, codes, scale, sums)

        row_scale = base + scale_at
        sums = base + sums_at if self.sums else row_scale
        at = {"x": x.data_ptr(), "codes": base, "scale": row_scale, "sums": sums}
        at["known"] = row_scale if known is None else known.data_ptr()
        of_weight = base + weight_at if self.integers is not None else weight["codes"]
        if at["known"] & ALIGNED or not self._unpacked(own, weight, memory, weight_at):
            return None
        if not self.launched(("rows", m), rows_of_x, at):
            return None
        out, bias = empty(*x.shape[:-1], rows, dtype=self.dtype, device=x.device), own.get("bias")

        def product() -> Launch:
            parts, (codes, scale, total) = self.tensors(own), of_rows()
            integers = (
                parts[self.form.codes] if self.integers is None else piece(memory, weight_at, int8, rows, columns)
            )
            return scheme_gemm.tiled_product(codes, scale, total, self.form, integers, parts, bias, out.view(m, rows))

        at = {"x": base, "weight": of_weight, "out": out.data_ptr(), "row_scale": row_scale, "scale": weight["scale"]}
        at["sums"], at["bias"], at["zero"] = sums, weight["bias"], weight["zero"] if self.sums else of_weight
        return out if self.launched(("product", m, bias is None), product, at) else None

    def _unpacked(self, own: Own, weight: dict[str, int], memory: Tensor, begin: int) -> bool:
        """Write the weight's codes as int8 [rows, columns] to byte `begin` of `memory`, if they are not that already;
        return whether that is done."""
        form = self.integers
        if form is None:
            return True
        addresses = {"out": memory.data_ptr() + begin}
        for name in self.order:
            addresses[name] = weight[name]

        def make() -> Launch:
            return decode(form, self.tensors(own), piece(memory, begin, int8, self.rows, self.columns))

        return self.launched(("integers",), make, addresses)
