"""What a user can ask for: every field once, with default, help and choices.

The command line's flags are made from these fields (`cli.py`); a settings page can be as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from . import backends
from .backends.base import QuantSpec
from .errors import SettingsError
from .offload import MODES, parse_budget

OFFLOADS = tuple(row.name for row in MODES)
LOAD_MODES = ("auto", "pre", "post")
RUNTIMES = ("library", "plain")
DTYPES = ("float32", "float16", "bfloat16")
NOT_QUANTIZED = "none"

# A scheme for all chosen components, or one for each; None means "as found on disk".
Quant = str | Mapping[str, str] | None


def _row(default: Any, help: str, choices: tuple[str, ...] = (), metavar: str | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices, "metavar": metavar})


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call of `load_model`, as values."""

    path: str = field(metadata={"help": "pipeline folder, component folder, .safetensors, .gguf, or hub id"})
    quant: Quant = _row(None, "scheme, backend:scheme, scheme,option=value, or component=scheme (repeat)", metavar="S")
    offload: str = _row("none", "how weights share the fast memory", OFFLOADS)
    mode: str = _row("auto", "quantize while loading (pre), after it (post), or whichever the scheme can", LOAD_MODES)
    components: tuple[str, ...] | None = _row(None, "which components to quantize", metavar="NAME")
    skip: tuple[str, ...] = _row((), "modules to leave as they are: a part of their path, or a pattern with *")
    rules: Any = _row(None, "quantization rules")
    base: str | None = _row(None, "pipeline folder that has the rest of a lone transformer or UNet", metavar="FOLDER")
    runtime: str | None = _row(None, "the library's own modules, or sdquant's plain layers", RUNTIMES)
    device: str | None = _row(None, "compute device (default: the best there is)", metavar="DEVICE")
    dtype: str | None = _row(None, "dtype of what is not quantized (default: as in the file)", DTYPES)
    budget: int | str | None = _row(None, "how much of the fast memory weights may take", metavar="6GB")
    allow_incompatible: bool = _row(False, "try a combination that the matrix refuses")
    progress: bool = _row(True, "show progress bars")

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, LOAD_MODES)
        if self.runtime is not None:
            _one_of("runtime", self.runtime, RUNTIMES)
        if self.dtype is not None:
            _one_of("dtype", self.dtype, DTYPES)
        parse_budget(self.budget)
        if self.rules is not None:
            raise SettingsError("rules were given", "this version has no rule backend", "Use quant= and skip=")
        self.specs()

    def specs(self) -> dict[str, QuantSpec | None]:
        """The parsed `quant` by component, "*" for all; None stands for "do not quantize". Empty: as found on disk.

        Raises:
            UnknownQuantError, SettingsError: a scheme or option that does not exist.
        """
        if self.quant is None:
            return {}
        each = self.quant if isinstance(self.quant, Mapping) else {"*": self.quant}
        return {name: _spec(text) for name, text in each.items()}

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes."""
        return parse_budget(self.budget)


def request(path: Any, **values: Any) -> Request:
    """A Request from the keyword arguments of `load_model`; torch dtypes, devices and paths become names."""
    made: dict[str, Any] = {"path": str(path)}
    for row in fields(Request):
        if row.name not in values:
            continue
        value = values[row.name]
        if row.name in ("dtype", "device") and value is not None:
            value = str(value).removeprefix("torch.")
        elif row.name == "base" and value is not None:
            value = str(value)
        elif row.name in ("components", "skip") and value is not None:
            value = (value,) if isinstance(value, str) else tuple(value)
        made[row.name] = value
    return Request(**made)


def _spec(text: str) -> QuantSpec | None:
    if not isinstance(text, str):
        raise SettingsError(
            f"quant={text!r} was given", "a scheme is a string", 'Use quant="nf4" or quant={"unet": "nf4"}'
        )
    return None if text.strip().lower() == NOT_QUANTIZED else backends.parse(text)


def _one_of(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise SettingsError(
            f"{name}={value!r} was given", f"{name} is one of {', '.join(choices)}", "Choose one of them"
        )
