"""Loads in Forge, real networks through its stand-in: quantized before its mover sees them, and moved by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sdquant.hosts import load_hooks
from sdquant.hosts.forge_layers import SwappedConv2d, SwappedLinear

from .conftest import Running

Start = Callable[[str], Running]
OURS = (SwappedLinear, SwappedConv2d)


def _reload(running: Running, sd: Path, **parameters: Any) -> Any:
    models = running.modules.sd_models
    models.model_data.forge_loading_parameters = {"checkpoint_info": str(sd), **parameters}
    return models.forge_model_reload()[0]


def _run(unet: torch.nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    sample, states = torch.randn(1, 4, 8, 8), torch.randn(1, 16, unet.config.cross_attention_dim)
    with torch.no_grad():
        return unet(sample, 5, encoder_hidden_states=states).sample


def test_the_unet_and_the_text_encoders_are_quantized_before_the_mover_sees_them(host: Start, sd: Path) -> None:
    running = host("forge")
    running.start()
    floats = _reload(running, sd)
    whole = floats.forge_objects.unet.size
    expected = _run(floats.forge_objects.unet.model.diffusion_model)
    running.modules.shared.opts.set("sdquant_quant_model", "int8")
    running.modules.shared.opts.set("sdquant_quant_text_encoder", "nf4")
    engine = _reload(running, sd)  # a setting was changed: Forge loads again
    assert engine is not floats
    unet = engine.forge_objects.unet
    assert load_hooks.schemes_in(unet.model.diffusion_model) == {"int8"}
    assert load_hooks.schemes_in(engine.forge_objects.clip.cond_stage_model) == {"nf4"}
    assert unet.size < 0.7 * whole
    made = _run(unet.model.diffusion_model)
    assert 0 < (made - expected).abs().mean() < 0.1 * expected.abs().mean()
    assert {row["component"]: row["how"] for row in running.status["components"]} == {
        "unet": "after loading",
        "text_encoder": "after loading",
    }
    assert running.shown == []


def test_layers_say_to_the_mover_what_forges_do(host: Start, sd: Path) -> None:
    running = host("forge")
    running.start({"sdquant_quant_model": "nf4", "sdquant_skip": "conv_out"})
    unet = _reload(running, sd).forge_objects.unet.model.diffusion_model
    layers = [module for module in unet.modules() if isinstance(module, OURS)]
    assert {type(layer) for layer in layers} == {SwappedLinear, SwappedConv2d}
    assert all(layer.parameters_manual_cast is False for layer in layers)
    assert type(unet.conv_out).__name__ == "Conv2d"
    from backend.memory_management import module_size

    assert all(module_size(layer) == sum(p.nbytes for p in layer.parameters()) for layer in layers)


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_forges_swap_leaves_what_does_not_fit(host: Start, sd: Path, share: float) -> None:
    """With one device, so that what is seen is that nothing in the mover's path breaks; see also the GPU test."""
    running = host("forge")
    running.start({"sdquant_quant_model": "nf4"})
    unet = _reload(running, sd).forge_objects.unet.model.diffusion_model
    before = _run(unet)
    from backend.memory_management import model_load, module_size

    cpu = torch.device("cpu")
    _, halves, stays = model_load(unet, cpu, cpu, share * module_size(unet))
    assert any(isinstance(module, OURS) for module in stays)
    assert not any(isinstance(module, OURS) for module in halves)  # which it splits by their `weight`
    assert torch.equal(_run(unet), before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("share", [0.3, 0.8, 2.0])
@pytest.mark.parametrize("scheme", ["nf4", "int8", "qint4"])
def test_forges_swap_on_a_gpu(host: Start, sd: Path, scheme: str, share: float) -> None:
    pytest.importorskip("gradio", reason="the extension's settings are gradio's")
    running = host("forge")
    running.start({"sdquant_quant_model": scheme})
    unet = _reload(running, sd).forge_objects.unet.model.diffusion_model
    before = _run(unet)
    from backend.memory_management import model_load, module_size

    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    _, _, stays = model_load(unet, gpu, cpu, share * module_size(unet), pin=True)
    assert any(isinstance(module, OURS) for module in stays) == (share < 1)
    assert {p.device.type for m in unet.modules() if isinstance(m, OURS) for p in m.parameters()} == (
        {"cpu", "cuda"} if share < 1 else {"cuda"}
    )
    torch.manual_seed(1)
    sample, states = torch.randn(1, 4, 8, 8), torch.randn(1, 16, unet.config.cross_attention_dim)
    with torch.no_grad():
        made = unet(sample.to(gpu), 5, encoder_hidden_states=states.to(gpu)).sample.cpu()
    assert torch.allclose(made, before, atol=2e-2 * before.abs().max().item())


@pytest.mark.parametrize(
    ("settings", "parameters", "words"),
    [
        ({"sdquant_quant_model": "int8"}, {"unet_storage_dtype": torch.float8_e4m3fn}, "'Diffusion in Low Bits'"),
    ],
)
def test_what_cannot_be_is_refused_before_the_load(
    host: Start, tmp_path: Path, settings: dict[str, Any], parameters: dict[str, Any], words: str
) -> None:
    from sdquant import SdquantError

    running = host("forge")
    running.start(settings)
    with pytest.raises(SdquantError, match=words):
        _reload(running, tmp_path / "not-there", **parameters)
    assert running.modules.sd_models.model_data.sd_model is None
    assert words in running.status["error"]


def test_a_load_that_fails_leaves_no_model(host: Start, sd: Path) -> None:
    from sdquant import IncompatibleError

    running = host("forge")
    running.start({"sdquant_quant_model": "int8", "sdquant_skip": "*"})
    with pytest.raises(IncompatibleError, match="no weight that would be quantized"):
        _reload(running, sd)
    assert running.modules.sd_models.model_data.sd_model is None
