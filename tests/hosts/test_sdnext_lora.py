"""LoRAs in SD.Next on quantized layers, by the functions of its stand-in; tools/hosts/sdnext.py runs the real one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sdquant.errors import ConflictError
from sdquant.nn import QuantizedLayer

from .conftest import Running
from .lora_weights import cosine, layers, matrices, run
from .test_sdnext import _info

pytestmark = pytest.mark.filterwarnings("ignore:`torch_dtype` is deprecated:FutureWarning")

Start = Callable[[str], Running]
INT8 = {"sdquant_quant_model": "int8", "sdquant_quant_text_encoder": "int8"}


class Host:
    """SD.Next with a model that it has loaded, and its LoRAs."""

    def __init__(self, host: Start, sd: Path) -> None:
        self.running, self.sd = host("sdnext"), sd
        self.running.start()
        from modules.lora import lora_load, networks

        self.read, self.change_to = lora_load.load, networks.change_to

    def load(self, **options: Any) -> None:
        """Load the model with options of SD.Next."""
        modules = self.running.modules
        for name, value in options.items():
            modules.shared.opts.set(name, value)
        self.pipe = modules.sd_models.reload_model_weights(info=_info(self.sd, True), force=True)
        modules.shared.sd_model = self.pipe
        assert self.running.shown == []

    def lora(self, name: str = "one", seed: int = 0, strength: float = 1.0, **more: Any) -> Any:
        """A LoRA on the UNet and the text encoder. more: other tensors of each layer, made from it."""
        parts = {"lora_unet_": self.pipe.unet, "lora_te_": self.pipe.text_encoder}
        tensors = {
            prefix + path.replace(".", "_"): matrices(layer, seed=seed) | {k: make(layer) for k, make in more.items()}
            for prefix, part in parts.items()
            for path, layer in layers(part)
        }
        net = self.read(name, tensors)
        net.te_multiplier, net.unet_multiplier = strength, [strength] * 3
        return net

    def effect(self, *nets: Any) -> torch.Tensor:
        """What LoRAs do to the outputs of the UNet and the text encoder, which are the same bits afterwards."""
        before = self.out()
        self.change_to(nets)
        found = self.out() - before
        self.change_to([])
        assert torch.equal(self.out(), before)
        return found

    def out(self) -> torch.Tensor:
        """The outputs of both."""
        with torch.no_grad():
            text = self.pipe.text_encoder(torch.arange(20)[None])[0]
        return torch.cat([run(self.pipe.unet).flatten(), text.flatten()])


def _magnitudes(layer: Any) -> torch.Tensor:
    weight = layer.weight.detach().float()
    return 1.2 * weight.flatten(1).norm(dim=1).reshape(-1, *[1] * (weight.dim() - 1))


def _bias(layer: Any) -> torch.Tensor:
    return torch.full((layer.weight.shape[0],), 0.01)


FORMS = {"lora": {}, "dora": {"dora_scale": _magnitudes}, "bias": {"diff_b": _bias}}


@pytest.mark.parametrize("fuse", [True, False])
def test_loras_have_the_effect_that_they_have_on_floats(host: Start, sd: Path, fuse: bool) -> None:
    """Of all forms, at a strength, and two at once."""
    at = Host(host, sd)
    at.load(lora_fuse_native=False)
    wanted = _effects(at)
    at.load(lora_fuse_native=fuse, **INT8)
    assert sum(isinstance(layer, QuantizedLayer) for _, layer in layers(at.pipe.unet)) > 10
    for name, found in _effects(at).items():
        assert cosine(found, wanted[name]) > 0.998, name
        assert 0.98 < found.norm() / wanted[name].norm() < 1.02, name


def _effects(at: Host) -> dict[str, torch.Tensor]:
    found = {name: at.effect(at.lora(**more)) for name, more in FORMS.items()}
    return found | {"two": at.effect(at.lora("one", 0, 0.5), at.lora("two", 1, 0.8))}


def test_another_strength_counts(host: Start, sd: Path) -> None:
    """With the LoRA left on: SD.Next changes the strength of the same object."""
    at = Host(host, sd)
    at.load(**INT8)
    net, before = at.lora(), at.out()
    at.change_to([net])
    whole = at.out() - before
    net.unet_multiplier, net.te_multiplier = [0.5] * 3, 0.5
    at.change_to([net])
    half = at.out() - before
    assert cosine(half, whole) > 0.98
    assert 0.45 < half.norm() / whole.norm() < 0.55


def test_what_does_not_fit_a_layer_is_counted_by_sdnext_and_left_out(host: Start, sd: Path) -> None:
    at = Host(host, sd)
    at.load(**INT8)
    net, before = at.lora(), at.out()
    for module in net.modules.values():
        module.up = module.up[:-1]
    at.change_to([net])
    from modules.lora import lora_common

    assert lora_common.extra_network_lora.errors["one"] == len(net.modules)
    assert torch.equal(at.out(), before)


def test_only_layers_of_the_lora_are_dequantized(host: Start, sd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SD.Next asks what a LoRA adds to each layer of the model, also to those that it does not have."""
    at = Host(host, sd)
    at.load(**INT8)
    net, seen = at.lora(), []
    original = QuantizedLayer.dequantize
    monkeypatch.setattr(QuantizedLayer, "dequantize", lambda self: seen.append(self) or original(self))
    at.change_to([net])
    everything = [layer for part in (at.pipe.unet, at.pipe.text_encoder) for layer in part.modules()]
    with_it = [layer for layer in everything if getattr(layer, "network_layer_name", None) in net.modules]
    assert seen == [layer for layer in seen if layer in with_it]
    assert 0 < len(seen) < sum(isinstance(layer, QuantizedLayer) for layer in everything)


@pytest.mark.parametrize("options", [INT8, {"sdquant_quant_model": "int8_convrot", "sdquant_compute": "int8"}])
def test_a_bias_that_the_layer_does_not_have(host: Start, sd: Path, options: dict[str, Any]) -> None:
    """Is that of a layer whose bias is 0, also where the LoRA has nothing else for the weight to change."""
    at = Host(host, sd)
    at.load(**options)
    layer = next(one for _, one in layers(at.pipe.unet) if one.bias is None)
    assert isinstance(layer, QuantizedLayer)
    net = at.lora(diff_b=_bias)
    x = torch.randn(3, layer.spec.shape[1], dtype=layer.compute_dtype)
    at.change_to([net])
    with_bias = layer(x)
    layer.bias_function = ()
    assert torch.allclose(
        with_bias - layer(x), torch.full_like(with_bias, 0.01), atol=1e-2 * float(with_bias.abs().max())
    )
    assert not torch.equal(with_bias, layer(x))
    at.change_to([])
    assert layer.bias_function == ()


def test_copies_keep_the_lora_and_quantizing_or_saving_says_that_it_is_there(host: Start, sd: Path) -> None:
    from sdquant.models import peft_hooks

    at = Host(host, sd)
    at.load(**INT8)
    at.change_to([at.lora()])
    assert torch.equal(run(copy.deepcopy(at.pipe.unet)), run(at.pipe.unet))
    with pytest.raises(ConflictError, match="a LoRA is attached to"):
        peft_hooks.refuse_adapted("unet", at.pipe.unet, "saved")


def test_no_lora_is_fused_into_packed_weights(host: Start, sd: Path) -> None:
    at = Host(host, sd)
    from modules.lora import lora_overrides

    at.load()
    assert lora_overrides.disable_fuse() is False
    at.load(**INT8)
    assert lora_overrides.disable_fuse() is True
