"""LoRAs in Forge Neo and reForge on quantized layers, by stand-ins; tools/hosts/ runs the real ones."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sdquant.errors import ConflictError
from sdquant.hosts import load_hooks
from sdquant.hosts.forge_layers import SwappedLayer

from .conftest import Running
from .lora_weights import cosine, layers, matrices, run

pytestmark = pytest.mark.filterwarnings("ignore:`torch_dtype` is deprecated:FutureWarning")

Start = Callable[[str], Running]
INT8 = {"sdquant_quant_model": "int8", "sdquant_quant_text_encoder": "int8"}
HOSTS = ("neo", "reforge")
WHOLE = 1 << 60  # bytes that may be on the device


class Host:
    """A web UI with a model that it has loaded, and its LoRAs."""

    def __init__(self, host: Start, sd: Path, name: str = "neo") -> None:
        self.running, self.sd, self.name = host(name), sd, name
        self.running.start()
        lora = importlib.import_module("backend.patcher.lora" if name == "neo" else "ldm_patched.modules.lora")
        self.read = lora.load_lora
        self.keys = {"lora_unet_": lora.model_lora_keys_unet, "lora_te_": lora.model_lora_keys_clip}

    def load(self, **options: Any) -> None:
        """Load the model with options of the web UI."""
        for name, value in options.items():
            self.running.modules.shared.opts.set(name, value)
        models = self.running.modules.sd_models
        if self.name == "neo":
            models.model_data.forge_loading_parameters = {"checkpoint_info": str(self.sd)}
            self.engine = models.forge_model_reload()[0]
        else:
            self.engine = models.reload_model_weights(info=SimpleNamespace(filename=str(self.sd)))
        assert self.running.shown == []
        objects = self.engine.forge_objects
        self.unet, self.encoder = objects.unet.model.diffusion_model, objects.clip.cond_stage_model["clip_l"]
        self.patchers = {"lora_unet_": objects.unet, "lora_te_": objects.clip.patcher}

    def lora(self, seed: int = 0, **more: Any) -> dict[str, torch.Tensor]:
        """A LoRA's file for the UNet and the text encoder. more: other tensors of each layer, made from it."""
        return {
            f"{prefix}{path.replace('.', '_')}.{leaf}": value
            for prefix, part in (("lora_unet_", self.unet), ("lora_te_", self.encoder))
            for path, layer in layers(part)
            for leaf, value in (
                matrices(layer, seed=seed) | {name.replace("__", "."): make(layer) for name, make in more.items()}
            ).items()
        }

    def change_to(self, *loras: tuple[dict[str, torch.Tensor], float], memory: int = WHOLE) -> None:
        """What the web UI does with a prompt's LoRAs: patchers of their own, loaded in the place of those before."""
        self.changed = []
        for prefix, original in self.patchers.items():
            patcher = original.clone()
            for file, strength in loras:
                read = self.read(file, self.keys[prefix](patcher.model))
                patches = read[0] if self.name == "neo" else read
                found = patcher.add_patches(patches, strength)
                assert set(found) >= {key for key in patches if key.endswith(".weight")} != set()
            patcher.partially_load("cpu", memory)
            self.changed.append(patcher)

    def out(self) -> torch.Tensor:
        """The outputs of both."""
        with torch.no_grad():
            text = self.encoder(torch.arange(20)[None])[0]
        return torch.cat([run(self.unet).flatten(), text.flatten()])

    def effect(self, *loras: tuple[dict[str, torch.Tensor], float], memory: int = WHOLE) -> torch.Tensor:
        """What LoRAs do to the outputs, which are the same bits afterwards."""
        self.change_to(memory=memory)
        before = self.out()
        self.change_to(*loras, memory=memory)
        found = self.out() - before
        self.change_to(memory=memory)
        assert torch.equal(self.out(), before)
        return found


def _magnitudes(layer: Any) -> torch.Tensor:
    weight = layer.weight.detach().float()
    return 1.2 * weight.flatten(1).norm(dim=1).reshape(-1, *[1] * (weight.dim() - 1))


def _bias(layer: Any) -> torch.Tensor:
    return torch.full((layer.weight.shape[0],), 0.01)


