"""Folders of transformers' fine-grained FP8, by its own operators: the values are those that it dequantizes itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel, FineGrainedFP8Config, Qwen3Config, Qwen3Model
from transformers.integrations.finegrained_fp8 import Fp8Quantize

import sdquant
from sdquant.errors import UnsupportedFileError
from sdquant.nn.weights import quantized

CONFIG = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 64,
}  # fmt: skip


def write(folder: Path, block: tuple[int, int] | None, scales: str, *, method: str = "fp8", key: str = "") -> None:
    """Write a Qwen3 whose linear layers are quantized.

    Args:
        block: rows and columns that share a scale; None for the whole weight.
        scales: "float", "ue8m0" (powers of two, float8_e8m0fnu) or "bytes" (the same as uint8). key: another name.
    """
    config = FineGrainedFP8Config(weight_block_size=block, scale_fmt="float" if scales == "float" else "ue8m0")
    writer = Fp8Quantize(SimpleNamespace(quantization_config=config))
    torch.manual_seed(0)
    model = Qwen3Model(Qwen3Config(**CONFIG)).bfloat16()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        for last, part in (writer.convert({name: tensor}) if "proj" in name else {name: tensor}).items():
            is_scale = last.endswith("_inv")
            values = part.view(torch.uint8) if is_scale and scales == "bytes" else part
            values = values.reshape(()) if is_scale and block is None else values
            tensors[last.replace("weight_scale_inv", key) if is_scale and key else last] = values.contiguous()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    table: dict[str, Any] = {**config.to_dict(), "quant_method": method, "weight_block_size": block and list(block)}
    values_of_config = {**model.config.to_dict(), "architectures": ["Qwen3Model"], "quantization_config": table}
    (folder / "config.json").write_text(json.dumps(values_of_config, default=str))


@pytest.mark.parametrize(
    ("block", "scales", "method", "scheme"),
    [
        ((128, 128), "float", "fp8", "fp8"), ((128, 128), "ue8m0", "fp8", "fp8"), ((128, 128), "bytes", "fp8", "fp8"),
        ((32, 32), "bytes", "fp8", "fp8"), ((64, 64), "ue8m0", "fp8", "fp8"), (None, "float", "fp8", "fp8"),
        (None, "ue8m0", "fp8", "fp8"), ((1, 128), "float", "fp8", "fp8"), ((1, 32), "ue8m0", "fp8", "mxfp8"),
        ((1, 32), "bytes", "fp8", "mxfp8"), ((1, 32), "bytes", "mxfp8", "mxfp8"), ((1, 32), "ue8m0", "mxfp8", "mxfp8"),
    ],
)  # fmt: skip
def test_what_transformers_dequantizes(
    block: tuple[int, int] | None, scales: str, method: str, scheme: str, tmp_path: Path
) -> None:
    write(tmp_path / "model", block, scales, method=method)
    theirs = AutoModel.from_pretrained(
        tmp_path / "model", quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16
    )
    found = sdquant.detect(tmp_path / "model")
    assert found.quant == scheme and not found.warnings
    model = sdquant.load_model(tmp_path / "model", progress=False)
    packs = dict(quantized(model))
    assert len(packs) == 7
    wanted = theirs.state_dict()
    for name, packed in packs.items():
        assert torch.equal(packed.spec.scheme.codec.decode(packed, torch.bfloat16), wanted[name]), name
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        ours, expected = (one.eval()(input_ids=ids).last_hidden_state.float() for one in (model, theirs))
    assert float((ours - expected).abs().max()) <= 0.02 * float(expected.abs().max())
    tensors = dict(sdquant.dequantize(tmp_path / "model", dtype=torch.bfloat16))
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("key", ["scale", "qscale_weight"])  # DeepSeek-V4's and Mistral Large 4's names
def test_other_names_of_scales_are_refused_by_name(key: str, tmp_path: Path) -> None:
    write(tmp_path / "model", (128, 128), "float", key=key)
    with pytest.raises(UnsupportedFileError, match=f"{key}' beside it"):
        sdquant.plan(tmp_path / "model")
