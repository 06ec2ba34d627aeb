"""Check the arguments of a mix: `quant="auto"` with `size=` or `quality=`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ..core import AUTO
from ..errors import SettingsError

_OPTIONS = ("size", "quality")


class _Request(Protocol):
    @property
    def quant(self) -> object: ...
    @property
    def runtime(self) -> str | None: ...
    @property
    def size(self) -> int | str | None: ...
    @property
    def quality(self) -> float | None: ...


def with_options_of_auto(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return arguments of `load_model` with "auto,size=6GB" as quant="auto" and size="6GB".

    Raises:
        SettingsError: an option that auto does not have, or one that is given twice.
    """
    quant = values.get("quant")
    head, comma, tail = quant.partition(",") if isinstance(quant, str) else ("", "", "")
    if not comma or head.strip().lower() != AUTO:
        return values
    options: dict[str, Any] = {}
    for word in tail.split(","):
        name, sign, value = (part.strip() for part in word.partition("="))
        if name not in _OPTIONS or not sign or not value:
            raise SettingsError(
                f"Invalid quant={quant!r}",
                f"{word.strip()!r} is no option of auto",
                "Use auto,size=6GB or auto,quality=30",
            )
        if name in options or values.get(name) is not None:
            raise SettingsError(f"Invalid quant={quant!r}", f"{name} is given twice", "Give it once")
        options[name] = value
    return {**values, "quant": AUTO, **options}


def refuse_wrong_mix(request: _Request) -> None:
    """Raise SettingsError for a size or quality that is none, or that does not go with the rest of a request."""
    if request.size is None and request.quality is None:
        return
    name = "quality" if request.size is None else "size"
    wrong = (
        (request.quant != AUTO, "it needs quant='auto', which chooses for each weight", "Use quant='auto'"),
        (None not in (request.size, request.quality), "one of size and quality follows from the other", "Remove one"),
        (request.runtime not in (None, "plain"), "a mix runs in sdquant's plain layers", "Remove runtime"),
    )
    for is_so, why, fix in wrong:
        if is_so:
            raise SettingsError(f"Cannot use {name}={getattr(request, name)!r}", why, fix)
    quality = request.quality
    if quality is None or (isinstance(quality, (int, float)) and type(quality) is not bool and 0 < quality < 200):
        return
    raise SettingsError(f"Invalid quality={quality!r}", "it must be a number of dB, from 0 to 200", "Use 30")
