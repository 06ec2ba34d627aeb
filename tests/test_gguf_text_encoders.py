"""Text encoders in GGUF, as llama.cpp writes them: written with the package gguf, held against transformers."""

from __future__ import annotations

import copy
import json
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
from .test_language_encoder_files import Case, _hidden

case_of = files.case_of  # the fixture
KEYS = json.loads(Path(__file__).parent.joinpath("backends/golden/gguf_text_encoder_keymap.json").read_text())["archs"]
MAPS = {"umt5_xxl": "umt5 (UMT5EncoderModel)", "qwen_3_4b": "qwen3 (Qwen3Model, Z-Image, Flux.2 klein)"}


def _write(case: Case, name: str, path: Path, kind: gguf.GGMLQuantizationType | None) -> dict[str, np.ndarray]:
    """Write a file under llama.cpp's names; return what each tensor is worth, by transformers' names."""
    row = next(one for title, one in KEYS.items() if title.startswith(MAPS[name].split(" ")[0]))
    writer = gguf.GGUFWriter(path, row["general.architecture"])
    state = {key: tensor.float().numpy() for key, tensor in case.model.state_dict().items()}
    worth = {}
    for key, one in row["tensors"].items():
        values = state[one["transformers"]]
        if kind is not None and values.ndim == 2 and "rel_b" not in key:
            data = gguf.quants.quantize(values, kind)
            writer.add_tensor(key, data, raw_dtype=kind)
            worth[one["transformers"]] = gguf.quants.dequantize(data, kind)
        else:
            writer.add_tensor(key, values)
            worth[one["transformers"]] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return worth


@pytest.mark.parametrize("kind", [None, gguf.GGMLQuantizationType.Q8_0], ids=["f32", "q8_0"])
@pytest.mark.parametrize("name", MAPS)
def test_as_transformers_has_it(
    name: str,
    kind: Any,
    case_of: Callable[[str], Case],
    tmp_path: Path,
) -> None:
    case, file = case_of(name), tmp_path / "model.gguf"
    worth = _write(case, name, file, kind)
    seen = sdquant.detect(file)
    assert (seen.component, seen.family) == ("text_encoder", {"umt5_xxl": "umt5", "qwen_3_4b": "qwen3"}[name])
    with pytest.raises(MissingComponentError, match="base="):
        sdquant.load_model(file, progress=False)
    pipe = sdquant.load_model(case.base, parts={"text_encoder": file}, dtype="float32", progress=False)
    packs = dict(quantized(pipe.text_encoder))
    assert bool(packs) == (kind is not None)
    for key, packed in packs.items():
        assert np.array_equal(packed.spec.scheme.codec.decode(packed, torch.float32).numpy(), worth[key]), key
    floats = {key: tensor for key, tensor in plain(pipe.text_encoder).items() if key in worth}
    assert {*floats, *packs} >= worth.keys()
    assert all(np.array_equal(tensor.float().numpy(), worth[key]) for key, tensor in floats.items())
    model = copy.deepcopy(case.model).float()
    state = model.state_dict()
    model.load_state_dict({**state, **{key: torch.from_numpy(value.copy()) for key, value in worth.items()}})
    with torch.no_grad():
        for mine, theirs in zip(_hidden(pipe.text_encoder), _hidden(model), strict=True):
            assert torch.allclose(mine, theirs, atol=2e-2 if kind is not None else 1e-5)
