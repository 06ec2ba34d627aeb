"""Folders in nf4, fp4 and bnb-int8 that sdquant saved, for diffusers without a GPU.

diffusers gives such a folder to bitsandbytes' own modules, and its quantizer refuses to on a machine that has no GPU
(`validate_environment` of `diffusers/quantizers/bitsandbytes/bnb_quantizer.py`, 0.37 to 0.39). sdquant's plain layers
run there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compat import hardware
from ..models import quiet
from .config import Config
from .diffusers_quantizer import Quantizer

with quiet():  # as there
    from diffusers.quantizers import auto

_METHODS = ("bitsandbytes_4bit", "bitsandbytes_8bit")


def serve_bitsandbytes() -> Callable[[], None]:
    """Have diffusers load such folders by sdquant's quantizer, where there is no GPU. Return what undoes it."""
    table = auto.AUTO_QUANTIZER_MAPPING
    theirs = {method: table[method] for method in _METHODS if method in table}
    table.update({method: _choice(one) for method, one in theirs.items()})
    return lambda: table.update(theirs)


def _choice(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes the quantizer for one load, in place of the class `theirs`."""

    def quantizer(quantization_config: Any, **kwargs: Any) -> Any:
        if not kwargs.get("pre_quantized", True) or hardware.default_device(hardware.probe()) != "cpu":
            return theirs(quantization_config, **kwargs)
        return Quantizer(Config(_scheme(quantization_config)), **kwargs)

    return quantizer


def _scheme(config: Any) -> str:
    """Return the scheme of diffusers' BitsAndBytesConfig."""
    return "bnb-int8" if config.load_in_8bit else str(config.bnb_4bit_quant_type)
