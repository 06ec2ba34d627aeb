"""Check the arguments of a mix: `quant="auto"` with `size=` or `quality=`."""

from __future__ import annotations

from typing import Protocol

from ..core import AUTO
from ..errors import SettingsError


class _Request(Protocol):
    @property
    def quant(self) -> object: ...
    @property
    def offload(self) -> str: ...
    @property
    def runtime(self) -> str | None: ...
    @property
    def size(self) -> int | str | None: ...
    @property
    def quality(self) -> float | None: ...


def refuse_wrong_mix(request: _Request) -> None:
    """Raise SettingsError for a size or quality that is none, or that does not go with the rest of a request."""
    if request.size is None and request.quality is None:
        return
    name = "quality" if request.size is None else "size"
    wrong = (
        (request.quant != AUTO, "it needs quant='auto', which chooses for each weight", "Use quant='auto'"),
        (None not in (request.size, request.quality), "one of size and quality follows from the other", "Remove one"),
        (request.offload == AUTO, "offload='auto' chooses by the size of one scheme for all", "Name the offload mode"),
        (request.runtime not in (None, "plain"), "a mix runs in sdquant's plain layers", "Remove runtime"),
    )
    for is_so, why, fix in wrong:
        if is_so:
            raise SettingsError(f"Cannot use {name}={getattr(request, name)!r}", why, fix)
    quality = request.quality
    if quality is None or (isinstance(quality, (int, float)) and type(quality) is not bool and 0 < quality < 200):
        return
    raise SettingsError(f"Invalid quality={quality!r}", "it must be a number of dB, from 0 to 200", "Use 30")
