"""LoRAs in Forge on quantized layers, by the patcher of its stand-in; tools/hosts/forge.py runs the real one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sdquant.errors import ConflictError
from sdquant.hosts.forge_layers import SwappedLayer

from .conftest import Running
from .lora_weights import cosine, layers, matrices, run
from .test_forge import _reload

Start = Callable[[str], Running]
INT8 = {"sdquant_quant_model": "int8", "sdquant_quant_text_encoder": "int8"}


class Host:
    """Forge with a model that it has loaded, and its LoRAs."""

    def __init__(self, host: Start, sd: Path) -> None:
        self.running, self.sd = host("forge"), sd
        self.running.start()

    def load(self, **options: Any) -> None:
        """Load the model with options of Forge."""
        for name, value in options.items():
            self.running.modules.shared.opts.set(name, value)
        self.engine = _reload(self.running, self.sd)
        objects = self.engine.forge_objects
        self.parts = (objects.unet, objects.clip.patcher)
        assert self.running.shown == []

    def lora(self, seed: int = 0, offset: Any = None) -> tuple[dict[Any, Any], ...]:
        """A LoRA on the UNet and one on the text encoder, as Forge reads them from a file; with a change of a bias."""
        found = []
        for part in self.parts:
            patches: dict[Any, Any] = {}
            for path, layer in layers(part.model):
                tensors = matrices(layer, seed=seed)
                up, down = tensors["lora_up.weight"], tensors["lora_down.weight"]
                key = f"{path}.weight"
                patches[(key, offset) if offset and up.dim() == 2 else key] = "lora", (up, down, None, None, None)
                if layer.bias is not None:
                    patches[f"{path}.bias"] = "diff", (torch.full_like(layer.bias, 0.01),)
            found.append(patches)
        return tuple(found)

    def put(self, *loras: tuple[tuple[dict[Any, Any], ...], float]) -> None:
        """Have Forge put these LoRAs on the model, in the place of those before."""
        for at, original in enumerate(self.parts):
            patcher = original.clone()
            for number, (lora, strength) in enumerate(loras):
                done = patcher.add_patches(filename=f"{number}.safetensors", patches=lora[at], strength_patch=strength)
                assert done == set(lora[at])  # or Forge drops the file
            patcher.refresh_loras()

    def effect(self, *loras: tuple[tuple[dict[Any, Any], ...], float]) -> torch.Tensor:
        """What LoRAs do to the outputs of the UNet and the text encoder, which are the same bits afterwards."""
        before = self.out()
        self.put(*loras)
        found = self.out() - before
        self.put()
        assert torch.equal(self.out(), before)
        return found

    def out(self) -> torch.Tensor:
        """The outputs of both."""
        unet, encoder = self.parts[0].model.diffusion_model, self.parts[1].model["clip_l"]
        with torch.no_grad():
            text = encoder(torch.arange(20)[None])[0]
        return torch.cat([run(unet).flatten(), text.flatten()])


def test_loras_have_the_effect_that_they_have_on_floats(host: Start, sd: Path) -> None:
    """Alone, at a strength, two at once, and on a part of a weight, as of Flux's joined ones."""
    at = Host(host, sd)
    at.load()
    loras = at.lora(), at.lora(seed=1)
    wanted = _effects(at, *loras)
    at.load(**INT8)
    assert sum(isinstance(layer, SwappedLayer) for _, layer in layers(at.parts[0].model)) > 10
    for name, found in _effects(at, *loras).items():
        assert cosine(found, wanted[name]) > 0.998, name
        assert 0.98 < found.norm() / wanted[name].norm() < 1.02, name


def _effects(at: Host, one: Any, other: Any) -> dict[str, torch.Tensor]:
    return {"one": at.effect((one, 1.0)), "half": at.effect((one, 0.5)), "two": at.effect((one, 0.6), (other, -0.7))}


def test_a_part_of_a_weight_is_changed(host: Start, sd: Path) -> None:
    """As the queries in Flux's joined weights."""
    at = Host(host, sd)
    at.load(**INT8)
    path, layer = next((path, one) for path, one in layers(at.parts[0].model) if path.endswith("to_q"))
    update = torch.ones(8, layer.weight.shape[1])
    patcher, before = at.parts[0].clone(), layer.dequantize()
    key = (f"{path}.weight", (0, 4, 8))
    assert patcher.add_patches(filename="one", patches={key: ("diff", (update,))}) == {key}
    patcher.refresh_loras()
    (change,) = layer.weight_function
    changed = change(layer.dequantize())
    assert torch.allclose(changed[4:12], before[4:12] + 1.0)
    assert torch.equal(changed[12:], before[12:])
    assert torch.equal(layer.dequantize(), before)


def test_forge_counts_and_moves_loras_on_packed_weights_as_online_ones(host: Start, sd: Path) -> None:
    at = Host(host, sd)
    at.load(**INT8 | {"sdquant_skip": "conv_in"})
    patcher, (unet, _) = at.parts[0].clone(), at.lora()
    unet["diffusion_model.conv_in.weight"] = "diff", (torch.zeros(1),)
    patcher.add_patches(filename="one", patches=unet)
    assert patcher.has_online_lora()
    names = {online: set(rows) for (*_, online), rows in patcher.lora_patches.items()}
    assert "diffusion_model.conv_in.weight" in names[False]
    assert not any(isinstance(patcher.model.get_submodule(name.rpartition(".")[0]), SwappedLayer)
                   for name in names[False] if name.endswith(".weight"))  # fmt: skip


def test_copies_keep_the_lora(host: Start, sd: Path) -> None:
    at = Host(host, sd)
    at.load(**INT8)
    at.put((at.lora(), 1.0))
    unet = at.parts[0].model.diffusion_model
    assert torch.equal(run(copy.deepcopy(unet)), run(unet))


@pytest.mark.parametrize("name", ["save_unet", "save_checkpoint"])
def test_quantized_models_are_not_saved_as_floats(host: Start, sd: Path, name: str) -> None:
    at = Host(host, sd)
    at.load()
    assert getattr(at.engine, name)("file") == "file"
    at.load(**INT8)
    for clip in (at.engine.forge_objects.clip, None):  # which some models have not
        at.engine.forge_objects.clip = clip
        with pytest.raises(ConflictError, match="quantized by sdquant"):
            getattr(at.engine, name)("file")


def test_weights_that_forge_reads_by_name_are_there(host: Start, sd: Path) -> None:
    """As it does to find what a LoRA names, and to copy them into a Control-LoRA."""
    at = Host(host, sd)
    at.load()
    names = set(at.parts[0].model.state_dict())
    at.load(**INT8)
    model = at.parts[0].model
    assert set(model.state_dict()) == names
    path, layer = next(layers(model))
    found = torch.nn.Parameter(model.state_dict()[f"{path}.weight"], requires_grad=False)
    assert torch.equal(found.to(torch.float32), layer.dequantize())
