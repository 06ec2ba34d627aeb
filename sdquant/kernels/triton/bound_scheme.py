"""`scheme_gemm` bound to a layer's weight: two launches, or three where codes of few bits are unpacked first."""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, empty, float32, int8, int32

from . import scheme_gemm
from .bound_linear import ALIGNED, BoundWeight
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
        m, tiles, device = size // self.columns, self.tiles, x.device
        codes, scale = empty(m, self.columns, dtype=int8, device=device), empty(m, tiles, dtype=float32, device=device)
        sums = empty(m, tiles, dtype=int32, device=device) if self.sums else None
        of_rows = {"scale": scale.data_ptr()}
        of_rows["sums"] = of_rows["scale"] if sums is None else sums.data_ptr()
        at = {"x": x.data_ptr(), "codes": codes.data_ptr(), **of_rows}
        at["known"] = at["scale"] if known is None else known.data_ptr()
        if at["known"] & ALIGNED:
            return None

        def rows() -> Launch:
            return scheme_gemm.activation_codes(x.view(m, -1), self.how, known, codes, scale, sums)

        integers = self._integers(own, weight, x)
        if integers is None or not self.launched(("rows", m), rows, at):
            return None
        out, bias = empty(*x.shape[:-1], self.rows, dtype=self.dtype, device=device), own.get("bias")

        def product() -> Launch:
            parts = self.tensors(own)
            return scheme_gemm.tiled_product(
                codes, scale, sums, self.form, integers, parts, bias, out.view(m, self.rows)
            )

        of_weight = integers.data_ptr()
        at = {"x": at["codes"], "weight": of_weight, "out": out.data_ptr(), "row_scale": of_rows["scale"]}
        at |= {"scale": weight["scale"], "sums": of_rows["sums"]}
        at |= {"bias": weight["bias"], "zero": weight["zero"] if self.sums else of_weight}
        return out if self.launched(("product", m, bias is None), product, at) else None

    def _integers(self, own: Own, weight: dict[str, int], x: Tensor) -> Tensor | None:
        """Return the weight's codes as int8 [rows, columns]."""
        parts, form = self.tensors(own), self.integers
        if form is None:
            return parts[self.form.codes]
        out = empty(self.rows, self.columns, dtype=int8, device=x.device)
        addresses = {"out": out.data_ptr()} | {name: weight[name] for name in self.order}
        return out if self.launched(("integers",), lambda: decode(form, parts, out), addresses) else None
