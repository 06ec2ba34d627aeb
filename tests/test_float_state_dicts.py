"""State dicts of quantized modules given to modules of floats: decoded, or refused by name."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel, UNet2DConditionModel, UNetMotionModel

import sdquant
from sdquant.errors import IncompatibleError
from sdquant.nn import packed_of


def quantized(scheme: str, runtime: str, mode: str = "none") -> Any:
    """The UNet of digits-sd."""
    path = sdquant.demo.path("digits-sd")
    return sdquant.load_model(path, scheme, mode, runtime=runtime, device="cpu", dtype="float32", progress=False).unet


def floats_of(unet: Any) -> Any:
    """The same UNet of floats, by what each layer decodes to."""
    other = UNet2DConditionModel.from_config(unet.config)
    for name, layer in unet.named_modules():
        packed, target = packed_of(layer), other.get_submodule(name)
        own = {k: v for k, v in layer._parameters.items() if v is not None and k in target._parameters}
        if packed is not None:
            own["weight"] = packed.spec.scheme.codec.decode(packed, torch.float32)
        for key, value in own.items():
            target._parameters[key].data.copy_(value)
    return other


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    state, wanted = one.state_dict(), other.state_dict()
    return state.keys() == wanted.keys() and all(torch.equal(state[key], wanted[key]) for key in wanted)


CASES = [("int8", "plain", "none"), ("nf4,double_quant", "plain", "sequential"), ("nf4", "library", "model")]


@pytest.mark.parametrize(("scheme", "runtime", "mode"), CASES)
def test_models_that_diffusers_builds(scheme: str, runtime: str, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    unet = quantized(scheme, runtime, mode)
    floats = floats_of(quantized(scheme, runtime))
    with caplog.at_level(logging.WARNING, "sdquant"):
        torch.manual_seed(0)
        built = UNetMotionModel.from_unet2d(unet, None)
    assert "as floats" in caplog.text  # never without a word
    torch.manual_seed(0)
    assert same(built, UNetMotionModel.from_unet2d(floats, None))
    torch.manual_seed(0)
    controlnet = ControlNetModel.from_unet(unet)
    torch.manual_seed(0)
    assert same(controlnet, ControlNetModel.from_unet(floats))


@pytest.mark.parametrize("strict", [True, False])
def test_a_model_of_floats(strict: bool) -> None:
    unet = quantized("int8", "plain")
    floats, target = floats_of(unet), UNet2DConditionModel.from_config(unet.config)
    target.load_state_dict(unet.state_dict(), strict=strict)
    assert same(target, floats)
    again = UNet2DConditionModel.from_config(unet.config)
    again.mid_block.load_state_dict(unet.mid_block.state_dict(), strict=strict)
    assert same(again.mid_block, floats.mid_block)


@pytest.mark.parametrize("strict", [True, False])
def test_bytes_that_nobody_can_read_are_refused(strict: bool) -> None:
    unet = quantized("int8", "plain")
    rebuilt = OrderedDict(unet.state_dict())
    target = UNet2DConditionModel.from_config(unet.config)
    before = {key: value.clone() for key, value in target.state_dict().items()}
    with pytest.raises(
        IncompatibleError, match=r"^Cannot load the quantized weight 'conv_in.packed_codes' into a Conv2d"
    ):
        target.load_state_dict(rebuilt, strict=strict)
    assert all(torch.equal(value, before[key]) for key, value in target.state_dict().items())
    unet.load_state_dict(rebuilt)  # a model of that quantization takes them


def test_the_way_out_fits_the_write() -> None:
    """T06: who sets a new token's values has no LoRA to leave beside the weights."""
    layer = quantized("int8", "plain").mid_block.attentions[0].transformer_blocks[0].attn1.to_q
    before, values = layer.dequantize(), torch.ones(64, 64)
    writes = [
        (lambda: layer.weight.data.add_(values), "LoRA"),
        (lambda: layer.weight.data.sub_(values), "LoRA"),
        (lambda: layer.weight.data.__setitem__(0, values[0]), "components="),
        (lambda: layer.weight.data.__setitem__(slice(0, 2), values[:2]), "components="),
        (lambda: torch.nn.init.normal_(layer.weight), "components="),
        (lambda: setattr(layer.weight, "data", values), "components="),
    ]
    for write, words in writes:
        with pytest.raises(
            IncompatibleError, match=r"^Cannot write to the weight of 'mid_block.*to_q', \[64, 64\] in int8"
        ) as caught:
            write()
        assert words in caught.value.fix and ("LoRA" in caught.value.fix) == (words == "LoRA")
    assert torch.equal(layer.dequantize(), before)
