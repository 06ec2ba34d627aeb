"""A language model of which SDNQ quantized the head, and not the table of embeddings that the head is tied to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import sdquant
from sdquant.nn.weights import quantized

from .test_sdnq_storage import BACKEND, dequantized, sdnq

__all__ = ["sdnq"]  # the fixture


@pytest.fixture(scope="module")
def tied_head(sdnq: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor, Any]:
    """A language model whose head SDNQ quantized, the float table that the head was tied to, and the head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model: Any = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=True)).bfloat16()
    table = model.get_input_embeddings().weight.detach().clone()
    model = sdnq.sdnq_post_load_quant(
        model, weights_dtype="uint4", add_skip_keys=False, minimum_allowed_numel=0, torch_dtype=torch.bfloat16
    )
    folder = tmp_path_factory.mktemp("tied")
    sdnq.save_sdnq_model(model, str(folder))
    return folder, table, model.lm_head


def test_a_quantized_head_is_left_apart_from_the_float_table(
    tied_head: tuple[Path, torch.Tensor, Any], tmp_path: Path
) -> None:
    folder, table, head = tied_head
    assert hasattr(head, "sdnq_dequantizer")
    names = set(load_file(folder / "model.safetensors"))
    assert {"lm_head.weight", "lm_head.scale", "model.embed_tokens.weight"} <= names
    sdquant.save(sdquant.load_model(folder, progress=False), tmp_path / "saved")
    for place in (folder, tmp_path / "saved"):
        assert sdquant.verify(place)
        model = sdquant.load_model(place, progress=False)
        assert torch.equal(model.get_input_embeddings().weight, table)
        packed = dict(quantized(model))["lm_head.weight"]
        assert torch.equal(BACKEND.decode(packed, torch.bfloat16), dequantized(head, torch.bfloat16))
        assert bool(model(torch.arange(8).view(1, 8)).logits.isfinite().all())


def test_transformers_leaves_it_apart_too(tied_head: tuple[Path, torch.Tensor, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from sdquant.integrations import transformers_quantizer

    folder, table, head = tied_head
    sdquant.save(sdquant.load_model(folder, progress=False), tmp_path / "saved")
    settings = json.loads((tmp_path / "saved" / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "sdquant", "quant": "sdnq-uint4"}
    (tmp_path / "saved" / "config.json").write_text(json.dumps(settings))
    assert transformers_quantizer.Quantizer
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert torch.equal(model.get_input_embeddings().weight, table)
    assert torch.equal(model.lm_head.dequantize(), dequantized(head, torch.bfloat16))
