"""Random numbers that depend on the seed and on where in the training they are drawn, and on nothing else.

The i-th example of a training is the same picture with the same noise whether the training was interrupted before it
or not, and in whichever batch and process it comes up. No generator's state needs to be saved.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
from torch import Tensor


def seed_of(seed: int, *place: int | str) -> int:
    """A seed (0 to 2**63 - 1) for a place in a training, such as ("example", 1234)."""
    text = "/".join(map(str, (seed, *place)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *place: int | str) -> torch.Generator:
    """A generator on the CPU for a place in a training."""
    return torch.Generator().manual_seed(seed_of(seed, *place))


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> Tensor:
    return torch.randperm(count, generator=generator(seed, "order", epoch))


def item_at(seed: int, position: int, count: int) -> int:
    """Which of `count` pictures is the example at a position: each once an epoch, in an order that is drawn anew."""
    return int(_order(seed, position // count, count)[position % count])
