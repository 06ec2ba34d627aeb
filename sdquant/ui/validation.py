"""Checks values from the page on the server: the limits in the page can be bypassed."""

from __future__ import annotations

from ..errors import SettingsError

MAX_SEED = 2**53 - 1  # what a number in a browser holds exactly; the command line takes more
MAX_PROMPT = 4000


def prompt_of(text: object) -> str:
    """Check a prompt.

    Raises:
        SettingsError: it is empty or too long.
    """
    what = "Cannot generate an image"
    if not isinstance(text, str) or not text.strip():
        raise SettingsError(what, "there is no prompt", "Enter one")
    if len(text) > MAX_PROMPT:
        why = f"the prompt has {len(text)} characters, and the maximum is {MAX_PROMPT}"
        raise SettingsError(what, why, "Shorten it")
    return text


def text_of(name: str, text: object) -> str:
    """Check a text that may be empty.

    Raises:
        SettingsError: it is no text, or too long.
    """
    if text is None:
        return ""
    if isinstance(text, str) and len(text) <= MAX_PROMPT:
        return text.strip()
    raise SettingsError(f"{name} cannot be used", f"it must be a text of at most {MAX_PROMPT} characters", "Shorten it")


def whole_number(name: str, value: object, least: int, most: int) -> int:
    """Check a whole number.

    Raises:
        SettingsError: it is not a whole number, or outside the limits.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    raise _refused(name, value, f"a whole number from {least} to {most}")


def number(name: str, value: object, least: float, most: float) -> float:
    """Check a number.

    Raises:
        SettingsError: it is not a number, or outside the limits.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most:
        return float(value)
    raise _refused(name, value, f"a number from {least:g} to {most:g}")


def _refused(name: str, value: object, expected: str) -> SettingsError:
    problem = "be empty" if value is None else f"be {value!r}"[:80]
    return SettingsError(f"{name} cannot {problem}", f"it must be {expected}", "Enter one")
