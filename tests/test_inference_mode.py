"""What is made while a model runs in torch's inference mode is used outside of it, too: buffers, and weights that were
fetched. Tensors of inference mode cannot be written to outside, nor kept for a gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import nn

import sdquant
from sdquant import backends, demo
from sdquant.kernels import workspace
from sdquant.models.generate import draw
from sdquant.nn import quantized_layer

SD = demo.path("digits-sd")


@pytest.mark.parametrize(("scheme", "compute"), [("f32", None), ("q4_k", None), ("nf4", None), ("int8", "int8")])
@pytest.mark.parametrize("rows", [1, 80])
def test_a_layer(scheme: str, compute: str | None, rows: int) -> None:
    floats = nn.Linear(256, 64, dtype=torch.bfloat16).requires_grad_(False)
    packed = backends.of_scheme(scheme).encode(floats.weight, backends.parse(scheme))
    layer = quantized_layer(floats, packed, compute=compute)
    x = torch.randn(rows, 256).bfloat16()
    workspace.release()
    with torch.inference_mode():
        inside = layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x), inside)
    x.requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None


def test_the_buffer_is_no_tensor_of_inference_mode() -> None:
    workspace.release()
    with torch.inference_mode():
        buffer = workspace.scratch((4,), torch.int8, torch.device("cpu"))
    assert not buffer.is_inference() and not buffer.requires_grad
    buffer.zero_()


@pytest.mark.parametrize("mode", ["model", "balanced", "sequential", "group"])
def test_offloaded_weights(mode: str) -> None:
    path = sdquant.demo.path("digits-sd") / "unet"
    size = int(0.6 * sdquant.plan(path, "int8").bytes) if mode == "balanced" else None
    unet: Any = sdquant.load_model(path, "int8", mode, budget=size, progress=False, device="cpu")
    torch.manual_seed(0)
    x = torch.randn(1, unet.config.in_channels, 8, 8).bfloat16()
    text = torch.randn(1, 77, unet.config.cross_attention_dim).bfloat16()

    def step(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = unet(x, torch.tensor(1.0), text).sample
        return made

    with torch.inference_mode():
        inside = step(x)
    with torch.no_grad():
        assert torch.equal(step(x), inside)
    if mode == "model":
        assert not any(one.is_inference() for one in (*unet.parameters(), *unet.buffers()))
    unet.sdquant.offload.remove()
    x.requires_grad_()
    step(x).float().sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    ("quant", "runtime", "offload"),
    [
        ("int8", "plain", "none"),
        ("int8", "plain", "model"),
        ("sdnq-uint3", "plain", "sequential"),
        ("nf4", "plain", "balanced"),
        ("nf4", "library", "balanced"),
        ("qint8", "library", "model"),
    ],
)
def test_a_model_that_was_loaded_there(quant: str, runtime: str, offload: str, tmp_path: Path) -> None:
    """Programs load models inside of that mode, and use them in it and outside of it."""
    with torch.inference_mode():
        budget = "2MB" if offload == "balanced" else None
        pipe = sdquant.load_model(SD, quant, offload, runtime=runtime, budget=budget, progress=False)
        inside = draw(pipe, ["a two"], seeds=[1], steps=1)[0].tobytes()
    assert draw(pipe, ["a two"], seeds=[1], steps=1)[0].tobytes() == inside
    with torch.inference_mode():
        pipe.save_pretrained(tmp_path / "theirs")
        sdquant.save(pipe, tmp_path / "ours")
        pipe.sdquant.offload.remove()
    for part in (pipe.unet, pipe.text_encoder, pipe.vae):
        assert not any(t.is_inference() for t in (*part.parameters(), *part.buffers()))
    x = torch.randn(1, 4, 8, 8).bfloat16().requires_grad_()
    pipe.unet(x, 1, torch.randn(1, 8, pipe.unet.config.cross_attention_dim).bfloat16()).sample.sum().backward()
    assert x.grad is not None


def test_a_model_that_was_quantized_there() -> None:
    model = UNet2DConditionModel.from_pretrained(SD / "unet")
    with torch.inference_mode():
        sdquant.quantize(model, "int4", progress=False)
    assert not any(t.is_inference() for t in (*model.parameters(), *model.buffers()))
