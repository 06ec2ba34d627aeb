"""How precise a scheme is, measured: what its own codec does to a fixed matrix. A new scheme ranks by itself."""

from __future__ import annotations

import logging
import math
from functools import lru_cache

from ...core import registry
from ...errors import SdquantError

log = logging.getLogger(__name__)

# Decibels below which images suffer. Of those measured in bench/results/fidelity.json, the schemes above it (4 bits and
# more: 18 dB and up) draw nearly every digit right, and those below (3 bits: 14 dB; 2 bits: 6 dB) lose 5 % and more.
USABLE = 16.0

_SHAPE = (256, 512)


@lru_cache(maxsize=256)
def snr(scheme: str) -> float | None:
    """Signal to noise in decibels of normally distributed weights in this scheme; None if its library fails here.

    Args:
        scheme: a name with its options, as "nf4,double_quant". It takes a few milliseconds, and the import of its
            library the first time.
    """
    import torch

    spec = registry.parse(scheme)
    backend = registry.get(spec.scheme.backend)
    weight = torch.empty(_SHAPE).normal_(generator=torch.Generator().manual_seed(0))
    try:
        packed = backend.encode(weight.to(torch.bfloat16), spec)
        noise = backend.decode(packed, torch.float32) - weight.to(torch.bfloat16).float()
    except (SdquantError, ImportError, OSError, RuntimeError) as error:
        log.warning("%s cannot be used: %s", spec, error)
        return None
    power = float(noise.square().mean())
    return 10 * math.log10(float(weight.square().mean()) / power) if power else math.inf
