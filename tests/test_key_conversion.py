"""Names and forms that libraries change between a file and a model, beside those of `test_encoders`: tensors made of
several, folders that a library quantized itself, rules, deprecated attention blocks, and transformers before 5."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import sdquant
from sdquant.errors import UnsupportedFileError
from sdquant.models import names
from sdquant.models.components import quiet
from sdquant.nn.weights import plain, quantized

from . import encoders

FILE = "model.safetensors"


def _load(path: Path, *args: Any, **values: Any) -> Any:
    return sdquant.load_model(path, *args, progress=False, **values)


def _random(cls: Any, config: Any) -> Any:
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(0)
        model = cls(config).eval()
        for parameter in model.parameters():
            parameter.requires_grad_(False).copy_(torch.randn(parameter.shape) * 0.05)
    return model


def _experts(folder: Path) -> Any:
    """A model whose experts are single tensors of all layers, and in files one by one."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **encoders.ROWS["Qwen3ForCausalLM"].config, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=64
    )
    with quiet():
        _random(Qwen3MoeForCausalLM, config).save_pretrained(folder)
        return Qwen3MoeForCausalLM.from_pretrained(folder)


def _same(one: Any, other: Any) -> None:
    state, wanted = one.state_dict(), other.state_dict()
    assert state.keys() == wanted.keys()
    assert not [key for key in wanted if not torch.equal(state[key], wanted[key])]


def test_experts_are_made_of_many_tensors(tmp_path: Path) -> None:
    wanted = _experts(tmp_path / "experts")
    assert "model.layers.0.mlp.experts.1.up_proj.weight" in load_file(tmp_path / "experts" / FILE)
    model = _load(tmp_path / "experts")
    _same(model, wanted)
    sdquant.verify(tmp_path / "experts")
    sdquant.save(model, tmp_path / "again")
    assert load_file(tmp_path / "again" / FILE).keys() == load_file(tmp_path / "experts" / FILE).keys()
    _same(_load(tmp_path / "again"), wanted)


def test_experts_stay_floats_beside_quantized_weights(tmp_path: Path) -> None:
    wanted = _experts(tmp_path / "experts")
    model = _load(tmp_path / "experts", "int8")
    packed = dict(quantized(model))
    assert packed and not any("experts" in name for name in packed)
    sdquant.save(model, tmp_path / "again")
    with quiet():
        theirs = type(wanted).from_pretrained(tmp_path / "again")
    for again in (_load(tmp_path / "again"), theirs):
        floats = plain(again)
        assert all(torch.equal(floats[name], tensor) for name, tensor in plain(model).items())
        assert dict(quantized(again)).keys() == packed.keys()


def test_experts_that_are_quantized_one_by_one_are_refused(tmp_path: Path) -> None:
    _experts(tmp_path / "experts")
    state = load_file(tmp_path / "experts" / FILE)
    name = "model.layers.0.mlp.experts.1.up_proj"
    weight = state.pop(f"{name}.weight")
    codes = sdquant.backends.get("bnb")
    spec = sdquant.backends.QuantSpec(sdquant.backends.scheme("bnb-int8"))
    state |= codes.write(f"{name}.weight", codes.encode(weight, spec))
    save_file(state, tmp_path / "experts" / FILE, {"format": "pt"})
    for call in (sdquant.plan, _load, sdquant.verify):
        with pytest.raises(
            UnsupportedFileError, match=r"Cannot load weight .*up_proj.weight.*, which is quantized to bnb-int8"
        ):
            call(tmp_path / "experts")


def test_a_folder_that_bitsandbytes_quantized(tmp_path: Path) -> None:
    """transformers' own: parts of weights under the names of files."""
    from transformers import BitsAndBytesConfig

    name = "Qwen2_5_VLForConditionalGeneration"
    with quiet():
        encoders.model(name).save_pretrained(tmp_path / "floats")
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
        theirs = encoders.kind(name).from_pretrained(tmp_path / "floats", quantization_config=config)
        theirs.save_pretrained(tmp_path / "packed")
    assert any(key.startswith("visual.") for key in load_file(tmp_path / "packed" / FILE))
    model = _load(tmp_path / "packed", runtime="plain")
    packed, wanted = dict(quantized(model)), dict(quantized(theirs))
    assert packed.keys() == wanted.keys() and packed
    for key, one in wanted.items():
        assert torch.equal(packed[key].parts["codes"].flatten(), one.parts["codes"].flatten())
    sdquant.verify(tmp_path / "packed")


def test_deprecated_attention_blocks(tmp_path: Path) -> None:
    """The VAE of Stable Diffusion 1.5, whose file is older than the names of today."""
    from diffusers import AutoencoderKL

    source, file = tmp_path / "new", "diffusion_pytorch_model.safetensors"
    with quiet():
        AutoencoderKL(block_out_channels=(32,), norm_num_groups=8).save_pretrained(source)
    shutil.copytree(source, tmp_path / "vae")
    state = load_file(source / file)
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    changed = {}
    for key, tensor in state.items():
        parts = [key.replace(f".{new}.", f".{word}.") for new, word in old.items() if f".{new}." in key]
        there = parts[0] if parts else key
        changed[there] = tensor
    assert changed.keys() != state.keys()
    save_file(changed, tmp_path / "vae" / file)
    _same(_load(tmp_path / "vae"), _load(source))
    sdquant.verify(tmp_path / "vae")


class _Before5(nn.Module):
    """What a class of transformers 4.57 has."""

    base_model_prefix = "model"
    _checkpoint_conversion_mapping: ClassVar = {
        "^visual": "model.visual",
        r"^model(?!\.(language_model|visual))": "model.language_model",
    }

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(to_json_string=str)

    @staticmethod
    def _fix_state_dict_key_on_load(key: str) -> tuple[str, bool]:
        return key.replace("LayerNorm.gamma", "LayerNorm.weight"), key.endswith("LayerNorm.gamma")


def test_before_transformers_5(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers.conversion_mapping", None)
    monkeypatch.setitem(__import__("sys").modules, "transformers.core_model_loading", None)
    there = {
        "visual.proj.weight": "model.visual.proj.weight",
        "model.norm.weight": "model.language_model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
    model = _Before5()
    mapped = names.to_model(model, there, there.values())
    assert {key: name for name, key in mapped.names.items()} == there and not mapped.strays
    assert dict(names.to_file(model, list(there.values())).names) == there
    assert names.to_model(model, ["LayerNorm.gamma"], ["model.LayerNorm.weight"]).names == {
        "model.LayerNorm.weight": "LayerNorm.gamma"
    }


def test_the_order_of_tensors_is_that_of_the_file(saved: Callable[..., Path]) -> None:
    """Processes that share the quantization of a model divide its weights by their order, and each has a hash seed of
    its own, by which sets are ordered."""
    folder = saved("nf4")
    for name, src in sdquant.plan(folder).detected.sources.items():
        (file,) = (folder / name).glob("*.safetensors")
        with safe_open(file, framework="pt") as tensors:
            place = {key: number for number, key in enumerate(tensors.offset_keys())}
        keys = [place[key] for key in src.plain]
        assert keys == sorted(keys)
        packed = [place[weight.keys["codes"]] for weight in src.prequantized.values()]
        assert packed == sorted(packed) and len(keys) + len(packed) > 10
