"""The product with a weight that has a low-rank branch, bound to a layer on a GPU: see `branch`."""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, empty
from torch.nn import functional as F

from .bound_linear import ALIGNED, BoundWeight
from .branch import decoding_with_branch, of_branch

if TYPE_CHECKING:
    import torch

    from ...core import LowRank, PackedLayout
    from ..base import Parts
    from .bound_linear import Own
    from .launch_config import Launch


class BoundBranch(BoundWeight):
    """x [..., columns] times the transposed weight, plus the bias, for more than `few` rows of x."""

    __slots__ = ("branch", "few", "own", "sides")

    def __init__(
        self, form: PackedLayout, parts: Parts, branch: LowRank, of: Parts, dtype: torch.dtype, few: int, prefix: str
    ) -> None:
        super().__init__(form, parts, dtype, prefix)
        self.branch, self.own, self.few = branch, branch.under(prefix), few * form.columns
        # Of each pointer its name in the kernel and among a layer's parameters, and its dtype.
        sides = (self.own.up, self.own.down, self.own.smooth, self.own.rows)
        names = of_branch(self.own, dict(zip(sides, sides, strict=True)))
        dtypes = [tensor.dtype for tensor in of_branch(branch, of).values()]
        self.sides = [(pointer, name, dtype) for (pointer, name), dtype in zip(names.items(), dtypes, strict=True)]

    def __call__(self, x: Tensor, own: Own) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this does not apply."""
        if x.numel() <= self.few:
            return None
        addresses = self.addresses(x, own)
        if addresses is None:
            return None
        for _, name, dtype in self.sides:
            tensor = own[name]
            if tensor is None or tensor.dtype is not dtype or tensor.get_device() != self.device:
                return None
            address = tensor.data_ptr()
            if address & ALIGNED or tensor.requires_grad:
                return None
            addresses.append(address)
        floats = empty(self.rows, self.columns, dtype=self.dtype, device=self.where)
        addresses.append(floats.data_ptr())
        if not self.again("branch", addresses) and not self._first(own, floats):
            return None
        return F.linear(x, floats, own.get("bias"))

    def _first(self, own: Own, floats: Tensor) -> bool:
        def make() -> Launch:
            return decoding_with_branch(self.form, self.tensors(own), self.own, own, floats)  # type: ignore[arg-type]

        pointers = (*(pointer for pointer, _, _ in self.sides), "out")
        return self.first("branch", make, self.at | {name: at for at, name in enumerate(pointers, self.more)})
