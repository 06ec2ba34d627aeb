"""Attach a quantizer to models that sdquant loaded or quantized, for calls of diffusers and transformers.

Without one, `save_pretrained` would write the parts of packed weights as tensors of an unquantized model, which nothing
could load.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError
from ..models import is_of_transformers, key_names, peft_hooks
from ..saving import library_config, own_config
from .config import Config

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)


class _Said(dict[str, Any]):
    """A `quantization_config` as in a config.json, with the `to_dict` that PEFT expects of a library's own."""

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict of it."""
        return dict(self)


def attach(model: nn.Module) -> None:
    """Set a loaded model's quantizer, and the `quantization_config` in its config as a saved model has it. A model that
    is not quantized, or not of one of the libraries' classes, is left unchanged."""
    config = library_config(model).get("quantization_config")
    if config is None or not hasattr(model, "save_pretrained"):
        return
    if not hasattr(model, "config"):  # several models as one, such as ControlNets, whose own methods save them
        for part in model.modules():
            if hasattr(part, "config"):
                attach(part)
        return
    peft_hooks.prepare(model)  # also of products alone, which no layer was put in for
    library_model: Any = model
    library = "transformers" if is_of_transformers(model) else "diffusers"
    try:
        quantizer = import_module(f"{__package__}.{library}_quantizer").Quantizer
    except ImportError as error:  # a version too old for it
        log.info("save_pretrained is disabled for this %s: %s", type(model).__name__, error)
        library_model.save_pretrained = _refuse
        return
    library_model.hf_quantizer = quantizer(Config.from_dict(own_config(model)))
    key_names.remember(model, key_names.conversions(model), quantized=True)
    if library == "transformers":
        library_model.config.quantization_config = _Said(config)
    else:
        library_model.register_to_config(quantization_config=_Said(config))


def _refuse(save_directory: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse `save_pretrained` if the library is too old for a quantizer."""
    raise SettingsError(
        f"Cannot save a quantized model to {save_directory} with save_pretrained",
        "the installed version of its library does not support that",
        "Use sdquant.save(model, folder), or install the newest diffusers and transformers",
    )
