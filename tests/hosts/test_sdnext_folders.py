"""Folders that sdquant saved, in SD.Next's stand-in: bitsandbytes' formats without a GPU, and Flux's T5."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import sdquant
from sdquant.hosts import load_hooks

from .conftest import Running

if TYPE_CHECKING:
    from ..conftest import Saved

pytestmark = pytest.mark.filterwarnings("ignore:`torch_dtype` is deprecated:FutureWarning")
Start = Callable[[str], Running]


@pytest.mark.parametrize("scheme", ["nf4", "bnb-int8"])
def test_bitsandbytes_formats_load_without_a_gpu(host: Start, saved: Saved, scheme: str) -> None:
    """diffusers' own quantizer refuses them there: "No GPU found"."""
    running = host("sdnext")
    running.start()
    folder = saved(scheme)
    info = SimpleNamespace(path=str(folder), filename=str(folder), whole=True)
    pipe = running.modules.sd_models.reload_model_weights(info=info)
    assert running.shown == []
    assert load_hooks.schemes_in(pipe.unet) == {scheme}
    expected = sdquant.load_model(folder, progress=False).unet.state_dict()
    found = pipe.unet.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key].to(found[key].dtype)) for key in expected)


def test_what_sdquant_did_not_save_is_refused_as_before_it(host: Start, saved: Saved, tmp_path: Path) -> None:
    from diffusers import BitsAndBytesConfig, UNet2DConditionModel
    from diffusers.quantizers.auto import AUTO_QUANTIZER_MAPPING as TABLE

    before = dict(TABLE)
    running = host("sdnext")
    running.start()
    with pytest.raises(RuntimeError, match="No GPU found"):  # a float model, which is to be quantized by bitsandbytes
        UNet2DConditionModel.from_pretrained(
            sdquant.demo.path("digits-sd"),
            subfolder="unet",
            quantization_config=BitsAndBytesConfig(load_in_4bit=True),
        )
    assert before != TABLE
    running.modules.script_callbacks.script_unloaded_callback()
    assert before == TABLE


@pytest.mark.parametrize("shared", [True, False])
def test_a_quantized_t5_of_the_folder_is_used(host: Start, saved: Saved, tmp_path: Path, shared: bool) -> None:
    from transformers import T5EncoderModel

    running = host("sdnext")
    running.start({"sdquant_quant_text_encoder": "int8"})  # which is for what is not quantized yet
    running.modules.shared.opts.set("te_shared_te", shared)
    from pipelines import generic

    folder = tmp_path / "model"
    shutil.copytree(saved("nf4", "digits-flux"), folder)
    generic.SHARED["T5EncoderModel"] = folder / "elsewhere"
    t5 = generic.load_text_encoder(str(folder), T5EncoderModel, load_config={})
    assert load_hooks.schemes_in(t5) == {"nf4"} or _is_bitsandbytes(t5)
    config = folder / "text_encoder_2" / "config.json"
    floats = {key: value for key, value in json.loads(config.read_text()).items() if key != "quantization_config"}
    config.write_text(json.dumps(floats))
    if shared:
        with pytest.raises(OSError, match="elsewhere"):  # floats are SD.Next's
            generic.load_text_encoder(str(folder), T5EncoderModel, load_config={})


def _is_bitsandbytes(model: Any) -> bool:
    return any(type(module).__name__ == "Linear4bit" for module in model.modules())
