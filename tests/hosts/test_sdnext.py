"""Loads in SD.Next, real models through its stand-in: while loading and after it, and what is refused before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from sdquant.hosts import load_hooks
from sdquant.nn.weights import quantized

from .conftest import Running

if TYPE_CHECKING:
    from ..conftest import Saved

# What SD.Next's loaders say, and what newer versions of diffusers say about it.
pytestmark = pytest.mark.filterwarnings("ignore:`torch_dtype` is deprecated:FutureWarning")

Start = Callable[[str], Running]


def _info(path: Path, whole: Any) -> SimpleNamespace:
    return SimpleNamespace(path=str(path), filename=str(path), whole=whole)


def _schemes(pipe: Any) -> dict[str, set[str]]:
    return {name: load_hooks.schemes_in(getattr(pipe, name)) for name in ("unet", "text_encoder", "vae")}


def _how(running: Running) -> dict[str, str]:
    return {row["component"]: row["how"] for row in running.status["components"]}


def _image(pipe: Any) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    out = pipe("seven", num_inference_steps=2, output_type="pt", generator=torch.Generator().manual_seed(1))
    return out.images[0]


@pytest.mark.parametrize("whole", [False, True])
def test_a_model_is_quantized_while_it_loads_or_after(host: Start, sd: Path, whole: bool) -> None:
    running = host("sdnext")
    running.start({"sdquant_quant_model": "int8", "sdquant_quant_text_encoder": "int8_sym", "sdquant_skip": "conv_out"})
    pipe = running.modules.sd_models.reload_model_weights(info=_info(sd, whole))
    assert running.shown == []
    assert _schemes(pipe) == {"unet": {"int8"}, "text_encoder": {"int8_sym"}, "vae": set()}
    way = "after loading" if whole else "while loading"
    assert _how(running) == {"unet": way, "text_encoder": way, "vae": "as found"}
    names = {name for name, _ in quantized(pipe.unet)}
    assert "conv_out.weight" not in names
    assert ("conv_in.weight" in names) == whole  # SD.Next's loader says what is not to be converted
    assert _image(pipe).isfinite().all()
    assert running.modules.shared.state.textinfo is None


def test_what_the_loader_does_not_quantize_is_quantized_after_it(host: Start, sd: Path) -> None:
    running = host("sdnext")
    running.start({"sdquant_quant_model": "int8", "sdquant_quant_vae": "int8", "sdquant_mode": "pre"})
    pipe = running.modules.sd_models.reload_model_weights(info=_info(sd, False))
    assert running.shown == []
    assert _how(running) == {"unet": "while loading", "text_encoder": "as found", "vae": "after loading"}
    assert _schemes(pipe)["vae"] == {"int8"}


def test_nothing_is_touched_where_nothing_is_asked(host: Start, sd: Path) -> None:
    running = host("sdnext")
    running.start()
    pipe = running.modules.sd_models.reload_model_weights(info=_info(sd, False))
    assert _schemes(pipe) == {"unet": set(), "text_encoder": set(), "vae": set()}
    assert set(_how(running).values()) == {"as found"}


def test_the_librarys_modules_are_made_after_the_load(host: Start, sd: Path) -> None:
    from optimum.quanto import QLinear

    running = host("sdnext")
    running.start({"sdquant_quant_model": "qint8", "sdquant_runtime": "library"})
    pipe = running.modules.sd_models.reload_model_weights(info=_info(sd, False))
    assert running.shown == []
    assert any(isinstance(module, QLinear) for module in pipe.unet.modules())
    assert _how(running)["unet"] == "after loading"


@pytest.mark.parametrize(
    ("settings", "opts", "words"),
    [
        (
            {"sdquant_quant_model": "qint8", "sdquant_runtime": "library"},
            {"diffusers_offload_mode": "balanced"},
            "QBytesTensor.new() missing 5 required positional arguments",
        ),
        ({"sdquant_quant_model": "int8"}, {"sdnq_quantize_weights": ["Model"]}, "which uses SDNQ"),
        ({"sdquant_quant_model": "qint8", "sdquant_runtime": "library", "sdquant_mode": "pre"}, {}, "plain layers"),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_what_cannot_be_is_refused_before_the_load(
    host: Start, tmp_path: Path, settings: dict[str, Any], opts: dict[str, Any], words: str, whole: bool
) -> None:
    running = host("sdnext")
    running.start(settings)
    for name, value in opts.items():
        running.modules.shared.opts.set(name, value)
    assert running.modules.sd_models.reload_model_weights(info=_info(tmp_path / "not-there", whole)) is None
    (shown,) = running.shown  # and not that the folder is not there
    assert words in shown
    assert words in running.status["error"]


@pytest.mark.parametrize("force", [False, True])
def test_what_is_refused_leaves_the_model_that_is_there(host: Start, sd: Path, tmp_path: Path, force: bool) -> None:
    """SD.Next unloads it before it loads another."""
    running = host("sdnext")
    running.start({"sdquant_quant_model": "int8"})
    models = running.modules.sd_models
    there = models.reload_model_weights(info=_info(sd, True))
    parts = running.status["components"]
    running.modules.shared.opts.set("sdnq_quantize_weights", ["Model"])
    again = _info(sd if force else tmp_path / "other", True)
    with pytest.raises(running.modules.errors.ValidationError, match="which uses SDNQ"):
        models.reload_model_weights(info=again, force=force)
    assert models.model_data.sd_model is there
    assert "which uses SDNQ" in running.status["error"]
    assert running.status["components"] == parts
    assert models.reload_model_weights(info=_info(sd, True)) is None  # which it has: nothing is refused
    assert models.reload_model_weights() is None  # no model is chosen: it is unloaded, whatever the settings
    assert models.model_data.sd_model is None


def test_a_load_that_fails_leaves_no_model_that_is_not_what_was_asked_for(host: Start, sd: Path) -> None:
    running = host("sdnext")
    running.start({"sdquant_quant_model": "int8", "sdquant_skip": "*"})
    assert running.modules.sd_models.reload_model_weights(info=_info(sd, True)) is None
    assert "no weight that would be quantized" in running.shown[-1]
    assert "no weight that would be quantized" in running.status["error"]
    assert running.status["components"] == []


def test_loaders_that_load_no_whole_model_ask_too(host: Start, sd: Path) -> None:
    """SD.Next's video models: they call these two themselves."""
    from sdquant import IncompatibleError

    running = host("sdnext")
    running.start({"sdquant_quant_model": "qint8", "sdquant_quant_text_encoder": "int8"})
    from modules import model_quant

    args, quant = model_quant.get_dit_args({"low_cpu_mem_usage": True}, module="TE", device_map=True)
    assert args["device_map"] == "cpu"
    assert quant["quantization_config"].to_dict() == {"quant_method": "sdquant", "quant": "int8", "skip": []}
    assert model_quant.create_config(module="LLM") == {}
    assert model_quant.create_config(module="any") == {}
    assert model_quant.create_config({"a": 1}, allow=False) == {"a": 1}
    for name, value in {"sdquant_quant_text_encoder": "as found", "sdquant_runtime": "library"}.items():
        running.modules.shared.opts.set(name, value)
    running.modules.shared.opts.set("diffusers_offload_mode", "balanced")
    assert model_quant.create_config(module="Model") == {}
    with pytest.raises(IncompatibleError, match="QBytesTensor"):
        model_quant.do_post_load_quant(torch.nn.Linear(2, 2), allow=False)


