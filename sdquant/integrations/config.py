"""`sdquant.Config`: what a model is to be quantized to while diffusers or transformers loads it. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from .. import backends

METHOD = "sdquant"


class Method(str, Enum):
    """diffusers wants an enum with a value, and both libraries look it up as the string that it is."""

    SDQUANT = METHOD


class Config:
    """What to quantize a model of diffusers or transformers to while it is loaded.

    It has what both libraries use of their own configs, and derives from neither: one class serves both, and making
    one imports none of them.

    Args:
        quant: a scheme with its options: "int8", "nf4,double_quant".
        skip: modules to leave as they are, by a part of their path or a pattern with `*`.

    Raises:
        UnknownQuantError, SettingsError: no such scheme or option.
    """

    def __init__(self, quant: str = "int8", skip: Iterable[str] = ()) -> None:
        self.quant_method = Method.SDQUANT
        self.quant = str(backends.parse(quant))
        self.skip = [skip] if isinstance(skip, str) else list(skip)

    def to_dict(self) -> dict[str, Any]:
        """As it stands in a config.json."""
        return {"quant_method": METHOD, "quant": self.quant, "skip": self.skip}

    def to_diff_dict(self) -> dict[str, Any]:
        """The same; both libraries print it."""
        return self.to_dict()

    def to_json_string(self, use_diff: bool = True) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The inverse of `to_dict`."""
        made = cls(quant=config_dict.get("quant", "int8"), skip=config_dict.get("skip") or [])
        return (made, kwargs) if return_unused_kwargs else made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # its lists may change

    def __repr__(self) -> str:
        return f"Config(quant={self.quant!r}, skip={self.skip!r})"
