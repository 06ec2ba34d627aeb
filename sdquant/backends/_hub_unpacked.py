"""A weight unpacked from a format of files: what `_hub_read` makes a packed weight of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

Get = Callable[[str], Tensor]
Size = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """The parts that `hub.Hub` describes.

    Attributes:
        groups: the group of each column and its file key, where a file says it.
        details: of the packed weight.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    shift: Tensor | None = None
    columns: Tensor | None = None
    groups: tuple[str, Tensor] | None = None
    details: Mapping[str, int] = field(default_factory=dict)
