"""diffusers' caches between steps on a quantized transformer: what they change is the same in every offload mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import hooks

import sdquant

STEPS = 4
CACHES: dict[str, Callable[[], Any]] = {
    "first block": lambda: hooks.FirstBlockCacheConfig(threshold=20.0),
    "taylor": lambda: hooks.TaylorSeerCacheConfig(cache_interval=2, max_order=1, disable_cache_before_step=1),
    "magnitude": lambda: hooks.MagCacheConfig(
        num_inference_steps=STEPS, mag_ratios=torch.ones(STEPS) * 0.99, retention_ratio=0.2, max_skip_steps=2
    ),
}


def images(pipe: Any) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(3)
    drawn = pipe("seven", num_inference_steps=STEPS, generator=generator, output_type="np").images
    return torch.from_numpy(drawn)


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
def test_a_cache_on_and_off(name: str, flux: Path) -> None:
    cached = {}
    for mode in ("none", "model", "balanced", "group"):
        pipe = sdquant.load_model(flux, "nf4", offload=mode, progress=False)
        exact = images(pipe)
        pipe.transformer.enable_cache(CACHES[name]())
        cached[mode] = images(pipe)
        assert not torch.equal(cached[mode], exact)
        assert torch.equal(images(pipe), cached[mode])
        pipe.transformer.disable_cache()
        assert torch.equal(images(pipe), exact)
    assert all(torch.equal(one, cached["none"]) for one in cached.values())
