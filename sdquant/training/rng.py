"""Random numbers that depend only on the seed and on the place in the training.

The i-th example of a training is the same picture with the same noise whether or not the training was interrupted
before, and in any batch and process. No generator's state needs to be saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def seed_of(seed: int, *place: int | str) -> int:
    """Return a seed (0 to 2**63 - 1) for a place in a training, such as ("example", 1234)."""
    text = "/".join(map(str, (seed, *place)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *place: int | str) -> torch.Generator:
    """Return a CPU generator for a place in a training."""
    return torch.Generator("cpu").manual_seed(seed_of(seed, *place))


def normal(draw: torch.Generator, shape: Sequence[int] = ()) -> Tensor:
    """Return normally distributed numbers from a CPU generator: float32, on the CPU."""
    return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu")


def uniform(draw: torch.Generator) -> Tensor:
    """Return a number from 0 to 1 from a CPU generator: float32 [], on the CPU."""
    return torch.rand((), generator=draw, dtype=torch.float32, device="cpu")


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> Tensor:
    return torch.randperm(count, generator=generator(seed, "order", epoch), device="cpu")


def item_at(seed: int, position: int, count: int) -> int:
    """Return the index of the picture at a position: each of `count` once per epoch, in a new random order."""
    return int(_order(seed, position // count, count)[position % count])
