"""Peaks of activations: foretold from shapes, followed while it runs, and held against torch's own memory profiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from torch import nn
from torch.profiler import ProfilerActivity, profile

import sdquant
from sdquant.errors import SettingsError
from sdquant.kernels import onednn
from sdquant.models import activation_memory
from sdquant.models.call_hooks import wrap
from sdquant.models.generate import draw
from sdquant.models.pipelines import components_of

# oneDNN's convolutions in 16 bits take other memory there; see `activations._workspace`.
AMX = torch.cpu._is_amx_tile_supported()


class Chain(nn.Module):
    """x [n, 100] -> a [n, 1000] -> b [n, 1000] -> [n, 10]; `a` is gone when the last one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(100, 1000, bias=False)
        self.last = nn.Linear(1000, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.first(x)
        b = torch.exp(a)
        del a
        out: torch.Tensor = self.last(b)
        return out


def profiled(pipe: Any) -> dict[str, int]:
    """By component: the most that torch's CPU allocator had handed out since a call began, kernels' own included."""
    peaks: dict[str, int] = {}
    for name, part in components_of(pipe).items():
        running: list[Any] = []

        def before(_: str, running: list[Any] = running) -> None:
            running.append(profile(activities=[ProfilerActivity.CPU], profile_memory=True).__enter__())

        def after(_: str, running: list[Any] = running, name: str = name) -> None:
            one = running.pop()
            one.__exit__(None, None, None)
            events = [e for e in one.profiler.kineto_results.events() if e.name() == "[memory]"]
            live = 0
            for event in sorted(events, key=lambda event: event.start_ns()):
                live += event.nbytes()
                peaks[name] = max(peaks.get(name, 0), live)

        wrap(part, before, after, names=("decode",) if name == "vae" else ("forward",))
    draw(pipe, ["a picture"], seeds=[0], steps=1)
    return peaks


def test_of_a_chain_whose_peak_is_known_by_hand() -> None:
    net = Chain()
    x = torch.zeros(8, 100)
    both = 2 * 8 * 1000 * 4  # a and b, at the exponential
    assert activation_memory.trace_of(net, x).peak == both
    with activation_memory.measured(net) as peaks, torch.no_grad():
        net(x)
    assert peaks == {"model": both}
    assert activation_memory.trace_of(net, x.double().float().repeat(2, 1)).peak == 2 * both
    assert net.first.weight.device.type == "cpu" and net(x).shape == (8, 10)  # its weights are its own again


def test_weights_are_not_needed() -> None:
    with torch.device("meta"):
        net = Chain()
    assert activation_memory.trace_of(net, torch.zeros(8, 100)).peak == 2 * 8 * 1000 * 4
    assert net.first.weight.is_meta


def test_views_and_what_is_changed_in_place_take_nothing() -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(-1)[::2].add_(1).reshape(-1, 2).t()

    assert activation_memory.trace_of(Views(), torch.zeros(64, 4)).peak == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", [1, 3])
def test_what_a_convolution_takes_inside(side: int, dtype: torch.dtype) -> None:
    x, weight = torch.zeros(1, 32, 64, 64, dtype=dtype), torch.zeros(16, 32, side, side, dtype=dtype)

    class Conv(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.conv2d(x, weight, padding=side // 2)

    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        Conv()(x)
    live = most = 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    # Where oneDNN has other kernels (another processor) it may take less, and a little of its own.
    assert most <= 1.02 * activation_memory.trace_of(Conv(), x).peak + (131072 if AMX else 16384)


def test_what_onednn_keeps_of_its_kernels_is_counted_once_for_each_shape() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 32)).bfloat16()
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    of_two, of_one = activation_memory.trace_of(net, x).kernels, activation_memory.trace_of(net[0], x).kernels
    assert of_two == 2 * of_one and (of_one > 0) == (onednn.multiplies(torch.bfloat16) is not False)
    assert activation_memory.trace_of(net.float(), x.float()).kernels == 0  # MKL's
    conv = nn.Conv2d(4, 4, 3)
    assert (
        0
        < activation_memory.trace_of(conv, torch.zeros(1, 4, 9, 9)).kernels
        < activation_memory.trace_of(nn.Sequential(conv, conv), torch.zeros(1, 4, 9, 9)).kernels
    )


def peaks_of(pipe: Any, **size: int) -> dict[str, int | None]:
    """In bytes, by component."""
    return {
        name: None if one is None else one.peak for name, one in activation_memory.of_pipeline(pipe, **size).items()
    }


@pytest.mark.parametrize("model", sdquant.demo.MODELS)
def test_of_the_shipped_models(model: str) -> None:
    """Foretold, followed and profiled are three ways to the same number."""
    pipe = sdquant.load_model(sdquant.demo.path(model), progress=False)
    foretold = peaks_of(pipe)
    with activation_memory.measured(pipe) as followed:
        draw(pipe, ["a picture"], seeds=[0], steps=1)
    assert foretold == followed
    assert next(iter(foretold)).startswith("text_encoder") and list(foretold)[-1] == "vae"  # as they are called
    for name, seen in profiled(pipe).items():
        assert foretold[name] == pytest.approx(seen, rel=0.35 if AMX else 0.05), name
    larger = peaks_of(pipe, width=128, height=64)
    assert larger["vae"] == pytest.approx(8 * foretold["vae"], rel=0.1)  # type: ignore[operator]


def test_a_network_that_looks_at_values_is_not_told() -> None:
    pipe = sdquant.load_model(sdquant.demo.path("digits-sd"), progress=False)
    original = pipe.unet.forward

    def forward(sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(sample if float(sample.sum()) > 0 else -sample, *args, **kwargs)

    pipe.unet.forward = forward
    assert set(activation_memory.of_pipeline(pipe).values()) == {None}
    del pipe.unet.forward
    assert None not in activation_memory.of_pipeline(pipe).values()


def test_of_a_component_alone() -> None:
    """A UNet that wants what others do not is not told, and neither is a class that is no UNet or transformer."""
    sizes: dict[str, Any] = {
        "block_out_channels": (32, 32), "layers_per_block": 1, "cross_attention_dim": 8, "norm_num_groups": 8,
        "down_block_types": ("DownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "UpBlock2D"),
    }  # fmt: skip
    with torch.device("meta"):
        usual, labelled = UNet2DConditionModel(**sizes), UNet2DConditionModel(**sizes, class_embed_type="timestep")
    found = activation_memory.of_component(usual, width=64, height=32)
    assert found is not None and found.peak > 2 * 32 * 8 * 4 * 4  # two images of 32 channels at least
    assert activation_memory.of_component(labelled) is None
    assert activation_memory.of_component(nn.Linear(2, 2)) is None
    with pytest.raises(SettingsError, match="multiples of 8 pixels"):
        activation_memory.of_component(usual, width=30)
