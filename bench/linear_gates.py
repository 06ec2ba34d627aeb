"""The goals for one linear layer, as rows, and whether measured rows meet them.

The numbers are those of the project's list of goals (G1 to G9 and G24); a gate is what must hold, an aim is near what
the hardware can do. All are ratios to the plain layer in the same turns, but for G8, which is a ratio to the best that
runs the same format, and G24, in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OURS, INTEGER, PLAIN = "sdquant", "sdquant compute=int8", "plain"
SMALL, WIDE = "3072x3072", "3072x12288"
G8 = 1.3
G24 = 80.0
# Peers whose numbers are not those of the format: what rounds activations is not compared with what does not.
_OTHERS = ("sdnq int8 matmul", "torchao int8 dynamic")
_EIGHT = ("qint8", "int8_sym", "bnb-int8", "int8", "sdnq-int8")
_FOUR = ("nf4", "fp4", "qint4", "int4", "int4_sym", "sdnq-uint4", "sdnq-int4", "q4_0")
_ALL_ROWS = (1, 8, 77, 256, 1024, 4608)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """At most `gate` times the plain layer, for each of `formats` run by `who`, at `rows` rows."""

    name: str
    formats: Sequence[str]
    rows: int
    gate: float
    aim: float
    shapes: Sequence[str] = (SMALL, WIDE)
    dtype: str = "bf16"
    who: str = OURS


GOALS: tuple[Goal, ...] = (
    Goal(name="G1", formats=_EIGHT, rows=1024, gate=0.58, aim=0.51, shapes=(SMALL,), who=INTEGER),
    Goal(name="G1", formats=_EIGHT, rows=1024, gate=0.60, aim=0.52, shapes=(WIDE,), who=INTEGER),
    Goal(name="G2", formats=_EIGHT, rows=77, gate=0.60, aim=0.50, who=INTEGER),
    Goal(name="G3", formats=(*_EIGHT, *_FOUR), rows=1, gate=0.60, aim=0.45),
    Goal(name="G4", formats=_EIGHT, rows=77, gate=1.25, aim=1.0),
    Goal(name="G4", formats=_EIGHT, rows=1024, gate=1.06, aim=1.0),
    Goal(name="G5", formats=("nf4",), rows=1, gate=0.45, aim=0.35),
    Goal(name="G5", formats=("nf4",), rows=77, gate=1.25, aim=1.1),
    Goal(name="G5", formats=("nf4",), rows=1024, gate=1.05, aim=1.0),
    Goal(name="G6", formats=("q8_0", "q4_0", "q4_k"), rows=1, gate=3.0, aim=1.5),
    Goal(name="G6", formats=("q8_0", "q4_0", "q4_k"), rows=77, gate=1.6, aim=1.2),
    Goal(name="G6", formats=("q8_0", "q4_0", "q4_k"), rows=1024, gate=1.15, aim=1.03),
    Goal(name="G7", formats=("int4", "qint4", "nf4", "q4_0", "q4_k"), rows=1024, gate=0.70, aim=0.55, who=INTEGER),
    Goal(name="G9", formats=_EIGHT, rows=77, gate=0.27, aim=0.21, dtype="fp32", who=INTEGER),
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One goal for one case. `value` None: not measured."""

    goal: str
    case: str
    value: float | None
    gate: float
    aim: float | None
    against: str

    @property
    def met(self) -> bool | None:
        """Whether the gate holds; None where nothing was measured."""
        return None if self.value is None else self.value <= self.gate


def judge(rows: Iterable[Mapping[str, Any]]) -> list[Verdict]:
    """All goals on measured rows."""
    found = {(row["format"], row["who"], row["shape"], row["dtype"], row["rows"]): row for row in rows}
    verdicts = []
    for goal in GOALS:
        for scheme in goal.formats:
            for shape in goal.shapes:
                row = found.get((scheme, goal.who, shape, goal.dtype, goal.rows))
                verdicts.append(
                    Verdict(goal=goal.name, case=f"{scheme} {shape} {goal.dtype} M={goal.rows}", against=PLAIN,
                            value=row["ratio"] if row else None, gate=goal.gate, aim=goal.aim)
                )  # fmt: skip
    return [*verdicts, *_best(found), *_overhead(found)]


def _best(found: Mapping[tuple[str, str, str, str, int], Mapping[str, Any]]) -> list[Verdict]:
    """G8: against the best of the others that run the same format."""
    verdicts = []
    for (scheme, who, shape, dtype, count), row in found.items():
        if who != OURS or shape not in (SMALL, WIDE) or count not in _ALL_ROWS:
            continue
        others = {
            other: value["ratio"]
            for (name, other, *rest), value in found.items()
            if name == scheme and rest == [shape, dtype, count] and value["ratio"]
            and other not in (OURS, INTEGER, PLAIN, *_OTHERS)
        }  # fmt: skip
        if others:
            best = min(others, key=others.__getitem__)
            verdicts.append(
                Verdict(goal="G8", case=f"{scheme} {shape} {dtype} M={count}", against=best,
                        value=row["ratio"] / others[best], gate=G8, aim=None)
            )  # fmt: skip
    return verdicts


def _overhead(found: Mapping[tuple[str, str, str, str, int], Mapping[str, Any]]) -> list[Verdict]:
    return [
        Verdict(goal="G24", case=f"{scheme} 128x128", against="µs", value=row["seconds"] * 1e6, gate=G24, aim=20.0)
        for (scheme, who, shape, _, _), row in found.items()
        if who == OURS and shape == "128x128"
    ]


def lines(verdicts: Sequence[Verdict]) -> list[str]:
    """What to print: those missed, and how many of each goal hold."""
    made = [
        f"MISSED {v.goal:4} {v.case:34} {v.value:.2f} > {v.gate} (against {v.against})"
        for v in verdicts
        if v.met is False
    ]
    for goal in dict.fromkeys(v.goal for v in verdicts):
        some = [v for v in verdicts if v.goal == goal]
        held = [v for v in some if v.met]
        aims = sum(v.aim is not None and v.value is not None and v.value <= v.aim for v in some)
        missing = sum(v.value is None for v in some)
        made.append(
            f"{goal:4} {len(held)} of {len(some)} gates hold"
            + (f", {aims} of them at the aim" if any(v.aim is not None for v in some) else "")
            + (f"; {missing} not measured" if missing else "")
        )
    return made
