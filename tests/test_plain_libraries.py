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
from sdquant import demo
from sdquant.models.pipelines import weight_parts
from sdquant.nn.weights import quantized

from .plain_libraries import picture

# One worker takes all of these: what they share takes seconds to make.
pytestmark = pytest.mark.xdist_group("plain libraries")

# name -> model, and what of it is quantized to what.
READ: Mapping[str, tuple[str, dict[str, Any]]] = {
    "sd nf4": ("digits-sd", {"quant": "nf4"}),
    "sd bnb-int8": ("digits-sd", {"quant": "bnb-int8"}),
    "flux nf4": ("digits-flux", {"quant": "nf4,double_quant"}),
    "flux fp4": ("digits-flux", {"quant": "fp4"}),
    "flux bnb-int8": ("digits-flux", {"quant": "bnb-int8", "skip": ["proj_out"]}),
    "flux qint8": ("digits-flux", {"quant": "qint8", "components": ["transformer"]}),
}
# These take `portable=True`.
PORTABLE: Mapping[str, tuple[str, dict[str, Any]]] = {
    "all of sd in qint8": ("digits-sd", {"quant": "qint8"}),
    "all of sd in qint2": ("digits-sd", {"quant": "qint2"}),
    "all of flux in qint4": ("digits-flux", {"quant": "qint4"}),
    # diffusers knows a layer of quanto's by the end of its path: every to_q has to be floats.
    "to_q of one block left out": ("digits-flux", {"quant": "qint8", "skip": ["transformer_blocks.0.attn.to_q"]}),
    "T5's wo too": ("digits-flux", {"quant": "nf4,wo"}),
    "convolutions and tables in nf4": ("digits-sd", {"quant": "nf4,embeddings", "runtime": "plain", "skip": ["to_q"]}),
    "two schemes": ("digits-sd", {"quant": {"unet": "bnb-int8", "text_encoder": "qint8"}}),
}
SDNQ = "CLIP in sdnq-uint4"
# transformers reads nothing that is quanto's, and not sdquant's; diffusers reads quanto's in linear layers alone.
REFUSED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "T5's wo in bnb-int8": ("digits-flux", {"quant": "bnb-int8,wo", "components": ["text_encoder_2"]}),
    "CLIP in qint8": ("digits-sd", {"quant": "qint8", "components": ["text_encoder"]}),
    "all in int8": ("digits-flux", {"quant": "int8"}),
    "CLIP in int8": ("digits-sd", {"quant": "int8", "components": ["text_encoder"]}),
    SDNQ: ("digits-sd", {"quant": "sdnq-uint4", "components": ["text_encoder"]}),
    "CLIP's table in nf4": ("digits-sd", {"quant": "nf4,embeddings", "components": ["text_encoder"]}),
    "convolutions in qint8": ("digits-sd", {"quant": "qint8", "components": ["unet"]}),
}


@pytest.fixture(scope="module")
def pipes(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The pipelines above that a test of this run asks for: each takes seconds to make and to read."""
    here = [item for item in request.session.items if item.path == request.path]
    names = {item.callspec.params["name"] for item in here if hasattr(item, "callspec")} | {SDNQ}
    rows = {name: row for name, row in {**READ, **PORTABLE, **REFUSED}.items() if name in names}
    return {
        name: sdquant.load_model(demo.path(model), **options, progress=False) for name, (model, options) in rows.items()
    }


@pytest.fixture(scope="module")
def folders(pipes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pipelines above, saved."""
    places = {name: tmp_path_factory.mktemp("plain") / "pipeline" for name in pipes}
    return {name: sdquant.save(pipes[name], place, portable=name in PORTABLE) for name, place in places.items()}


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


@pytest.mark.parametrize("name", [*READ, *PORTABLE])
def test_read_with_the_same_weights(name: str, pipes: dict[str, Any], outcome: dict[str, Any]) -> None:
    """Those of the pipeline that was saved, whether they were written as codes or as floats."""
    assert "error" not in outcome[name], outcome[name]
    ours = weight_parts(pipes[name])
    assert set(outcome[name]) == {*ours, "picture"}
    for part, module in ours.items():
        theirs = load_file(outcome[name][part])
        for weight, packed in quantized(module):
            wanted = packed.spec.scheme.codec.decode(packed, torch.float32)
            # Each in its own order of the same few operations; a step of the codes is a thousand times that.
            torch.testing.assert_close(theirs.pop(weight), wanted, rtol=1e-2, atol=1e-5)
        floats = {key: tensor for key, tensor in module.named_parameters() if key in theirs}
        assert floats and all(torch.equal(theirs[key], tensor.float()) for key, tensor in floats.items())


@pytest.mark.parametrize("name", [*READ, *PORTABLE])
def test_the_same_picture(name: str, folders: dict[str, Path], outcome: dict[str, Any]) -> None:
    """As sdquant draws with the folder, to the last bit: both run the libraries' own modules."""
    theirs = load_file(outcome[name]["picture"])["picture"]
    assert torch.equal(theirs, picture(sdquant.load_model(folders[name], runtime="library", progress=False)))
    assert theirs.std() > 0


@pytest.mark.parametrize("name", [*READ, *PORTABLE])
def test_still_quantized(name: str, pipes: dict[str, Any], folders: dict[str, Path]) -> None:
    """All but text encoders in quanto, of which transformers reads nothing: those are floats."""
    for part, module in weight_parts(pipes[name]).items():
        schemes = {packed.spec.scheme.name for _, packed in quantized(module)}
        config = json.loads((folders[name] / part / "config.json").read_text()).get("quantization_config") or {}
        known = {"quanto" if scheme.startswith("q") else "bitsandbytes" for scheme in schemes}
        said = {config["quant_method"]} if config else set()
        assert said == known - ({"quanto"} if "text" in part else set())
        held = dict(quantized(sdquant.load_model(folders[name] / part, progress=False)))
        assert bool(held) == bool(config) and set(held) <= set(dict(quantized(module)))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_never_taken_for_floats(name: str, folders: dict[str, Path], outcome: dict[str, Any]) -> None:
    assert set(outcome[name]) == {"error"}
    assert outcome[name]["error"].startswith(("RuntimeError: You set `ignore_mismatched_sizes`", "ValueError: Unknown"))


@pytest.mark.filterwarnings("ignore:.*Quanto:FutureWarning")
@pytest.mark.parametrize("name", ["flux qint8", *(name for name in REFUSED if "sdnq" not in name)])
def test_read_after_import_sdquant(name: str, folders: dict[str, Path]) -> None:
    """And bitsandbytes' too, but that diffusers refuses it without a GPU: see `test_loaders_of_libraries`."""
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
    folder = folders[SDNQ] / "text_encoder"
    model = CLIPTextModel.from_pretrained(folder, dtype=torch.bfloat16)
    assert_same(model, sdquant.load_model(folder, progress=False))


def assert_same(one: nn.Module, other: nn.Module) -> None:
    """The same weights, bit for bit, in whichever layers."""
    mine, wanted = dict(quantized(one)), dict(quantized(other))
    assert set(mine) == set(wanted)
    for name, packed in mine.items():
        backend = packed.spec.scheme.codec
        assert torch.equal(backend.decode(packed, torch.float32), backend.decode(wanted[name], torch.float32)), name
    floats = dict(one.named_parameters())
    for name, tensor in other.named_parameters():
        if name in floats and "packed_" not in name and name not in mine:
            assert torch.equal(tensor, floats[name]), name
