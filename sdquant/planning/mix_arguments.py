"""Check the arguments of a mix: `quant="auto"` with `size=` or `quality=`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from ..core import AUTO
from ..errors import SettingsError

_OPTIONS = ("size", "quality")
_EXAMPLES = "Use auto,size=6GB or auto,quality=30"
_WITHOUT_COMMA = re.compile(r"auto\b\s*[^\s,]", re.IGNORECASE)


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
    if _WITHOUT_COMMA.match(head.strip()):
        raise SettingsError(f"Invalid quant={quant!r}", "an option of auto follows a comma", _EXAMPLES)
    if not comma or head.strip().lower() != AUTO:
        return values
    options: dict[str, Any] = {}
    for word in tail.split(","):
        name, _, value = (part.strip() for part in word.partition("="))
        name = name.lower()
        if name not in _OPTIONS:
            raise SettingsError(f"Invalid quant={quant!r}", f"{word.strip()!r} is no option of auto", _EXAMPLES)
        if not value:
            raise SettingsError(f"Invalid quant={quant!r}", f"{name} has no value", _EXAMPLES)
        if name in options or values.get(name) is not None:
            raise SettingsError(f"Invalid quant={quant!r}", f"{name} is given twice", "Give it once")
        options[name] = value
    return {**values, "quant": AUTO, **options}


def refuse_auto_of_one(scheme: str) -> None:
    """Raise SettingsError if the scheme of one component is auto, with options or without."""
    if scheme.partition(",")[0].strip().lower() == AUTO:
        raise SettingsError(
            f"Cannot use {scheme!r} for one component",
            "auto chooses for all components together",
            "Use quant='auto', and with size= or quality= also components=['unet'] for one of them",
        )


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
    raise SettingsError(f"Invalid quality={quality!r}", "it must be a number of dB above 0 and below 200", "Use 30")
