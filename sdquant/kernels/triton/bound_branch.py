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

    __slots__ = ("branch", "dtypes", "few", "own")

    def __init__(
        self, form: PackedLayout, parts: Parts, branch: LowRank, of: Parts, dtype: torch.dtype, few: int, prefix: str
    ) -> None:
        super().__init__(form, parts, dtype, prefix)
        self.branch, self.own, self.few = branch, branch.under(prefix), few * form.columns
        self.dtypes = [tensor.dtype for tensor in of_branch(branch, of).values()]

    def __call__(self, x: Tensor, own: Own) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this does not apply."""
        if x.numel() <= self.few:
            return None
        weight = self.addresses(x, own)
        if weight is None:
            return None
        tensors = of_branch(self.own, own)  # type: ignore[arg-type]  # `addresses` found no part missing
        for tensor, dtype in zip(tensors.values(), self.dtypes, strict=True):
            if tensor is None or tensor.dtype is not dtype or tensor.get_device() != self.device:
                return None
            if tensor.data_ptr() & ALIGNED or tensor.requires_grad:
                return None
        floats = empty(self.rows, self.columns, dtype=self.dtype, device=x.device)
        at = {"out": floats.data_ptr()} | {name: tensor.data_ptr() for name, tensor in tensors.items()}
        at |= {name: weight[name] for name in self.order}

        def make() -> Launch:
            return decoding_with_branch(self.form, self.tensors(own), self.own, own, floats)  # type: ignore[arg-type]

        if not self.launched(("branch",), make, at):
            return None
        return F.linear(x, floats, own.get("bias"))
