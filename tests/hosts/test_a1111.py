"""Loads in A1111, a real network through its stand-in: the first one, and those into the model that is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sdquant.hosts import load

from .conftest import Running

Start = Callable[[str], Running]


@pytest.fixture
def checkpoint(sd: Path) -> Callable[[str, float], SimpleNamespace]:
    """checkpoint(name, factor): the shipped UNet as a checkpoint of A1111, its weights times `factor`."""
    from diffusers import UNet2DConditionModel

    def make(name: str, factor: float) -> SimpleNamespace:
        unet = UNet2DConditionModel.from_pretrained(sd, subfolder="unet")
        state = {f"model.diffusion_model.{key}": value * factor for key, value in unet.state_dict().items()}

        def network() -> Any:
            return UNet2DConditionModel.from_config(unet.config)

        return SimpleNamespace(filename=f"/models/{name}.safetensors", state_dict=state, network=network)

    return make


def _unet(model: Any) -> Any:
    return model.model.diffusion_model


def _weight(model: Any) -> torch.Tensor:
    layer = _unet(model).mid_block.attentions[0].proj_in
    return layer.dequantize() if hasattr(layer, "dequantize") else layer.weight


def test_the_unet_is_quantized_and_loaded_into_again(host: Start, checkpoint: Any) -> None:
    running = host("a1111")
    running.start({"sdquant_quant_model": "int8"})
    models = running.modules.sd_models
    model = models.load_model(checkpoint("one", 1.0))
    assert running.shown == []
    assert load.schemes_in(_unet(model)) == {"int8"}
    first = _weight(model)
    again = models.reload_model_weights(model, checkpoint("two", 2.0))
    assert again is model
    assert load.schemes_in(_unet(model)) == {"int8"}
    assert torch.allclose(_weight(model), 2 * first, rtol=1e-4)
    assert running.status["model"] == "two.safetensors"
    running.modules.shared.opts.set("sdquant_quant_model", "as found")
    models.reload_model_weights(model, checkpoint("three", 3.0))
    assert load.schemes_in(_unet(model)) == set()
    assert running.status["components"][0]["how"] == "as found"


@pytest.mark.parametrize("flag", ["lowvram", "medvram"])
def test_with_lowvram_it_is_refused_before_the_load(host: Start, checkpoint: Any, flag: str) -> None:
    running = host("a1111")
    running.start({"sdquant_quant_model": "int8"})
    setattr(running.modules.shared.cmd_opts, flag, True)
    info = checkpoint("one", 1.0)
    info.state_dict = None  # which could not be loaded
    assert running.modules.sd_models.load_model(info) is None
    (shown,) = running.shown
    assert "--lowvram, --medvram" in shown
    assert "--lowvram, --medvram" in running.status["error"]


def test_a_refused_load_leaves_the_model_as_it_was(host: Start, checkpoint: Any) -> None:
    from sdquant import UnknownQuantError

    running = host("a1111")
    running.start({"sdquant_quant_model": "int8"})
    models = running.modules.sd_models
    model = models.load_model(checkpoint("one", 1.0))
    before = _weight(model)
    running.modules.shared.opts.data["sdquant_quant_model"] = "int9"  # stored by another version
    with pytest.raises(UnknownQuantError):
        models.reload_model_weights(model, checkpoint("two", 2.0))
    assert models.model_data.sd_model is model
    assert torch.equal(_weight(model), before)
    assert load.schemes_in(_unet(model)) == {"int8"}


def test_a_load_that_fails_leaves_no_model(host: Start, checkpoint: Any) -> None:
    running = host("a1111")
    running.start({"sdquant_quant_model": "int8", "sdquant_skip": "*"})
    models = running.modules.sd_models
    assert models.load_model(checkpoint("one", 1.0)) is None
    assert models.model_data.sd_model is None
    assert "no weight that would be quantized" in running.status["error"]
