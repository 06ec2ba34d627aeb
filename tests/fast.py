"""Which tests of those in `fast.yaml` the default run keeps: the same check over many cases runs with few every day."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

COLLECTED = pytest.StashKey[list[str]]()  # the node ids of all that was collected, slow or not
TABLE = Path(__file__).with_name("fast.yaml")


class Row(NamedTuple):
    """A test function, and what of it stays in the default run.

    kept: patterns of parameter ids, in which `*` stands for anything. left: the same of what goes into the slow run,
    where all others stay (`!` in the table). With neither, all of the function goes.
    """

    kept: tuple[str, ...]
    left: tuple[str, ...]

    def keeps(self, case: str) -> bool:
        """Whether the case with this parameter id, "" without parameters, stays in the default run."""
        if self.left:
            return not any(fits(pattern, case) for pattern in self.left)
        return any(fits(pattern, case) for pattern in self.kept)


@cache
def rows() -> dict[str, Row]:
    """Every row of the table by the node id of its function, such as "tests/test_cli.py::test_interrupted_compare"."""
    made = {}
    for file, functions in yaml.safe_load(TABLE.read_text()).items():
        for function, patterns in functions.items():
            left = tuple(pattern[1:] for pattern in patterns if pattern.startswith("!"))
            kept = tuple(pattern for pattern in patterns if not pattern.startswith("!"))
            assert not (left and kept), f"{file}::{function} says both what stays and what goes"
            made[f"tests/{file}::{function}"] = Row(kept, left)
    return made


def is_slow(node: str) -> bool:
    """Whether the table leaves the test of this node id to the slow run."""
    function, _, case = node.partition("[")
    row = rows().get(function)
    return row is not None and not row.keeps(case.removesuffix("]"))


def stale(nodes: Iterable[str]) -> list[str]:
    """What the table says of none of the node ids, in the files that these are of: functions, and patterns."""
    cases: dict[str, list[str]] = {}
    for node in nodes:
        function, _, case = node.partition("[")
        cases.setdefault(function, []).append(case.removesuffix("]"))
    files = {function.partition("::")[0] for function in cases}
    here = {function: row for function, row in rows().items() if function.partition("::")[0] in files}
    gone = [function for function in here if function not in cases]
    return gone + [
        f"{function}: {pattern}"
        for function, row in here.items()
        for pattern in (*row.kept, *row.left)
        if not any(fits(pattern, case) for case in cases.get(function, ()))
    ]


def fits(pattern: str, case: str) -> bool:
    """Whether the pattern, in which only `*` has a meaning, is that of the whole id."""
    return _compiled(pattern).fullmatch(case) is not None


@cache  # there are more patterns than `re` keeps
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)
