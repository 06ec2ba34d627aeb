"""The product with a weight whose codes stand for 8-bit integers, bound to a layer on a GPU: see `expansion`.

Its integers, or their values, are made in one launch, as each call has memory of its own. Before launches were bound an
H200's processor took 175 to 335 us for a call, of which most was Python's.
"""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, empty, int8
from torch.nn import functional as F

from ..fastest import prefers_other
from . import bound_linear, expansion

if TYPE_CHECKING:
    import torch

    from ...core import ExpansionParts
    from ..base import Parts
    from .bound_linear import Own
    from .launch_config import Launch

_CODES, _SCALE, _TABLE, _CHANNEL, _OUT = range(2, 7)  # among the addresses of a call, behind those of x and the bias
_WORDS = 4  # bytes of codes that are read at a time


def can_bind(of: ExpansionParts, parts: Parts, inner: object, codes_and_scale: tuple[str, str]) -> bool:
    """Return whether the kernel reads such a weight, and `inner` is bound to one of these two parts."""
    if not isinstance(inner, bound_linear.BoundLinear) or inner.parts != codes_and_scale:
        return False
    codes = parts[of.codes]
    whole = codes.storage_offset() % _WORDS == 0 and codes.shape[1] % _WORDS == 0
    return whole and all(parts[name].is_contiguous() for name in (of.codes, of.scale, of.channel, of.table) if name)


class BoundExpansion(bound_linear.BoundParts):
    """x [..., columns] times the transposed weight, plus the bias.

    For more than `few` rows of x the weight is decoded to floats and torch multiplies; else, and for any number of them
    if `few` is None, `inner` multiplies its integers. Of 2 to `most` rows the way that is faster is found by measuring.
    """

    __slots__ = ("few", "inner", "most", "of", "rows", "sizes")

    def __init__(
        self, of: ExpansionParts, parts: Parts, shape: tuple[int, int], dtype: torch.dtype, prefix: str, rotation: int,
        few: int | None, inner: bound_linear.BoundLinear,
    ) -> None:  # fmt: skip
        """Bind the weight of layers whose parameters are its parts, named with `prefix`, for x of `dtype`.

        Args:
            shape: of the weight. rotation: how many columns of x are rotated together; 0 for none.
            few: None for integers, whatever the number of rows.
            inner: the product with a weight whose parts are codes and scales.
        """
        # Of each pointer; that of what there is none of is the codes'.
        names = tuple(prefix + (name or of.codes) for name in (of.codes, of.scale, of.table, of.channel))
        self.rows, columns = shape
        super().__init__(parts[of.codes], names, columns, dtype, rotation)
        self.of, self.inner = of, inner
        self.few = None if few is None else few * columns
        self.most, self.sizes = inner.most, ("expanded", of.bits, shape, self.rotation, str(dtype))
        if few is not None:
            inner.most = 0  # what its integers are decoded to is made of codes at once

    def __call__(self, x: Tensor, own: Own) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this does not apply."""
        size = x.numel()
        addresses = self.addresses(x, own) if size else None
        if addresses is None:
            return None
        if self.of.levels is not None:
            addresses[_TABLE] = self.of.levels.data_ptr()
        if self.few is None:
            return self.expanded(False, x, own, addresses)
        usual, rows = size > self.few, size // self.columns
        if not 1 < rows <= self.most:
            return self.expanded(usual, x, own, addresses)
        is_other = prefers_other(
            (usual, *self.sizes), rows, x.device,
            lambda: self.expanded(usual, x, own, [*addresses]), lambda: self.expanded(not usual, x, own, [*addresses]),
        )  # fmt: skip
        return self.expanded(usual != is_other, x, own, addresses)

    def expanded(self, in_floats: bool, x: Tensor, own: Own, addresses: list[int]) -> Tensor | None:
        """Multiply x by the weight's integers, or by their values; see `addresses`."""
        weight = empty(self.rows, self.columns, dtype=self.dtype if in_floats else int8, device=self.where)
        addresses.append(weight.data_ptr())
        if not self.again(in_floats, addresses) and not self._expand(in_floats, own, weight):
            return None
        if not in_floats:
            (codes, scale), channel = self.inner.names, self.names[-1]
            integers = [*addresses[:_CODES], addresses[_OUT], addresses[_CHANNEL]]
            return self.inner.of_addresses(x, {codes: weight, scale: own[channel]}, integers, own.get("bias"))
        inputs = self.rotated(x) if self.rotation else x
        return None if inputs is None else F.linear(inputs, weight, own.get("bias"))

    def _expand(self, in_floats: bool, own: Own, weight: Tensor) -> bool:
        codes, scale, table, channel = (own[name].data for name in self.names)  # type: ignore[union-attr]
        values = table if self.of.table else self.of.levels

        def make() -> Launch:
            return expansion.expansion(codes, self.of.bits, scale, values, weight, channel if in_floats else None)

        at = {"codes": _CODES, "scale": _SCALE, "out": _OUT}
        at["table"] = _OUT if values is None else _TABLE
        at["channel"] = _CHANNEL if in_floats else _OUT
        return self.first(in_floats, make, at)
