"""Warning about casts of quantized models, which change only what is not packed."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

from ..core.dtypes import dtype_name

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


@cache
def warn_of_cast(before: torch.dtype, after: torch.dtype) -> None:
    """Log what a cast of a quantized layer from one dtype to another means, once per process for each pair.

    diffusers refuses `to(dtype)` on models of its own quantizers. Here it works, since layers compute in any dtype; but
    all that is not packed changes, and a pipeline's VAE and float layers may take twice the memory.
    """
    old, new = (dtype_name(dtype) for dtype in (before, after))
    if after.itemsize > before.itemsize:
        effect = "takes more memory"
    else:
        effect = "loses precision" if after.itemsize < before.itemsize else "has another range"
    log.warning(
        "A quantized model was cast from %s to %s: its packed weights do not change, but everything else "
        "(biases, norms, unquantized layers) %s. To use %s from the start, load the model with dtype=%r",
        old, new, effect, new, new,
    )  # fmt: skip
