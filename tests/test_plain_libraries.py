"""What sdquant saves, in diffusers and transformers that have never heard of it: the same weights, or an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import sdquant
from sdquant import backends, demo
from sdquant.components import weight_parts
from sdquant.weights import quantized

# name -> model, and what of it is quantized to what. `wo` is a layer of T5 that transformers keeps in floats.
READ: Mapping[str, tuple[str, dict[str, Any]]] = {
    "sd nf4": ("digits-sd", {"quant": "nf4", "skip": ["to_q", "fc1"]}),
    "sd bnb-int8": ("digits-sd", {"quant": "bnb-int8"}),
    "flux nf4": ("digits-flux", {"quant": "nf4,double_quant", "skip": ["wo"]}),
    "flux bnb-int8": ("digits-flux", {"quant": "bnb-int8", "skip": ["wo", "proj_out"]}),
    "flux qint8": ("digits-flux", {"quant": "qint8", "components": ["transformer"]}),
    "flux qint4": ("digits-flux", {"quant": "qint4", "components": ["transformer"]}),
}
# transformers reads nothing that is quanto's, and not sdquant's; diffusers reads quanto's in linear layers alone.
REFUSED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "T5's wo in bnb-int8": ("digits-flux", {"quant": "bnb-int8", "components": ["text_encoder_2"]}),
    "CLIP in qint8": ("digits-sd", {"quant": "qint8", "components": ["text_encoder"]}),
    "all in int8": ("digits-flux", {"quant": "int8"}),
    "CLIP in int8": ("digits-sd", {"quant": "int8", "components": ["text_encoder"]}),
    "CLIP in sdnq-uint4": ("digits-sd", {"quant": "sdnq-uint4", "components": ["text_encoder"]}),
    "CLIP's table in nf4": ("digits-sd", {"quant": "nf4,embeddings", "components": ["text_encoder"]}),
    "convolutions in qint8": ("digits-sd", {"quant": "qint8", "components": ["unet"]}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pipelines above, saved."""
    made = {}
    for name, (model, options) in {**READ, **REFUSED}.items():
        made[name] = tmp_path_factory.mktemp("plain") / "pipeline"
        sdquant.save(sdquant.load_model(demo.path(model), **options, progress=False), made[name])
    return made


@pytest.fixture(scope="module")
def outcome(folders: dict[str, Path]) -> dict[str, Any]:
    """What became of them in a process without sdquant."""
    script = Path(__file__).with_name("plain_libraries.py")
    done = subprocess.run(
        [sys.executable, str(script), *map(str, folders.values())],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    by_path = json.loads(done.stdout.splitlines()[-1])
    return {name: by_path[str(path)] for name, path in folders.items()}


@pytest.mark.parametrize("name", READ)
def test_read_with_the_same_weights(name: str, folders: dict[str, Path], outcome: dict[str, Any]) -> None:
    assert "error" not in outcome[name], outcome[name]
    ours = weight_parts(sdquant.load_model(folders[name], progress=False))
    assert set(outcome[name]) == set(ours)
    packed_in = [part for part, module in ours.items() if dict(quantized(module))]
    assert len(packed_in) == len(READ[name][1].get("components") or set(ours) - {"vae"})
    for part, module in ours.items():
        theirs = load_file(outcome[name][part])
        for weight, packed in quantized(module):
            wanted = backends.of_scheme(packed.spec.scheme).decode(packed, torch.float32)
            # Each in its own order of the same few operations; a step of the codes is a thousand times that.
            torch.testing.assert_close(theirs.pop(weight), wanted, rtol=1e-2, atol=1e-5)
        floats = {key: tensor for key, tensor in module.named_parameters() if key in theirs}
        assert floats and all(torch.equal(theirs[key], tensor.float()) for key, tensor in floats.items())


@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_never_taken_for_floats(name: str, folders: dict[str, Path], outcome: dict[str, Any]) -> None:
    assert set(outcome[name]) == {"error"}
    assert outcome[name]["error"].startswith(("RuntimeError: You set `ignore_mismatched_sizes`", "ValueError: Unknown"))


@pytest.mark.filterwarnings("ignore:.*Quanto:FutureWarning")
@pytest.mark.parametrize("name", ["flux qint8", *(name for name in REFUSED if "sdnq" not in name)])
def test_read_after_import_sdquant(name: str, folders: dict[str, Path]) -> None:
    """And bitsandbytes' too, but that diffusers refuses it without a GPU."""
    from diffusers import DiffusionPipeline

    ours = weight_parts(sdquant.load_model(folders[name], progress=False))
    theirs = weight_parts(DiffusionPipeline.from_pretrained(folders[name], dtype=torch.bfloat16))
    for part, module in ours.items():
        assert_same(theirs[part], module)


def test_sdnq_without_its_package(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A text encoder in SDNQ's format, by sdquant's entry in the table, which SDNQ replaces where it is imported."""
    from transformers import CLIPTextModel
    from transformers.quantizers import auto

    from sdquant.integrations import transformers_quantizer as mine

    monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, "sdnq", mine.Quantizer)
    monkeypatch.setitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "sdnq", mine.SdnqConfig)
    folder = folders["CLIP in sdnq-uint4"] / "text_encoder"
    model = CLIPTextModel.from_pretrained(folder, dtype=torch.bfloat16)
    assert_same(model, sdquant.load_model(folder, progress=False))


def assert_same(one: nn.Module, other: nn.Module) -> None:
    """The same weights, bit for bit, in whichever layers."""
    mine, wanted = dict(quantized(one)), dict(quantized(other))
    assert set(mine) == set(wanted)
    for name, packed in mine.items():
        backend = backends.of_scheme(packed.spec.scheme)
        assert torch.equal(backend.decode(packed, torch.float32), backend.decode(wanted[name], torch.float32)), name
    floats = dict(one.named_parameters())
    for name, tensor in other.named_parameters():
        if name in floats and "packed_" not in name and name not in mine:
            assert torch.equal(tensor, floats[name]), name
