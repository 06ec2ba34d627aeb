"""sdquant: quantization for diffusion pipelines.

    pipe = sdquant.load_model("some-model", quant="nf4", offload="balanced")
    pipe("a handwritten seven").images[0].save("seven.png")

Importing this package imports no torch and no backend: the names below are looked up when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import (
    BackendUnavailableError,
    BadFileError,
    BudgetError,
    ConflictError,
    DiskSpaceError,
    DistributedError,
    IncompatibleError,
    MissingComponentError,
    RefusedFileError,
    SdquantError,
    SettingsError,
    TrainingError,
    UnknownOffloadError,
    UnknownQuantError,
    UnsupportedFileError,
)
from .integrations import plug_in as _plug_in
from .utils.lazy_exports import lazy_exports as _lazy_exports
from .utils.version import __version__ as __version__

if TYPE_CHECKING:
    from . import backends, compat, demo, rules
    from .compat import check
    from .formats import suffix_hint
    from .integrations import Config
    from .loading import dequantize, load_model, quantize, verify
    from .models import Detected, detect
    from .planning import Plan
    from .planning.preparation import plan
    from .saving import save
    from .training import lora
else:
    __getattr__ = _lazy_exports(__name__)

__all__ = [
    "BackendUnavailableError",
    "BadFileError",
    "BudgetError",
    "Config",
    "ConflictError",
    "Detected",
    "DiskSpaceError",
    "DistributedError",
    "IncompatibleError",
    "MissingComponentError",
    "Plan",
    "RefusedFileError",
    "SdquantError",
    "SettingsError",
    "TrainingError",
    "UnknownOffloadError",
    "UnknownQuantError",
    "UnsupportedFileError",
    "backends",
    "check",
    "compat",
    "demo",
    "dequantize",
    "detect",
    "load_model",
    "lora",
    "plan",
    "quantize",
    "rules",
    "save",
    "suffix_hint",
    "verify",
]


_plug_in()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
