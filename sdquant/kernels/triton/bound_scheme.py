"""`scheme_gemm` bound to a layer's weight: two launches, or three where codes of few bits are unpacked first."""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, empty, float32, int8, int32

from . import scheme_gemm
from .bound_launch import MOST_KEPT, LaunchSequence
from .bound_linear import ALIGNED, BIAS, BoundWeight, X, after, piece
from .launch import decode

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ...core import Activations, PackedLayout
    from ..base import Parts
    from .bound_linear import Own
    from .launch_config import Launch


class BoundScheme(BoundWeight):
    """`Backend.linear` plus the bias, for layers that hold a weight in codes that `scheme_activations.coding` knows."""

    __slots__ = ("how", "integers", "known", "steps", "sums", "tiles")

    def __init__(self, form: PackedLayout, parts: Parts, dtype: torch.dtype, how: Activations, prefix: str) -> None:
        super().__init__(form, parts, dtype, prefix)
        self.how, self.tiles = how, form.columns // (how.tile or form.columns)
        self.known = prefix + how.scale if how.scale else ""
        self.sums = isinstance(form.zero, str)
        self.steps: dict[tuple[object, ...], LaunchSequence] = {}  # by the shape of x and whether there is a bias
        # The layout of the codes alone, where they are not multiplied as they are.
        self.integers = None if form.packing == "int8" else replace(form, scale="", factor=1.0)

    def __call__(self, x: Tensor, own: Own) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this does not apply."""
        addresses = self.addresses(x, own) if x.numel() else None
        if addresses is None:
            return None
        known, bias = own[self.known] if self.known else None, own.get("bias")
        key = (x.shape, bias is None)
        steps = self.steps.get(key)
        if steps is None:
            if len(self.steps) >= MOST_KEPT:
                self.steps = {}  # another thread may be about to read the one before
            steps = self.steps[key] = self._sizes(x)
        memory = empty(steps.size, dtype=int8, device=self.where)
        out = empty(steps.out, dtype=self.dtype, device=self.where)
        base, (scale, sums, codes) = memory.data_ptr(), steps.pieces
        addresses += (out.data_ptr(), base, base + scale, base + sums, base + codes)
        if known is not None:
            address = known.data_ptr()
            if known.get_device() != self.device or address & ALIGNED:
                return None
            addresses.append(address)
        if steps.launches is None:
            steps.first(self._launches(x, own, memory, out, bias, known, steps), self.where)
            return out
        return out if steps.again(self.device, addresses) else None

    def _sizes(self, x: Tensor) -> LaunchSequence:
        """Codes of x, their scales and sums, and the codes of the weight, in one piece of memory. What there is none of
        lies where what it stands for does."""
        m = x.numel() // self.columns
        scale = after(0, m * self.columns)
        sums = after(scale, 4 * m * self.tiles)
        codes = after(sums, 4 * m * self.tiles) if self.sums else sums
        size = codes + self.rows * self.columns * (self.integers is not None)
        return LaunchSequence(m, (*x.shape[:-1], self.rows), size, (scale, sums if self.sums else scale, codes))

    def _launches(
        self,
        x: Tensor,
        own: Own,
        memory: Tensor,
        out: Tensor,
        bias: Tensor | None,
        known: Tensor | None,
        steps: LaunchSequence,
    ) -> Iterator[tuple[Launch, dict[str, int]]]:
        """Yield the launches, and which address each pointer is."""
        columns, rows, tiles, m, more = self.columns, self.rows, self.tiles, steps.m, self.more
        scale_at, sums_at, codes_at = steps.pieces
        parts, codes = self.tensors(own), piece(memory, 0, int8, m, columns)
        scale = piece(memory, scale_at, float32, m, tiles)
        sums = piece(memory, sums_at, int32, m, tiles) if self.sums else None
        to, x_codes, x_scale, x_sums, unpacked, static = range(more, more + 6)
        if self.integers is None:
            integers, of_weight = parts[self.form.codes], self.at["codes"]
        else:
            integers, of_weight = piece(memory, codes_at, int8, rows, columns), unpacked
            yield decode(self.integers, parts, integers), {"out": unpacked, **self.at}
        at = {"x": X, "codes": x_codes, "scale": x_scale, "sums": x_sums}
        at["known"] = x_scale if known is None else static
        yield scheme_gemm.activation_codes(x.view(m, -1), self.how, known, codes, scale, sums), at
        at = {"x": x_codes, "weight": of_weight, "out": to, "row_scale": x_scale, "scale": self.at["scale"]}
        at |= {"sums": x_sums, "bias": BIAS, "zero": self.at["zero"] if self.sums else of_weight}
        product = scheme_gemm.tiled_product(codes, scale, sums, self.form, integers, parts, bias, out.view(m, rows))
        yield product, at
