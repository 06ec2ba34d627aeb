"""Whether new results are worse than old ones: `python -m bench.compare OLD.json NEW.json`.

Both are files of one script of this folder, or of `sdquant bench --json`. Rows of the same name and case are held
against each other. Times are compared as ratios to the reference or the peer of their own run, which depend little on
the machine; bytes and decibels as they are. Exit code 1 if something got worse by more than its threshold or fails
now, 2 if a file cannot be read or no number that is compared is in both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._results import read


@dataclass(frozen=True)
class Field:
    """A number that is compared.

    Attributes:
        name: in a row.
        better: 1 where more is better, -1 where less is.
        by: how much worse is a regression: a share of the old number, or an amount.
        share: which of the two `by` is.
    """

    name: str
    better: int
    by: float
    share: bool = True


COMPARED = (
    Field("ratio", -1, 0.10),  # a step, layer or load against the reference or peer of its run
    Field("load_ratio", 1, 0.25),  # a peer's load against sdquant's
    Field("missed", -1, 0.02, share=False),  # by which something foretold was wrong
    Field("bytes", -1, 0.01),
    Field("peak", -1, 0.10),
    Field("added", -1, 0.10),  # bytes of anonymous memory
    Field("snr", 1, 0.2, share=False),  # dB
    Field("psnr", 1, 0.5, share=False),  # dB
    Field("qat_snr", 1, 0.5, share=False),  # dB
    Field("right", 1, 2, share=False),  # images
    Field("qat_right", 1, 2, share=False),  # images
    Field("cosine", 1, 0.002, share=False),
)


@dataclass(frozen=True)
class Change:
    """One number of one row, then and now. `worse`: by more than its threshold; `better` likewise."""

    name: str
    case: str
    field: str
    old: float | None
    new: float | None
    worse: bool = False
    better: bool = False
    note: str = ""


def changes(
    old: Iterable[Mapping[str, Any]], new: Iterable[Mapping[str, Any]], threshold: float | None = None
) -> Iterator[Change]:
    """What became of each number that is in both, and which rows came and went.

    Args:
        threshold: instead of that of "ratio".
    """
    before, after = ({(row["name"], row["case"]): row for row in rows} for rows in (old, new))
    for (name, case), row in before.items():
        now = after.get((name, case))
        if now is None or (now.get("error") and not row.get("error")):
            gone = "is not there any more" if now is None else f"fails: {now['error']}"
            yield Change(name, case, "", None, None, worse=not row.get("error") and now is not None, note=gone)
        elif row.get("error"):
            if not now.get("error"):
                yield Change(name, case, "", None, None, better=True, note="runs now")
        else:
            yield from _numbers(name, case, row, now, threshold)
    for name, case in after:
        if (name, case) not in before:
            yield Change(name, case, "", None, None, note="is new")


def _numbers(
    name: str, case: str, row: Mapping[str, Any], now: Mapping[str, Any], threshold: float | None
) -> Iterator[Change]:
    for field in COMPARED:
        then, since = row.get(field.name), now.get(field.name)
        if then is None or since is None:
            same = field.name == "snr" and row.get("identical") and since is not None
            if same:  # no value differed, and some do now
                yield Change(name, case, field.name, None, since, worse=True, note="was the same to the bit")
            continue
        by = threshold if threshold is not None and field.name == "ratio" else field.by
        gain = (since - then) * field.better / (abs(then) if field.share and then else 1)
        yield Change(name, case, field.name, then, since, worse=gain < -by, better=gain > by)


def table(rows: Iterable[Change], *, every: bool) -> str:
    """The changes as text. `every`: those within their threshold too."""
    lines = [("", "case", "what", "old", "new", "new/old", "")]
    for row in rows:
        if not (every or row.worse or row.better or row.note):
            continue
        share = f"{row.new / row.old:.3f}" if row.old and row.new is not None else ""
        word = "WORSE" if row.worse else "better" if row.better else ""
        said = " ".join(filter(None, [word, row.note]))
        lines.append((row.name, row.case, row.field, _number(row.old), _number(row.new), share, said))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value == int(value) and abs(value) >= 100 else f"{value:.4g}"


def main(argv: list[str] | None = None) -> int:
    """Compare, print, and say whether something got worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threshold", type=float, help="of ratios, as a share (default: 0.1)")
    parser.add_argument("--all", action="store_true", help="show what is within its threshold too")
    args = parser.parse_args(argv)
    try:
        old, new = read(args.old), read(args.new)
        if not {(row["name"], row["case"]) for row in old} & {(row["name"], row["case"]) for row in new}:
            raise ValueError(f"{args.old} and {args.new} have no row of the same name and case")
    except ValueError as error:
        print(f"bench.compare: {error}", file=sys.stderr)
        return 2
    made = [*changes(old, new, args.threshold)]
    print(table(made, every=args.all))
    worse, better = (sum(getattr(row, word) for row in made) for word in ("worse", "better"))
    numbers = sum(row.field != "" for row in made)
    if not numbers and not worse and not better:
        print(f"bench.compare: {args.old} and {args.new}: no number of theirs is compared", file=sys.stderr)
        return 2
    print(f"\n{numbers} numbers compared: {worse} worse, {better} better")
    return 1 if worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
