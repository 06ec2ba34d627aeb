"""Measure the precision of a scheme by encoding a fixed matrix with its codec. New schemes are ranked automatically."""

from __future__ import annotations

import logging
from functools import lru_cache

from ...core import registry
from ...errors import SdquantError
from ...utils.metrics import decibels

log = logging.getLogger(__name__)

# Images suffer below this, in dB. In bench/results/fidelity.json, schemes above it (4 bits and more: 18 dB and up) draw
# nearly every digit right, and those below (3 bits: 14 dB; 2 bits: 6 dB) get 5 % or more wrong.
USABLE = 16.0

_SHAPE = (256, 512)


@lru_cache(maxsize=256)
def snr(scheme: str) -> float | None:
    """Return the signal-to-noise ratio, in dB, of normally distributed weights; None if its library fails here.

    It takes a few milliseconds, plus the import of the library the first time.

    Args:
        scheme: a name with its options, such as "nf4,double_quant".
    """
    import torch

    spec = registry.parse(scheme)
    backend = spec.scheme.codec
    weight = torch.empty(_SHAPE, dtype=torch.float32, device="cpu").normal_(generator=torch.Generator().manual_seed(0))
    try:
        packed = backend.encode(weight.to(torch.bfloat16), spec)
        noise = backend.decode(packed, torch.float32) - weight.to(torch.bfloat16).float()
    except (SdquantError, ImportError, OSError, RuntimeError) as error:
        log.warning("%s cannot be used: %s", spec, error)
        return None
    return decibels(float(weight.square().mean()), float(noise.square().mean()))