def test_types_of_models_that_are_not_to_be_quantized_are_not(host: Start, sd: Path) -> None:
    running = host("sdnext")
    running.start({"sdquant_quant_model": "int8"})
    running.modules.shared.opts.set("models_not_to_quant", "sdxl, sd")
    pipe = running.modules.sd_models.reload_model_weights(info=_info(sd, True))
    assert _schemes(pipe)["unet"] == set()
    assert running.shown == []


def test_what_sdquant_saved_loads_in_sdnext(host: Start, saved: Saved) -> None:
    """SD.Next takes its folder for one of SDNQ's."""
    running = host("sdnext")
    running.start()
    pipe = running.modules.sd_models.reload_model_weights(info=_info(saved("int8"), "sdnq"))
    assert running.shown == []
    assert _schemes(pipe)["unet"] == {"int8"}
    assert "quantized already: int8 (nncf)" in running.status["found"]
    assert _how(running)["unet"] == "as found"


def test_sdnexts_sequential_offload_moves_quantized_layers(host: Start, sd: Path) -> None:
    running = host("sdnext")
    running.start({"sdquant_quant_model": "nf4"})
    stays = _image(running.modules.sd_models.reload_model_weights(info=_info(sd, False)))
    running.modules.shared.opts.set("diffusers_offload_mode", "sequential")
    pipe = running.modules.sd_models.reload_model_weights(info=_info(sd, False), force=True)
    assert running.shown == []
    assert all(parameter.device.type == "meta" for parameter in pipe.unet.parameters())
    assert torch.equal(_image(pipe), stays)


def test_no_quantized_layer_is_taken_apart_by_balanced_offload(host: Start, sd: Path) -> None:
    from accelerate import infer_auto_device_map

    running = host("sdnext")
    running.start({"sdquant_quant_model": "nf4"})
    pipe = running.modules.sd_models.reload_model_weights(info=_info(sd, False))
    from modules.sd_offload import no_split_module_classes

    layers = {name.rpartition(".")[0] for name, _ in quantized(pipe.unet)}
    limits = {0: load_hooks.part_of("unet", pipe.unet, "").bytes // 2, "cpu": 10**9}
    split = infer_auto_device_map(pipe.unet, max_memory=limits, no_split_module_classes=no_split_module_classes)
    assert len(set(split.values())) == 2
    assert not [name for name in split if name.rpartition(".")[0] in layers]
