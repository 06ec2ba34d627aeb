"""Values from the page, checked on the server: the limits in the page can be gone around."""

from __future__ import annotations

from ..errors import SettingsError

MAX_SEED = 2**53 - 1  # what a number in a browser holds exactly; the command line takes more
MAX_PROMPT = 4000


def prompt_of(text: object) -> str:
    """A prompt.

    Raises:
        SettingsError: nothing, or far too much.
    """
    what = "Cannot draw an image"
    if not isinstance(text, str) or not text.strip():
        raise SettingsError(what, "there is no prompt", "Enter one")
    if len(text) > MAX_PROMPT:
        why = f"the prompt has {len(text)} characters, and the maximum is {MAX_PROMPT}"
        raise SettingsError(what, why, "Shorten it")
    return text


def whole(name: str, value: object, least: int, most: int) -> int:
    """A whole number.

    Raises:
        SettingsError: it is none, or outside the limits.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    raise _refused(name, value, f"a whole number from {least} to {most}")


def number(name: str, value: object, least: float, most: float) -> float:
    """A number.

    Raises:
        SettingsError: it is none, or outside the limits.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most:
        return float(value)
    raise _refused(name, value, f"a number from {least:g} to {most:g}")


def _refused(name: str, value: object, wanted: str) -> SettingsError:
    given = "be empty" if value is None else f"be {value!r}"[:80]
    return SettingsError(f"{name} cannot {given}", f"it must be {wanted}", "Enter one")
