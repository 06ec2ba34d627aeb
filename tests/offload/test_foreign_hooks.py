"""Hooks of diffusers and accelerate that move or cast weights, and a mode of sdquant's, do not go together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from diffusers import UNet2DConditionModel
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting

import sdquant
from sdquant import offload
from sdquant.offload import MODES

CPU = torch.device("cpu")


def _cast(unet: Any) -> None:
    apply_layerwise_casting(unet, torch.float8_e4m3fn, torch.float32)


def _group(unet: Any) -> None:
    apply_group_offloading(unet, CPU, CPU, offload_type="leaf_level")


def _sequential(unet: Any) -> None:
    cpu_offload(unet, CPU)


@pytest.mark.parametrize("mode", [row.name for row in MODES if row.name != "none"])
@pytest.mark.parametrize(
    ("hook", "why"),
    [
        (_cast, "layerwise casting replaces its weights"),
        (_group, "group offloading already moves"),
        (_sequential, "accelerate already moves"),
    ],
)
def test_a_component_that_another_tool_moves(hook: Callable[[Any], None], why: str, mode: str, sd: Path) -> None:
    unet = UNet2DConditionModel.from_pretrained(sd / "unet")
    hook(unet)
    with pytest.raises(sdquant.IncompatibleError) as caught:
        offload.apply(unet, mode, device="cpu")
    assert why in caught.value.why and mode in caught.value.what
    assert not any(name.startswith("_sdquant_offload") for name in unet.__dict__)


@pytest.mark.parametrize("mode", ["model", "balanced", "group"])
def test_layerwise_casting_of_an_offloaded_model(mode: str, sd: Path) -> None:
    """By diffusers' free function, which no guard of the model sees: it is refused before the model computes."""
    unet = sdquant.load_model(
        sd / "unet", offload=mode, progress=False, **({"budget": "2MB"} if mode == "balanced" else {})
    )
    with pytest.raises(sdquant.IncompatibleError, match="layerwise casting"), unet.sdquant.offload.suspended():
        _cast(unet)


def drawn(unet: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = unet(torch.ones(1, 4, 8, 8), 3, torch.ones(1, 4, 128)).sample
    return out


def offloaded(mode: str, sd: Path) -> Any:
    return sdquant.load_model(
        sd / "unet", "int8", mode, dtype="float32", progress=False, **({"budget": "1MB"} if mode == "balanced" else {})
    )


MOVING = [row.name for row in MODES if row.name != "none"]


@pytest.mark.parametrize("mode", MOVING)
@pytest.mark.parametrize("how", [cpu_offload, cpu_offload_with_hook])
def test_accelerate_after_a_mode(how: Callable[..., Any], mode: str, sd: Path) -> None:
    """It took the weights away (a tensor on meta was copied), or called itself without end."""
    expected = drawn(offloaded("none", sd))
    unet = offloaded(mode, sd)
    assert torch.equal(drawn(unet), expected)
    how(unet, execution_device="cpu")
    if how is cpu_offload and mode in ("model", "balanced"):
        with pytest.raises(sdquant.IncompatibleError, match="accelerate already moves its weights"):
            drawn(unet)
    else:
        assert torch.equal(drawn(unet), expected)


@pytest.mark.parametrize("mode", MOVING)
def test_a_method_that_somebody_took_before_the_mode_was_put_on_anew(mode: str, sd: Path) -> None:
    unet = offloaded(mode, sd)
    expected = drawn(unet)
    taken = unet.forward
    unet.to(torch.float32)
    unet.forward = lambda *args, **kwargs: taken(*args, **kwargs)
    assert torch.equal(drawn(unet), expected)
    handle = unet.sdquant.offload
    assert handle.active
    handle.remove()
    assert torch.equal(drawn(unet), expected)


@pytest.mark.parametrize("mode", MOVING)
def test_a_hook_that_only_says_where_to_compute(mode: str, sd: Path) -> None:
    expected = drawn(offloaded("none", sd))
    for early in (True, False):
        unet = offloaded("none" if early else mode, sd)
        hook = AlignDevicesHook(execution_device="cpu", io_same_device=True)
        if early:
            unet.sdquant.offload.remove()
        add_hook_to_module(unet, hook)
        if early:
            room = {"budget": 1_000_000} if mode == "balanced" else {}
            if mode == "group":  # diffusers' own offload takes none
                with pytest.raises(sdquant.IncompatibleError, match="accelerate already moves its weights"):
                    offload.apply(unet, mode, device="cpu")
                continue
            offload.apply(unet, mode, device="cpu", **room)
        assert torch.equal(drawn(unet), expected)
