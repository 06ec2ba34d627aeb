"""The low-rank branch beside a packed weight, as SVDQuant and SDNQ's SVD have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """A weight W = rows R / smooth + up down^T, so that x W^T = (x / smooth) R^T rows + (x down) up^T.

    Attributes:
        residual: names of the parts of R, a packed weight of the same description as W.
        down: name of the part down, [in, rank]. up: of the part up, [out, rank].
        smooth: of the part that divides the inputs, [in]; "" for none.
        rows: of the part that multiplies the outputs of R, [out]; "" for none.
        is_turned: whether the part `down` is the transposed one, [rank, in].
    """

    residual: tuple[str, ...]
    down: str
    up: str
    smooth: str = ""
    rows: str = ""
    is_turned: bool = False

    def residual_of(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parts of R among those of W."""
        return {name: parts[name] for name in self.residual}

    def rank(self, parts: Mapping[str, Tensor]) -> int:
        """Return the number of columns of `up` among the parts of W."""
        return parts[self.up].shape[1]

    def under(self, prefix: str) -> LowRank:
        """Return the same for parts whose names begin with `prefix`."""

        def named(name: str) -> str:
            return prefix + name if name else ""

        return LowRank(
            residual=tuple(map(named, self.residual)), down=named(self.down), up=named(self.up),
            smooth=named(self.smooth), rows=named(self.rows), is_turned=self.is_turned,
        )  # fmt: skip
