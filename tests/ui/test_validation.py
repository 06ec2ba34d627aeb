"""Values from the page: what is refused, and that the sentence says what would be taken."""

from __future__ import annotations

import math

import pytest

from sdquant.errors import SettingsError
from sdquant.ui.validation import MAX_PROMPT, MAX_SEED, number, prompt_of, whole_number


@pytest.mark.parametrize(("value", "taken"), [(0, 0), (7.0, 7), (MAX_SEED, MAX_SEED)])
def test_whole_numbers(value: object, taken: int) -> None:
    assert whole_number("Seed", value, 0, MAX_SEED) == taken


@pytest.mark.parametrize(
    "value", [None, "", "7", 1.5, -1, MAX_SEED + 1, 1e300, math.inf, math.nan, True, [7], "x" * 999]
)
def test_no_whole_numbers(value: object) -> None:
    with pytest.raises(
        SettingsError, match=r"^Seed cannot be .{,80}: it must be a whole number from 0 to 9007199254740991\. "
    ):
        whole_number("Seed", value, 0, MAX_SEED)


def test_nothing_is_not_called_none() -> None:
    with pytest.raises(
        SettingsError, match=r"^Guidance cannot be empty: it must be a number from 0 to 100\. Enter one"
    ):
        number("Guidance", None, 0, 100)
    with pytest.raises(SettingsError, match="Guidance cannot be nan"):
        number("Guidance", math.nan, 0, 100)


@pytest.mark.parametrize(
    ("text", "why"), [("", "no prompt"), (" \n", "no prompt"), (None, "no prompt"), ("x" * (MAX_PROMPT + 1), "4001")]
)
def test_no_prompts(text: object, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        prompt_of(text)
    assert prompt_of("🙂\n") == "🙂\n"