@pytest.mark.parametrize("name", HOSTS)
def test_loras_have_the_effect_that_they_have_on_floats(host: Start, sd: Path, name: str) -> None:
    """Of all forms, at a strength, and two at once; wherever the mover leaves the layers."""
    at = Host(host, sd, name)
    at.load()
    loras = {"lora": [(at.lora(), 1.0)], "dora": [(at.lora(dora_scale=_magnitudes), 1.0)]}
    loras["two"] = [(at.lora(0), 0.5), (at.lora(1), 0.8)]
    wanted = {form: at.effect(*files) for form, files in loras.items()}
    at.load(**INT8)
    assert sum(isinstance(layer, SwappedLayer) for _, layer in layers(at.unet)) > 10
    for form, memory in (("lora", WHOLE), ("dora", WHOLE), ("two", WHOLE), ("two", 400_000), ("dora", 0)):
        found = at.effect(*loras[form], memory=memory)
        assert cosine(found, wanted[form]) > 0.998, (form, memory)
        assert 0.98 < found.norm() / wanted[form].norm() < 1.02, (form, memory)


@pytest.mark.parametrize("name", HOSTS)
def test_what_is_unloaded_while_it_is_there_keeps_the_lora_once(host: Start, sd: Path, name: str) -> None:
    """The host adds its function to the one that is there; and a model on the device may be told to merge by force."""
    at = Host(host, sd, name)
    at.load(**INT8)
    before = at.out()
    at.change_to((at.lora(), 1.0))
    with_lora = at.out()
    for patcher in at.changed:
        assert patcher.partially_unload("cpu", 100_000) > 0
    assert torch.equal(at.out(), with_lora)
    for patcher in at.changed:
        patcher.partially_load("cpu", 0, force_patch_weights=True)
    assert torch.equal(at.out(), with_lora)
    at.change_to()
    assert torch.equal(at.out(), before)


@pytest.mark.parametrize("name", HOSTS)
def test_biases_change_too(host: Start, sd: Path, name: str) -> None:
    at = Host(host, sd, name)
    at.load()
    wanted = at.effect((at.lora(diff_b=_bias), 1.0))
    at.load(**INT8)
    for memory in (WHOLE, 0):
        assert cosine(at.effect((at.lora(diff_b=_bias), 1.0), memory=memory), wanted) > 0.998


@pytest.mark.parametrize("name", HOSTS)
def test_the_mover_counts_packed_bytes(host: Start, sd: Path, name: str) -> None:
    at = Host(host, sd, name)
    at.load()
    whole = at.patchers["lora_unet_"].model_size()
    at.load(sdquant_quant_model="nf4")
    place = "backend.memory_management" if name == "neo" else "ldm_patched.modules.model_management"
    module_size = importlib.import_module(place).module_size
    assert at.patchers["lora_unet_"].model_size() < 0.3 * whole
    for _, layer in layers(at.unet):
        if isinstance(layer, SwappedLayer):
            assert 0 <= module_size(layer) - sum(p.nbytes for p in layer.parameters()) < 4


def test_copies_keep_the_lora(host: Start, sd: Path) -> None:
    at = Host(host, sd)
    at.load(**INT8)
    at.change_to((at.lora(), 1.0))
    assert torch.equal(run(copy.deepcopy(at.unet)), run(at.unet))


def test_neo_saves_no_packed_weights(host: Start, sd: Path) -> None:
    at = Host(host, sd)
    at.load()
    assert at.engine.save_unet("floats") == "floats"
    at.load(**INT8)
    for save in (at.engine.save_unet, at.engine.save_checkpoint):
        with pytest.raises(ConflictError, match="'Save Current Model'"):
            save("packed")


def test_weights_that_only_say_that_they_are_floats_are_not_quantized_again() -> None:
    """Neo's own fp8 and nvfp4 are tensors of a class of their own, in the dtype that they stand for."""
    layer = torch.nn.Linear(4, 4)
    assert not load_hooks.quantized_elsewhere(layer)
    weight = torch.empty(4, 4).as_subclass(type("QuantizedTensor", (torch.Tensor,), {}))
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    assert load_hooks.quantized_elsewhere(layer)


@pytest.mark.parametrize("name", HOSTS)
def test_unloaded_it_leaves_the_patcher_as_it_was(host: Start, name: str) -> None:
    running = host(name)
    place = "backend.patcher.base" if name == "neo" else "ldm_patched.modules.model_patcher"
    ModelPatcher = importlib.import_module(place).ModelPatcher
    before = dict(vars(ModelPatcher))
    running.start()
    assert vars(ModelPatcher) != before
    running.modules.script_callbacks.script_unloaded_callback()
    assert dict(vars(ModelPatcher)) == before
