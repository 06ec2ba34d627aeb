"""Foresee how long a conversion takes: by encoding a small matrix here, as its weights will be."""

from __future__ import annotations

import time
from functools import lru_cache

from ..core import AUTO, registry
from ..errors import SdquantError
from ..planning import mix, mix_errors
from ..saving import comfy_mix

_SHAPE = (512, 1024)
_ROWS = 3072  # of a usual weight, of which a mix measures `mix_errors.ROWS` in each scheme
_COPY = 2e-9  # seconds a byte to read it, and to write what becomes of it
_START = 1.0  # seconds


def seconds_for(scheme: str, kind: str, nbytes: int) -> float | None:
    """Return the seconds that a conversion of weights of 16 bits takes here; None if that cannot be told.

    Args:
        scheme: a name with its options, or "auto" for a mix. nbytes: of the weights before.
    """
    words = _words(kind) if scheme == AUTO else (scheme,)
    times = [one for one in map(_seconds_a_number, words) if one is not None]
    if not times:
        return None
    tries = 2 * mix_errors.ROWS / _ROWS * sum(times) if scheme == AUTO else 0.0  # encoded, and decoded again
    return _START + nbytes * _COPY + nbytes / 2 * (sum(times) / len(times) + tries)


def _words(kind: str) -> tuple[str, ...]:
    if kind == "file":
        return comfy_mix.FORMATS
    return mix.FAMILIES[mix.GGUF if kind == "gguf" else mix.OWN]


@lru_cache(maxsize=256)
def _seconds_a_number(scheme: str) -> float | None:
    import torch

    spec = registry.parse(scheme)
    weight = torch.empty(_SHAPE, dtype=torch.bfloat16, device="cpu").normal_(generator=torch.Generator().manual_seed(0))
    try:
        spec.scheme.codec.encode(weight[:8].contiguous(), spec)  # what is made once
        begin = time.perf_counter()
        spec.scheme.codec.encode(weight, spec)
    except (SdquantError, ImportError, OSError, RuntimeError):
        return None
    return (time.perf_counter() - begin) / weight.numel()
