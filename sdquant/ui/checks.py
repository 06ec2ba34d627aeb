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
    if isinstance(text, str) and text.strip() and len(text) <= MAX_PROMPT:
        return text
    raise SettingsError("An image was asked for", "there is no prompt, or a very long one", "Write what to draw")


def whole(name: str, value: object, least: int, most: int) -> int:
    """A whole number.

    Raises:
        SettingsError: it is none, or outside the limits.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    raise SettingsError(
        f"{name} was given as {value!r}"[:80], f"it is no whole number from {least} to {most}", "Change it"
    )


def number(name: str, value: object, least: float, most: float) -> float:
    """A number.

    Raises:
        SettingsError: it is none, or outside the limits.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most:
        return float(value)
    raise SettingsError(f"{name} was given as {value!r}"[:80], f"it is no number from {least} to {most}", "Change it")
