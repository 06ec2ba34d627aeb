"""The table of what runs every day: a test that is renamed, or a case that goes, is missed here."""

from __future__ import annotations

import pytest

from .fast import COLLECTED, fits, is_slow, rows, stale


@pytest.fixture
def nodes(pytestconfig: pytest.Config) -> list[str]:
    """The node ids of the collected files."""
    if any("::" in arg for arg in pytestconfig.args):
        pytest.skip("of some files only a part was asked for")
    return pytestconfig.stash[COLLECTED]


def test_the_table_names_what_there_is(nodes: list[str]) -> None:
    assert stale(nodes) == []


def test_what_is_gone_is_named() -> None:
    function, row = next((function, row) for function, row in rows().items() if len(row.kept) > 1)
    first, *others = row.kept
    file = function.partition("::")[0]
    assert f"{function}: {others[0]}" in stale([f"{function}[{first}]"])
    assert function in stale([f"{file}::test_of_another_name"])


def test_what_a_row_says() -> None:
    function, row = next((function, row) for function, row in rows().items() if row.kept)
    assert not is_slow(f"{function}[{row.kept[0]}]") and is_slow(f"{function}[another case]")
    function, row = next((function, row) for function, row in rows().items() if row.left)
    assert is_slow(f"{function}[{row.left[0]}]") and not is_slow(f"{function}[another case]")
    function = next(function for function, row in rows().items() if not row.kept and not row.left)
    assert is_slow(function) and not is_slow(f"{function}_of_another_name")


def test_a_star_is_all_that_a_pattern_has() -> None:
    assert fits("a*c", "a[b].c") and fits("[a]", "[a]")
    assert not fits("a.c", "abc") and not fits("a", "ab")
