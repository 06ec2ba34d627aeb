"""sdquant: quantization for diffusion pipelines.

    pipe = sdquant.load_model("some-model", quant="nf4", offload="balanced")
    pipe("a handwritten seven").images[0].save("seven.png")

Importing this package imports no torch and no backend: the names below are looked up when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
from .utils.version import __version__ as __version__

if TYPE_CHECKING:
    from . import backends, compat, demo, rules
    from .compat import check
    from .integrations.config import Config
    from .loading.loader import load_model
    from .loading.quantizer import quantize
    from .loading.verification import verify
    from .models.detection import Detected, detect, suffix_hint
    from .planning.plan import Plan
    from .planning.preparation import plan
    from .saving.model_files import save
    from .training import lora

# Public name -> where it is: a module's attribute, or a module itself.
_LAZY = {
    "Config": "integrations.config",
    "Detected": "models.detection",
    "Plan": "planning.plan",
    "backends": "backends",
    "check": "compat",
    "compat": "compat",
    "demo": "demo",
    "detect": "models.detection",
    "load_model": "loading.loader",
    "lora": "training.lora",
    "plan": "planning.preparation",
    "quantize": "loading.quantizer",
    "rules": "rules",
    "save": "saving.model_files",
    "suffix_hint": "formats.filename_hints",
    "verify": "loading.verification",
}
_MODULES = ("backends", "compat", "demo", "lora", "rules")

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


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module = importlib.import_module(f"{__name__}.{_LAZY[name]}")
        return module if name in _MODULES else getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
