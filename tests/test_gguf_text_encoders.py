"""Text encoders in GGUF, as llama.cpp and others write them, held against transformers with the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import sdquant
from sdquant.errors import MissingComponentError
from sdquant.nn.weights import plain, quantized

from . import test_language_encoder_files as files
from .gguf_text_encoders import ARCH, bare, write_text
from .test_language_encoder_files import FILES, Case, _hidden

case_of = files.case_of  # the fixture
Q8_0 = gguf.GGMLQuantizationType.Q8_0
# By case: the architecture, and what the user hears.
ROWS: dict[str, tuple[Any, str]] = {
    "umt5_xxl": (ARCH.T5ENCODER, ""),
    "qwen_3_4b": (ARCH.QWEN3, ""),
    "llava_llama3": (ARCH.LLAMA, ""),
    "mistral_3_small_flux2": (ARCH.MISTRAL3, "without its vision:"),
    "gemma_2_2b": (ARCH.GEMMA2, ""),
    "gemma_3_12B": (ARCH.GEMMA3, "without its vision:"),
}


def _compare(encoder: Any, case: Case, worth: dict[str, np.ndarray], tolerance: float) -> None:
    """Hold each weight against what it is worth, and hidden states against transformers' of the same weights."""
    read = {name: packed.spec.scheme.codec.decode(packed, torch.float32) for name, packed in quantized(encoder)}
    read |= plain(encoder)
    there = {bare(name): tensor.float().numpy() for name, tensor in read.items()}
    for name in worth.keys() & there.keys():
        assert np.array_equal(there[name], worth[name]), name
    assert worth.keys() - there.keys() <= {"lm_head.weight"}
    model = copy.deepcopy(case.model).float()
    state = {name: torch.from_numpy(worth.get(bare(name), one.numpy())) for name, one in model.state_dict().items()}
    model.load_state_dict(state)
    for mine, theirs in zip(_hidden(encoder), _hidden(model), strict=True):
        assert torch.allclose(mine, theirs, atol=tolerance)


@pytest.mark.parametrize("kind", [None, Q8_0], ids=["f32", "q8_0"])
@pytest.mark.parametrize("name", ROWS)
def test_as_transformers_has_it(
    name: str, kind: Any, case_of: Callable[[str], Case], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (arch, remark), case, file = ROWS[name], case_of(name), tmp_path / "model.gguf"
    worth = write_text(case.model, file, arch, kind)
    seen = sdquant.detect(file)
    assert (seen.component, seen.family) == ("text_encoder", FILES[name].family)
    with pytest.raises(MissingComponentError, match="base="):
        sdquant.load_model(file, progress=False)
    pipe = sdquant.load_model(case.base, parts={"text_encoder": file}, dtype="float32", progress=False)
    remarks = [record.getMessage() for record in caplog.records if record.name.startswith("sdquant")]
    assert len(remarks) == bool(remark) and all(remark in one for one in remarks)
    # Gemma multiplies what it looks up, in a layer of its own.
    floats = ("lm_head", "rel", "embed_tokens" if "gemma" in name else "lm_head")
    matrices = [key for key, one in worth.items() if one.ndim == 2 and not any(word in key for word in floats)]
    assert len(dict(quantized(pipe.text_encoder))) == (len(matrices) if kind is not None else 0)
    _compare(pipe.text_encoder, case, worth, 2e-2 if kind is not None else 1e-5)
