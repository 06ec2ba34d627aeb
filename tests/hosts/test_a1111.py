"""Loads in A1111, a real network through its stand-in: the first one, and those into the model that is there."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sdquant import IncompatibleError
from sdquant.hosts import load_hooks

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

        filename = f"/models/{name}.safetensors"
        made = SimpleNamespace(title=name, filename=filename, state_dict=state, network=network)
        importlib.import_module("modules.sd_models").checkpoints_list[name] = made
        return made

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
    assert load_hooks.schemes_in(_unet(model)) == {"int8"}
    first = _weight(model)
    again = models.reload_model_weights(info=checkpoint("two", 2.0))
    assert again is model
    assert load_hooks.schemes_in(_unet(model)) == {"int8"}
    assert torch.allclose(_weight(model), 2 * first, rtol=1e-4)
    assert running.status["model"] == "two.safetensors"
    running.modules.shared.opts.set("sdquant_quant_model", "as found")
    models.reload_model_weights(info=checkpoint("three", 3.0))
    assert load_hooks.schemes_in(_unet(model)) == set()
    assert running.status["components"][0]["how"] == "as found"


@pytest.mark.parametrize("flag", ["lowvram", "medvram"])
def test_with_lowvram_it_is_refused_before_the_load(host: Start, checkpoint: Any, flag: str) -> None:
    running = host("a1111")
    running.start({"sdquant_quant_model": "int8"})
    setattr(running.modules.shared.cmd_opts, flag, True)
    info = checkpoint("one", 1.0)
    info.state_dict = None  # which could not be loaded
    running.modules.shared.opts.data["sd_model_checkpoint"] = "one"
    assert running.modules.sd_models.model_data.get_sd_model() is None
    (shown,) = running.shown
    assert "--lowvram, --medvram" in shown
    assert "--lowvram, --medvram" in running.status["error"]


def test_a_changed_setting_takes_effect_with_the_next_image(host: Start, checkpoint: Any) -> None:
    """Before each image A1111 calls `reload_model_weights()`, and keeps the model if it is of the file that is set."""
    running = host("a1111")
    running.start()
    models, opts = running.modules.sd_models, running.modules.shared.opts
    model = models.load_model(checkpoint("one", 1.0))
    exact = _weight(model).clone()
    for scheme in ("int8", "nf4"):
        opts.set("sdquant_quant_model", scheme)
        assert models.reload_model_weights() is model
        assert load_hooks.schemes_in(_unet(model)) == {scheme}
    layer = _unet(model).mid_block.attentions[0].proj_in
    models.reload_model_weights()  # and not again
    assert _unet(model).mid_block.attentions[0].proj_in is layer
    opts.set("sdquant_skip", "mid_block")
    models.reload_model_weights()
    assert torch.equal(_weight(model), exact) and load_hooks.schemes_in(_unet(model)) == {"nf4"}
    opts.set("sdquant_quant_model", "as found")
    models.reload_model_weights()
    assert load_hooks.schemes_in(_unet(model)) == set()


def test_models_that_are_kept_follow_the_settings_too(host: Start, checkpoint: Any) -> None:
    running = host("a1111")
    running.start({"sdquant_quant_model": "int8"})
    models, opts = running.modules.sd_models, running.modules.shared.opts
    opts.data["sd_checkpoints_limit"] = 2
    one, two = checkpoint("one", 1.0), checkpoint("two", 2.0)
    first = models.load_model(one)
    models.reload_model_weights(info=two)
    assert models.reload_model_weights(info=one) is first
    assert running.status["model"] == "one.safetensors" and running.status["components"][0]["scheme"] == "int8"
    opts.set("sdquant_quant_model", "nf4")
    second = models.reload_model_weights(info=two)
    assert load_hooks.schemes_in(_unet(second)) == {"nf4"} and load_hooks.schemes_in(_unet(first)) == {"int8"}
    opts.set("sdquant_skip", "*")
    with pytest.raises(IncompatibleError, match="no weight that would be quantized"):
        models.reload_model_weights()
    assert models.model_data.sd_model is None and second not in models.model_data.loaded_sd_models
    opts.set("sdquant_skip", "")
    assert load_hooks.schemes_in(_unet(models.reload_model_weights(info=two))) == {"nf4"}


def test_with_its_own_float8_it_is_refused_and_told_until_it_is_put_right(host: Start, checkpoint: Any) -> None:
    running = host("a1111")
    running.start()
    models, opts = running.modules.sd_models, running.modules.shared.opts
    model = models.load_model(checkpoint("one", 1.0))
    before = _weight(model).clone()
    opts.data["fp8_storage"] = "Enable"
    opts.set("sdquant_quant_model", "int8")
    with pytest.raises(IncompatibleError, match="FP8 weight"):
        models.reload_model_weights()
    assert torch.equal(_weight(model), before) and models.model_data.sd_model is model
    assert "FP8 weight" in running.status["error"]
    opts.set("sdquant_quant_model", "as found")
    models.reload_model_weights()
    assert running.status["error"] is None and running.status["components"][0]["how"] == "as found"


def test_a_refused_load_leaves_the_model_as_it_was(host: Start, checkpoint: Any) -> None:
    from sdquant import UnknownQuantError

    running = host("a1111")
    running.start({"sdquant_quant_model": "int8"})
    models = running.modules.sd_models
    model = models.load_model(checkpoint("one", 1.0))
    before = _weight(model)
    running.modules.shared.opts.data["sdquant_quant_model"] = "int9"  # stored by another version
    with pytest.raises(UnknownQuantError):
        models.reload_model_weights(info=checkpoint("two", 2.0))
    assert models.model_data.sd_model is model
    assert torch.equal(_weight(model), before)
    assert load_hooks.schemes_in(_unet(model)) == {"int8"}


def test_a_load_that_fails_leaves_no_model(host: Start, checkpoint: Any) -> None:
    running = host("a1111")
    running.start({"sdquant_quant_model": "int8", "sdquant_skip": "*"})
    models = running.modules.sd_models
    checkpoint("one", 1.0)
    running.modules.shared.opts.data["sd_model_checkpoint"] = "one"
    assert models.model_data.get_sd_model() is None
    assert models.model_data.loaded_sd_models == []
    assert "no weight that would be quantized" in running.status["error"]


def test_an_error_that_is_not_ours_leaves_no_float_model(
    host: Start, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    running = host("a1111")
    running.start({"sdquant_quant_model": "int8"})
    models = running.modules.sd_models
    checkpoint("one", 1.0)
    running.modules.shared.opts.data["sd_model_checkpoint"] = "one"
    monkeypatch.setattr("sdquant.loading.quantize", fail)
    with contextlib.suppress(RuntimeError):
        models.model_data.get_sd_model()
    assert models.model_data.sd_model is None and models.model_data.loaded_sd_models == []


def test_extensions_read_float_weights_and_save_those_that_the_model_draws_with(
    host: Start, checkpoint: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As sd-webui-controlnet (1.1.455, 56cec5b2) adds differences, and supermerger (0b1c491) saves the loaded model."""
    from safetensors.torch import load_file, save_file

    running = host("a1111")
    running.start()
    models = running.modules.sd_models
    model = models.load_model(checkpoint("one", 1.0))
    names = set(model.state_dict())
    for scheme in ("nf4", "int8", "nf4"):  # into the UNet that is there
        running.modules.shared.opts.set("sdquant_quant_model", scheme)
        models.reload_model_weights()
    unet, path = _unet(model), "mid_block.attentions.0.proj_in"
    decoded = _weight(model)
    of_unet = unet.state_dict()
    assert set(model.state_dict()) == names and {f"model.diffusion_model.{key}" for key in of_unet} == names
    caplog.clear()
    difference = torch.ones_like(decoded)
    assert torch.equal(difference + unet.state_dict()[f"{path}.weight"].clone().cpu(), 1 + decoded)
    assert not caplog.records  # that reads single weights
    save_file({key: one.contiguous() for key, one in model.state_dict().items()}, tmp_path / "saved.safetensors")
    assert "values of its quantized ones (nf4)" in caplog.text
    found = load_file(tmp_path / "saved.safetensors")
    assert torch.equal(found[f"model.diffusion_model.{path}.weight"], decoded)
    again = checkpoint("again", 1.0)
    again.state_dict = found
    running.modules.shared.opts.set("sdquant_quant_model", "as found")
    models.reload_model_weights(info=again)
    assert torch.equal(_weight(model), decoded) and set(model.state_dict()) == names
