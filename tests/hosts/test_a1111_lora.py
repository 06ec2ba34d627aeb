"""LoRAs in A1111 on quantized layers, by its extension Lora's stand-in; tools/hosts/a1111.py runs the real one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sdquant.hosts import a1111_lora, extension
from sdquant.nn import QuantizedLayer

from .conftest import Running
from .lora_weights import cosine, layers, matrices, run
from .test_a1111 import checkpoint

__all__ = ["checkpoint"]  # the fixture
Start = Callable[[str], Running]


class Host:
    """A1111 with a model that it has loaded, and its LoRAs."""

    def __init__(
        self, host: Start, make: Callable[[str, float], SimpleNamespace], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.running, self.made = host("a1111"), make("one", 1.0)
        self.running.start()
        import networks

        self.networks = networks
        for kind in (torch.nn.Linear, torch.nn.Conv2d):
            networks.originals[kind.__name__] = kind.forward
            monkeypatch.setattr(kind, "forward", getattr(networks, f"network_{kind.__name__}_forward"))

    def load(self, scheme: str | None = None) -> None:
        """Load the model with a scheme."""
        if scheme:
            self.running.modules.shared.opts.set("sdquant_quant_model", scheme)
        self.model = self.running.modules.sd_models.reload_model_weights(info=self.made)
        self.unet = self.model.model.diffusion_model
        assert self.running.shown == []

    def lora(self, name: str = "one", seed: int = 0, strength: float = 1.0, **more: Any) -> Any:
        """A LoRA on the UNet. more: other tensors of each layer, made from it."""
        net = self.networks.load_network(name, {
            f"lora_unet_{path.replace('.', '_')}.{leaf}": value
            for path, layer in layers(self.unet)
            for leaf, value in {**matrices(layer, seed=seed), **{k: make(layer) for k, make in more.items()}}.items()
            if leaf != "diff_b" or layer.bias is not None
        })  # fmt: skip
        net.unet_multiplier = strength
        return net

    def put(self, *nets: Any) -> None:
        """What `load_networks` does before each batch."""
        self.networks.loaded_networks[:] = nets

    def effect(self, *nets: Any) -> torch.Tensor:
        """What LoRAs do to the output of the UNet, which is the same bits afterwards."""
        before = run(self.unet)
        self.put(*nets)
        found = run(self.unet) - before
        self.put()
        assert torch.equal(run(self.unet), before)
        return found


@pytest.fixture
def at(host: Start, checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A1111 before its model is loaded."""
    return Host(host, checkpoint, monkeypatch)


def _magnitudes(layer: Any) -> torch.Tensor:
    weight = layer.weight.detach().float()
    return 1.2 * weight.flatten(1).norm(dim=1).reshape(-1, *[1] * (weight.dim() - 1))


def _bias(layer: Any) -> torch.Tensor:
    return torch.full((layer.weight.shape[0],), 0.01)


FORMS = {"lora": {}, "dora": {"dora_scale": _magnitudes}, "bias": {"diff_b": _bias}}


def _effects(at: Host) -> dict[str, torch.Tensor]:
    found = {name: at.effect(at.lora(**more)) for name, more in FORMS.items()}
    return found | {"two": at.effect(at.lora("one", 0, 0.5), at.lora("two", 1, -0.8))}


def test_loras_have_the_effect_that_they_have_on_floats(at: Host) -> None:
    at.load()
    wanted = _effects(at)
    at.load("int8")
    assert sum(isinstance(layer, QuantizedLayer) for _, layer in layers(at.unet)) > 10
    for name, found in _effects(at).items():
        assert cosine(found, wanted[name]) > 0.998, name
        assert 0.98 < found.norm() / wanted[name].norm() < 1.02, name


def test_another_strength_counts(at: Host) -> None:
    """With the LoRA left on: A1111 changes the strength of the same object."""
    at.load("int8")
    net, before = at.lora(), run(at.unet)
    at.put(net)
    whole = run(at.unet) - before
    net.unet_multiplier = 0.5
    half = run(at.unet) - before
    assert cosine(half, whole) > 0.98
    assert 0.45 < half.norm() / whole.norm() < 0.55


def test_a_lora_stays_on_while_the_model_is_loaded_again(at: Host) -> None:
    """As for a refiner, or after a setting was changed."""
    at.load("int8")
    at.put(at.lora())
    before = run(at.unet)
    at.load("nf4")
    assert cosine(run(at.unet), before) > 0.98
    on = run(at.unet)
    at.put()
    assert not torch.equal(run(at.unet), on)


def test_reload_ui_keeps_the_model_and_its_loras(at: Host) -> None:
    """A1111 then unloads the scripts and runs them again; the model stays."""
    at.load("int8")
    wanted = at.effect(at.lora())
    extension._session.unload()
    extension.register()
    assert torch.equal(at.effect(at.lora()), wanted)


def test_what_does_not_fit_a_layer_is_counted_by_a1111_and_left_out(at: Host) -> None:
    at.load("int8")
    net, before = at.lora(), run(at.unet)
    for module in net.modules.values():
        module.up = module.up[:-1]
    at.put(net)
    assert torch.allclose(run(at.unet), before, atol=1e-4)
    assert at.networks.extra_network_lora.errors["one"] >= len(net.modules)


def test_copies_keep_the_lora_and_saving_says_that_it_is_there(at: Host) -> None:
    from sdquant.models import peft_hooks

    at.load("int8")
    assert peft_hooks.adapted(at.unet) == []
    at.put(at.lora())
    assert torch.equal(run(copy.deepcopy(at.unet)), run(at.unet))
    assert len(peft_hooks.adapted(at.unet)) > 10


def test_sd3s_joined_queries_keys_and_values_get_their_own(at: Host) -> None:
    at.load("int8")
    path, layer = next((path, one) for path, one in layers(at.unet) if path.endswith("ff.net.2"))
    out, into = layer.weight.shape
    rows = [matrices(torch.nn.Linear(into, n), seed=seed) for seed, n in enumerate(_thirds(out))]
    name = f"lora_unet_{path.replace('.', '_')}"
    net = at.networks.load_network("one", {
        f"{name}{end}.{leaf}": value
        for end, tensors in zip(a1111_lora._JOINED, rows, strict=True)
        for leaf, value in tensors.items()
    })  # fmt: skip
    at.put(net)
    (change,) = layer.weight_function
    before = layer.dequantize()
    wanted = torch.cat([one["lora_up.weight"] @ one["lora_down.weight"] for one in rows])
    assert torch.allclose(change(before) - before, wanted, atol=1e-5)


def _thirds(rows: int) -> list[int]:
    size = -(-rows // 3)
    return [size, size, rows - 2 * size]
