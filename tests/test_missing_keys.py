"""What a model's class says of tensors that its files lack, or have too many of, is heeded: a folder that the library
loads without a word loads here, in floats and quantized, with the library's values for what is not there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import sdquant
from sdquant.cli import main
from sdquant.errors import BadFileError

from .entry_points import answers

TE_WEIGHTS = "model.safetensors"
LACKED = "embeddings.mask_token"


def sapiens() -> Any:
    """A model whose mask token its files may lack; the library makes zeros of it."""
    config = transformers.Sapiens2Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=96,
        image_size=32, patch_size=8, use_mask_token=True,
    )  # fmt: skip
    return transformers.Sapiens2Model(config)


def t5() -> Any:
    """A model whose files may have its decoder, too."""
    config = transformers.T5Config(vocab_size=64, d_model=64, d_kv=32, d_ff=96, num_layers=2, num_heads=2)
    return transformers.T5EncoderModel(config)


def saved(model: Any, folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.05)
    model.save_pretrained(folder)
    tensors = load_file(folder / TE_WEIGHTS)
    change(tensors)
    save_file(tensors, folder / TE_WEIGHTS, metadata={"format": "pt"})
    return folder


@pytest.fixture
def lacking(tmp_path: Path) -> Path:
    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors[LACKED]

    return saved(sapiens(), tmp_path / "model", drop)


@pytest.mark.parametrize("quant", [None, "int8", "nf4"])
def test_what_the_library_makes_is_made(quant: str | None, lacking: Path, tmp_path: Path) -> None:
    theirs = transformers.Sapiens2Model.from_pretrained(lacking)
    assert set(answers(lacking).values()) == {None}
    model = sdquant.load_model(lacking, quant, runtime="plain" if quant else None, progress=False)
    token = model.get_parameter(LACKED)
    assert torch.equal(token, theirs.get_parameter(LACKED)) and token.dtype == theirs.get_parameter(LACKED).dtype
    norm = next(name for name, _ in theirs.named_parameters() if "norm" in name)
    assert torch.equal(model.get_parameter(norm), theirs.get_parameter(norm))  # and nothing else is made anew
    assert not any(hasattr(one, "_is_hf_initialized") for one in model.parameters())
    x = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y, wanted = model(x).last_hidden_state, theirs(x).last_hidden_state
    assert bool(y.isfinite().all()) and (quant is not None or torch.equal(y, wanted))
    sdquant.save(model, tmp_path / "saved")
    again = sdquant.load_model(tmp_path / "saved", progress=False)
    assert torch.equal(again.get_parameter(LACKED), token)


def test_in_the_dtype_of_the_rest(lacking: Path) -> None:
    model = sdquant.load_model(lacking, dtype="bfloat16", progress=False)
    assert model.get_parameter(LACKED).dtype == torch.bfloat16


def test_a_folder_that_is_quantized_to_disk(lacking: Path, tmp_path: Path) -> None:
    assert main(["quantize", str(lacking), str(tmp_path / "out"), "-q", "int8", "--no-progress"]) == 0
    sdquant.verify(tmp_path / "out")
    model = sdquant.load_model(tmp_path / "out", progress=False)
    assert not model.get_parameter(LACKED).any()


def test_what_the_class_does_not_name_has_to_be_there(lacking: Path) -> None:
    tensors = load_file(lacking / TE_WEIGHTS)
    del tensors[next(name for name in tensors if "cls_token" in name)]
    save_file(tensors, lacking / TE_WEIGHTS, metadata={"format": "pt"})
    found = answers(lacking)
    assert all(isinstance(error, BadFileError) and "1 of the model's tensors" in str(error) for error in found.values())


def test_what_the_class_expects_beside_is_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["decoder.block.0.layer.0.SelfAttention.q.weight"] = torch.zeros(64, 64)

    folder = saved(t5(), tmp_path / "model", add)
    with caplog.at_level(logging.WARNING):
        assert set(answers(folder).values()) == {None}
        sdquant.load_model(folder, "int8", progress=False)
    assert not [record for record in caplog.records if "does not use" in record.getMessage()]
