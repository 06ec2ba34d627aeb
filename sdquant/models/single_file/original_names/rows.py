"""Rename and join tensors by rows of names, for a model and for each of its blocks, or by words. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Shapes = Mapping[str, tuple[int, ...]]
# (the authors' name, diffusers' names), rows of modules or of whole tensors. "~" before a name: halves are swapped,
# because diffusers has scale before shift and the authors have shift before scale.
Rows = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to be written: the rows of one tensor or several, concatenated.

    Attributes:
        name: in the file. sources: the tensors that its rows come from. swapped: its two halves are swapped.
        shape: in the file, if it is not that of the rows.
    """

    name: str
    sources: tuple[str, ...]
    swapped: bool = False
    shape: tuple[int, ...] | None = None


def shape_of(row: OutputTensor, shapes: Shapes) -> tuple[int, ...]:
    """Return the shape of the tensor that is written."""
    if row.shape is not None:
        return row.shape
    first = shapes[row.sources[0]]
    if len(row.sources) == 1:
        return first
    return (sum(shapes[source][0] for source in row.sources), *first[1:])


def of_rows(shapes: Shapes, rows: Rows, theirs: str, ours: str) -> Iterator[OutputTensor]:
    """Apply the rows to the tensors that exist, with a block's prefix in each layout."""
    for name, *sources in rows:
        for leaf in ("weight", "bias") if name.endswith("*") else ("",):
            names = tuple(ours + source.replace("*", leaf) for source in sources)
            if all(source in shapes for source in names):
                yield OutputTensor(theirs + name.lstrip("~").replace("*", leaf), names, swapped=name.startswith("~"))


def of_blocks(shapes: Shapes, rows: Rows, theirs: str, ours: str) -> Iterator[OutputTensor]:
    """Apply the rows to each block of a list, whose names are `theirs` and `ours`."""
    for i in range(count(shapes, f"{ours}.")):
        yield from of_rows(shapes, rows, f"{theirs}.{i}.", f"{ours}.{i}.")


def count(shapes: Shapes, prefix: str) -> int:
    """Count the blocks. Their numbers must run from 0 without a gap, or the names do not match anyway."""
    return len({name.removeprefix(prefix).split(".")[0] for name in shapes if name.startswith(prefix)})


# For layouts that differ in single words: (diffusers' word or words, the authors'), whole parts of a name. "^" before
# them: only where the name begins.
Rules = Sequence[tuple[str, str]]


def renamed(shapes: Shapes, rules: Rules) -> Iterator[OutputTensor]:
    """Yield each tensor alone, with all rules applied to its name in order."""
    patterns = [(re.compile(_pattern(ours)), theirs) for ours, theirs in rules]
    for name in shapes:
        there = name
        for pattern, theirs in patterns:
            there = pattern.sub(theirs, there)
        yield OutputTensor(there, (name,))


def _pattern(words: str) -> str:
    begin = "^" if words.startswith("^") else r"(?<![^.])"
    return begin + re.escape(words.removeprefix("^")) + r"(?![^.])"


def same(shapes: Shapes) -> Iterator[OutputTensor]:
    """Yield the tensors of a model whose authors use diffusers' names."""
    yield from renamed(shapes, ())
