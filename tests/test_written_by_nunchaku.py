"""Whole files packed by DeepCompressor, which makes Nunchaku's: what is read of them, and what they draw.

It runs in a process of its own (`nunchaku_writer`), from `.libraries`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import sdquant
from sdquant import demo
from sdquant.nn import quantized

from . import libraries
from .backends import nunchaku_layers
from .test_load_modes import images

pytestmark = libraries.needs("deepcompressor")
SCHEMES = {"int4": "svdquant_w4a4", "nvfp4": "svdquant_nvfp4"}
OPTIONS: dict[str, Any] = {"dtype": "float32", "progress": False}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of each way, and the weights that these stand for."""
    target, flux = tmp_path_factory.mktemp("written"), demo.path("digits-flux")
    for part, ways in (("transformer", list(SCHEMES)), ("text_encoder_2", ["t5"])):
        done = libraries.run_script("nunchaku_writer.py", str(flux / part), str(target), *ways)
        assert not any(done.values()), done
    return target


def _same(path: Path, floats: Path) -> None:
    """Weights and biases, which one sum in another order separates."""
    mine, wanted = dict(sdquant.dequantize(path)), load_file(floats)
    assert mine.keys() == wanted.keys()
    for name, want in wanted.items():
        assert (mine[name] - want).norm() <= 1e-5 * want.norm(), name


def _draws(part: Path, floats: Path, tmp_path: Path, kind: str) -> None:
    """What the weights draw as floats."""
    place = Path(shutil.copytree(demo.path("digits-flux") / kind, tmp_path / kind))
    (file,) = place.glob("*.safetensors")
    save_file(load_file(floats), file, metadata={"format": "pt"})
    drawn = [
        images(sdquant.load_model(demo.path("digits-flux"), parts={kind: one}, **OPTIONS), 1).astype(int)
        for one in (part, place)
    ]
    assert np.abs(drawn[0] - drawn[1]).max() <= 1


@pytest.mark.parametrize("way", ["int4", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_a_folder_and_a_single_file(way: str, written: Path, tmp_path: Path) -> None:
    folder, floats = written / way / "flux", written / f"{way}.safetensors"
    seen = sdquant.detect(folder)
    assert (seen.family, seen.quant, seen.warnings) == ("flux", SCHEMES[way], [])
    assert sdquant.verify(folder).quant == SCHEMES[way]
    _same(folder, floats)
    _draws(folder, floats, tmp_path, "transformer")
    single = tmp_path / f"svdq-{way}_r32.safetensors"  # merged as Nunchaku's merge_safetensors does
    parts = [load_file(folder / f"{name}.safetensors") for name in ("unquantized_layers", "transformer_blocks")]
    said = nunchaku_layers.metadata(json.loads((folder / "config.json").read_text()), nvfp4=way == "nvfp4")
    texts = {key: text if isinstance(text, str) else json.dumps(text) for key, text in said.items()}
    save_file(parts[0] | parts[1], single, texts)
    assert sdquant.verify(single).quant == SCHEMES[way]
    again = dict(sdquant.dequantize(single))
    assert all(torch.equal(again[name], tensor) for name, tensor in sdquant.dequantize(folder))
    model = sdquant.load_model(single, **OPTIONS)
    assert dict(quantized(model)).keys() == dict(quantized(sdquant.load_model(folder, **OPTIONS))).keys()


@pytest.mark.slow
def test_its_text_encoder(written: Path, tmp_path: Path) -> None:
    path = written / "t5" / "awq-int4-t5.safetensors"
    seen = sdquant.verify(path)
    assert (seen.family, seen.quant, seen.warnings) == ("t5", "awq_w4a16", [])
    _same(path, written / "t5.safetensors")
    _draws(path, written / "t5.safetensors", tmp_path, "text_encoder_2")
