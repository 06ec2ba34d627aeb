"""A mix block by block: which formats the weights of each part of a model got, for a picture."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..rules import MixSpec

if TYPE_CHECKING:
    from ..rules import Share
    from .plan import Plan

AS_IT_IS = "as it is"
# The colours of bits, the same in every picture: few are red.
_COLOURS = {2: "#b4232f", 3: "#dd6b2c", 4: "#e0ae3a", 5: "#84ad48", 6: "#3c978b", 8: "#3670b2", 16: "#70747e"}
_BLOCK = re.compile(r"(?:.*?\.)??(?:[^.]+\.\d+|mid_block)(?=\.)")
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, kw_only=True)
class MixBlock:
    """The weights of a block of a model, or of a layer outside of all blocks.

    Attributes:
        component, name: of a single component the name is all.
        bytes: by scheme, the coarsest first.
        values: how many values the weights have.
        noise: that they make in the output, relative to it.
    """

    component: str
    name: str
    bytes: Mapping[str, int]
    values: int
    noise: float

    @property
    def bits(self) -> float:
        """Mean bits of a value."""
        return 8 * sum(self.bytes.values()) / max(1, self.values)


def blocks_of(plan: Plan) -> list[MixBlock]:
    """Return the blocks of all components that a mix was chosen for, in the order of their names."""
    return [
        _block(part.name, name, shares)
        for part in plan.components
        if isinstance(part.spec, MixSpec)
        for name, shares in _grouped(part.spec.shares).items()
    ]


def bits_of(plan: Plan) -> dict[str, float]:
    """Return the nominal bits of the schemes in the mixes of a plan, by name, the fewest first; 16 as they are."""
    shares = [share for part in plan.components if isinstance(part.spec, MixSpec) for share in part.spec.shares]
    return dict(sorted({_word(share): _bits(share) for share in shares}.items(), key=lambda row: (row[1], row[0])))


def colour_of(bits: float) -> str:
    """Return the colour of so many bits: the nearest that there is."""
    return _COLOURS[min(_COLOURS, key=lambda one: abs(one - bits))]


def _grouped(shares: Iterable[Share]) -> dict[str, list[Share]]:
    groups: dict[str, list[Share]] = defaultdict(list)
    for share in shares:
        match = _BLOCK.match(share.name)
        groups[match[0] if match else share.name.partition(".")[0]].append(share)
    return dict(sorted(groups.items(), key=lambda row: [int(w) if w.isdigit() else w for w in _DIGITS.split(row[0])]))


def _block(component: str, name: str, shares: Iterable[Share]) -> MixBlock:
    sizes: Counter[str] = Counter()
    values, noise = 0, 0.0
    for share in sorted(shares, key=lambda share: (_bits(share), _word(share))):
        sizes[_word(share)] += share.bytes
        values, noise = values + share.values, noise + share.noise
    return MixBlock(component=component, name=name, bytes=dict(sizes), values=values, noise=noise)


def _word(share: Share) -> str:
    if share.spec is None:
        return AS_IT_IS
    rotated = ",hadamard" if "hadamard" in share.spec.scheme.options and share.spec["hadamard"] else ""
    return share.spec.scheme.name + rotated


def _bits(share: Share) -> float:
    return 16.0 if share.spec is None else float(share.spec.scheme.bits)
