"""Patterns out of files: those that could take for ever are refused, those that people write are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sdquant.errors import BadFileError
from sdquant.rules.file_rules import rules_in
from sdquant.utils.quick_patterns import quick


@pytest.mark.parametrize(
    "pattern",
    [
        ".*", r".*\.attn\d+\..*", "(down|up)_blocks.*", r"(?:mid_block|conv_(in|out))(\..*)?", "blocks/[0-9]+/attn.*",
        r"a\)+b", "[)*+]*", "|".join([".*attn1.*", ".*attn2.*", ".*ff.*"]), r"x{2,3}",
    ],
)  # fmt: skip
def test_what_people_write_is_quick(pattern: str) -> None:
    re.compile(pattern)
    assert quick(pattern)


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "(.*)*x", "(a|aa)+$", "(.*a){9}", ".*" * 12 + "x", "a?" * 30 + "a" * 30, "a" * 5000]
)
def test_what_takes_for_ever_is_refused(pattern: str) -> None:
    re.compile(pattern)
    assert not quick(pattern)
    with pytest.raises(BadFileError, match="for ever"):
        rules_in(Path("model.safetensors"), ({"module_path": pattern, "act_qtype": "int8"},))


def test_the_slowest_that_is_let_through_ends() -> None:
    pattern = ".*a.*b.*c.*d"
    assert quick(pattern) and re.fullmatch(pattern, "abc" * 30) is None
