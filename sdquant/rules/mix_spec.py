"""A mix as a `QuantSpec`: each weight of a component has a scheme of its own, or stays as it is. No torch."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..core import QuantSpec, Scheme, Unfit

KEPT = "the mix keeps it: its bytes are worth more here than elsewhere"


@dataclass(frozen=True)
class Share:
    """What a mix says of one weight.

    Attributes:
        name: of the weight. spec: None to leave it as it is.
        noise: power of the noise that this makes in the output of its component, relative to that of the output.
        bytes, values: of the weight, and how many values it has.
        next_bytes, next_noise: the next better choice, which would take so many more bytes, and its noise; 0 and the
            same noise if there is none.
    """

    name: str
    spec: QuantSpec | None
    noise: float
    bytes: int = 0
    values: int = 0
    next_bytes: int = 0
    next_noise: float = 0.0


@dataclass(frozen=True)
class MixSpec(QuantSpec):
    """Schemes by weight. `scheme` is the one of most weights, for what asks for one.

    Attributes:
        shares: in the order of names. measured: whether calibration told how much each layer matters.
    """

    shares: tuple[Share, ...] = ()
    measured: bool = False

    def of(self, name: str, shape: tuple[int, ...]) -> QuantSpec:
        """Return the scheme of the weight `name`."""
        spec = self._by_name.get(name)
        if spec is None:
            raise Unfit(KEPT)
        return spec.of(name, shape)

    @cached_property
    def _by_name(self) -> Mapping[str, QuantSpec | None]:
        return {share.name: share.spec for share in self.shares}

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """Return all schemes in it, that of most weights first."""
        counts = Counter(share.spec.scheme for share in self.shares if share.spec is not None)
        return tuple(scheme for scheme, _ in sorted(counts.items(), key=lambda row: (-row[1], row[0].name)))

    @property
    def noise(self) -> float:
        """Return the noise of all weights together; see `Share.noise`."""
        return sum(share.noise for share in self.shares)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values. Noise is in dB below the output; null is none."""
        return {
            "measured": self.measured,
            "noise_db": _decibels(self.noise),
            "weights": {
                share.name: {
                    "scheme": None if share.spec is None else str(share.spec),
                    "noise_db": _decibels(share.noise),
                    "bytes": share.bytes,
                    "next_bytes": share.next_bytes,
                    "next_noise_db": _decibels(share.next_noise),
                }
                for share in self.shares
            },
        }

    def described(self) -> str:
        return json.dumps(["mix", *((share.name, share.spec and share.spec.described()) for share in self.shares)])

    def __str__(self) -> str:
        return f"a mix of {', '.join(scheme.name for scheme in self.schemes)}"


def _decibels(noise: float) -> float | None:
    return round(10 * math.log10(noise), 2) if noise > 0 else None


def mix_of(shares: Iterable[Share], *, measured: bool, embeddings: bool = False) -> MixSpec | None:
    """Return the mix of these shares; None if all weights stay as they are."""
    rows = tuple(sorted(shares, key=lambda share: share.name))
    counts = Counter(share.spec.scheme for share in rows if share.spec is not None)
    if not counts:
        return None
    scheme = min(counts, key=lambda scheme: (-counts[scheme], scheme.name))
    return MixSpec(scheme, embeddings=embeddings, shares=rows, measured=measured)
