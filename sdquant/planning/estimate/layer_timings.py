"""What one layer takes, measured: by instruction set, kind of layer and dtype. `tools/facts.py` makes the table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

FILE = Path(__file__).with_name("layer_timings.json")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A row of the table. Ratios are to the unquantized layer in the same dtype.

    Attributes:
        isa: the C kernels' instruction set. kind: "linear" or "conv". dtype: of activations and unquantized weights.
        rows: of activations, in growing order; what is measured in the lists below.
        ns: nanoseconds of the unquantized layer, for each number of its weight.
        call_us: microseconds of one that computes next to nothing; None where that was not measured.
        exact, integers: ratios of each scheme, exact and with compute="int8"; None in them: not measured.
        call_exact, call_integers: the same for a call that computes next to nothing.
    """

    isa: str
    kind: str
    dtype: str
    rows: Sequence[int]
    ns: Sequence[float]
    call_us: float | None
    exact: Mapping[str, Sequence[float | None]]
    integers: Mapping[str, Sequence[float | None]]
    call_exact: Mapping[str, float]
    call_integers: Mapping[str, float]

    def seconds(self, numbers: int, rows: int) -> tuple[float, float]:
        """Of the unquantized layer: the call, and the computing. Beyond the most rows measured it grows with them."""
        most = max(1.0, rows / self.rows[-1])
        return (self.call_us or 0.0) / 1e6, numbers * _at(self.rows, self.ns, rows) * most / 1e9

    def ratios(self, names: Sequence[str], rows: int, compute: str | None) -> tuple[float, float] | None:
        """What a scheme's layer takes over that: for the call, and for the computing.

        Args:
            names: of the scheme, the most exact first: "nf4,double_quant", "nf4".
            compute: "int8", or None.

        Returns:
            None: it was not measured.
        """
        both = ((self.integers, self.call_integers),) if compute == "int8" else ()
        for held, calls in (*both, (self.exact, self.call_exact)):  # what was not measured in integers: as if exact
            for name in names:
                points = {n: ratio for n, ratio in zip(self.rows, held.get(name, ()), strict=False) if ratio}
                if points:
                    return calls.get(name, 1.0), _at(list(points), list(points.values()), rows)
        return None


def _at(rows: Sequence[int], values: Sequence[float], count: int) -> float:
    """The value at `count` rows: a power of them between two that were measured, the nearest outside."""
    if count <= rows[0]:
        return values[0]
    for (a, low), (b, high) in pairwise(zip(rows, values, strict=True)):
        if count <= b:
            share = math.log(count / a) / math.log(b / a)
            return float(low * (high / low) ** share)
    return values[-1]


@cache
def known() -> Mapping[tuple[str, str, str], Facts]:
    """By instruction set, kind and dtype."""
    rows = [Facts(**row) for row in json.loads(FILE.read_text(encoding="utf-8"))]
    return {(row.isa, row.kind, row.dtype): row for row in rows}
