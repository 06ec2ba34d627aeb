"""From a plan to a model: load, quantize what is loaded, keep quantized weights in a cache, verify files.

In: a `Request` and its `Plan`. Out: a diffusers pipeline or a component, with `.sdquant` on it.
May import `saving`, `planning` and what is below. `integrations` is called through the table in `finishing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.lazy_exports import lazy_exports
from . import finishing  # it is light, and imported with sdquant

if TYPE_CHECKING:
    from .conversion import rounding_loss
    from .dequantization import dequantize
    from .loader import import_classes, load, load_model, load_planned
    from .quantized_cache import cache_of
    from .quantizer import quantize
    from .verification import verify
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "cache_of", "dequantize", "distributed_quantize", "finishing", "import_classes", "load", "load_model",
    "load_planned", "quantize", "quantizer", "rounding_loss", "verify",
]  # fmt: skip
