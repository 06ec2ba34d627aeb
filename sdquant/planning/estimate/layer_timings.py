"""Measured layer times, by instruction set, layer type and dtype. `tools/facts.py` writes the table."""

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
        rows: numbers of activation rows, ascending; the lists below have one entry for each.
        ns: nanoseconds of the unquantized layer per element of its weight.
        call_us: microseconds of a call that computes almost nothing; None if not measured.
        exact, integers: ratios of each scheme, exact and with compute="int8"; entries are None if not measured.
        call_exact, call_integers: the same for a call that computes almost nothing.
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
        """Return the seconds of the unquantized layer, for the call and for computing `numbers` weight elements.

        Beyond the largest measured number of rows, the time is extrapolated linearly.
        """
        most = max(1.0, rows / self.rows[-1])
        return (self.call_us or 0.0) / 1e6, numbers * _at(self.rows, self.ns, rows) * most / 1e9

    def ratios(self, names: Sequence[str], rows: int, compute: str | None) -> tuple[float, float] | None:
        """Return the time of a scheme's layer relative to the unquantized one, for the call and for computing.

        Args:
            names: of the scheme, the most specific first: "nf4,double_quant", "nf4".
            compute: "int8", or None.

        Returns:
            None if it was not measured.
        """
        both = ((self.integers, self.call_integers),) if compute == "int8" else ()
        for table, calls in (*both, (self.exact, self.call_exact)):  # fall back to exact if integers were not measured
            for name in names:
                points = {n: ratio for n, ratio in zip(self.rows, table.get(name, ()), strict=False) if ratio}
                if points:
                    return calls.get(name, 1.0), _at(list(points), list(points.values()), rows)
        return None


def _at(rows: Sequence[int], values: Sequence[float], count: int) -> float:
    """Interpolate the value at `count` rows (log-log); outside the measured range, return the nearest value."""
    if count <= rows[0]:
        return values[0]
    for (a, low), (b, high) in pairwise(zip(rows, values, strict=True)):
        if count <= b:
            share = math.log(count / a) / math.log(b / a)
            return float(low * (high / low) ** share)
    return values[-1]


@cache
def known() -> Mapping[tuple[str, str, str], Facts]:
    """Return the measurements by instruction set, layer type and dtype."""
    rows = [Facts(**row) for row in json.loads(FILE.read_text(encoding="utf-8"))]
    return {(row.isa, row.kind, row.dtype): row for row in rows}
