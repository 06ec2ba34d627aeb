"""Gemma's embeddings, which are multiplied after they are looked up: packed, and as exact as in floats."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sdquant
from sdquant import backends
from sdquant.integrations._common import float_layer
from sdquant.models.components import quiet
from sdquant.nn import kind_of, quantized_layer
from sdquant.nn.quantized_layers import QuantizedEmbedding
from sdquant.nn.weights import quantized

from .encoders import ROWS

IDS = torch.tensor([[3, 17, 5, 99]])


def _table(dtype: torch.dtype) -> nn.Module:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    torch.manual_seed(0)
    return Gemma3TextScaledWordEmbedding(160, 64, 0, embed_scale=64**0.5 + 0.3).to(dtype).requires_grad_(False)


def _packed(table: nn.Module, scheme: str) -> QuantizedEmbedding:
    spec = backends.parse(scheme)
    layer = quantized_layer(table, spec.scheme.codec.encode(table.get_parameter("weight"), spec))
    assert isinstance(layer, QuantizedEmbedding)
    return layer


def _in_floats(table: nn.Module, layer: QuantizedEmbedding) -> nn.Module:
    whole = copy.deepcopy(table)
    whole.weight = nn.Parameter(layer.dequantize(), requires_grad=False)
    return whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", ["int8", "q8_0", "nf4"])
def test_bit_by_bit(scheme: str, dtype: torch.dtype) -> None:
    table = _table(dtype)
    assert kind_of(table) == "embedding"
    layer = _packed(table, scheme)
    wanted = _in_floats(table, layer)(IDS)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for one in (
        layer,
        copy.deepcopy(layer),
        torch.load(file, weights_only=False),
        torch.compile(layer, backend="eager"),
    ):
        assert torch.equal(one(IDS), wanted)
    back = float_layer(layer, dtype)
    assert type(back) is type(table) and torch.equal(back(IDS), wanted)
    assert not back.state_dict().keys() - {"weight"}
    half = copy.deepcopy(layer).to(torch.float16)(IDS)
    assert half.dtype == torch.float16 and torch.allclose(half.float(), wanted.float(), rtol=1e-2, atol=1e-2)


def test_of_other_classes() -> None:
    """With more weights, or another forward."""
    from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
    from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2TextScaledWordEmbedding

    assert kind_of(T5Gemma2TextScaledWordEmbedding(160, 64, 0, 8.0)) is None
    assert kind_of(BartScaledWordEmbedding(160, 64, 0, 8.0)) is None


def test_a_whole_model(tmp_path: Path) -> None:
    import transformers

    config: Any = dict(ROWS["Gemma3ForConditionalGeneration"].config)["text_config"]
    with quiet(), torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.Gemma3TextModel(transformers.Gemma3TextConfig(**config)).eval()
        model.save_pretrained(tmp_path / "floats")
        loaded = sdquant.load_model(tmp_path / "floats", "int8,embeddings", progress=False)
        mine = loaded(input_ids=IDS)[0]
        packed = dict(quantized(loaded))
        assert "embed_tokens.weight" in packed
        for name, one in packed.items():
            layer: Any = model.get_submodule(name.removesuffix(".weight"))
            layer.weight = nn.Parameter(one.spec.scheme.codec.decode(one, torch.float32))
        assert torch.allclose(mine, model(input_ids=IDS)[0], atol=1e-5)
        for offload in ("sequential", "group"):
            other = sdquant.load_model(tmp_path / "floats", "int8,embeddings", offload, progress=False)
            assert torch.equal(other(input_ids=IDS)[0], mine)
        sdquant.save(loaded, tmp_path / "saved")
        again = sdquant.load_model(tmp_path / "saved", progress=False)
        assert torch.equal(again(input_ids=IDS)[0], mine)
