"""Text encoders that compressed-tensors, HQQ and AutoRound wrote here, whole: what is read of them, and what they draw.

The libraries run in a process of their own (`hub_writers`), from `.libraries`; without one its cases are skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import sdquant
from sdquant import demo
from sdquant.errors import UnsupportedFileError
from sdquant.nn import quantized

from . import libraries
from .test_load_modes import images

ENCODER = "text_encoder_2"
# The scheme that it is here, by the way in which it was written.
DAILY = {"W4A16_ASYM": "hub-int4", "MXFP8": "mxfp8", "MXFP6A16": "hub-int7", "hqq 4 axis 0": "hub-int4"}
SLOW = {
    "W2A16": "hub-int2", "W3A16": "hub-int3", "W4A16": "hub-int4", "W4A16 of 32": "hub-int4", "W8A16": "hub-int8",
    "W5A16": "hub-int5", "W6A16": "hub-int6", "W6A16 asymmetric": "hub-int6", "W7A16": "hub-int7",
    "W8A8": "int8_row", "FP8": "fp8", "FP8_DYNAMIC": "fp8", "FP8_BLOCK": "fp8", "NVFP4": "comfy:nvfp4",
    "NVFP4A16": "comfy:nvfp4", "MXFP4": "mxfp4",
    **{f"hqq {bits} axis {axis}": f"hub-int{bits}" for bits in (8, 6, 5, 3, 2) for axis in (1, 0)},
    "hqq 4 axis 1": "hub-int4",
    "auto-round": "hub-int4", "auto-round asymmetric": "hub-int4", "auto-round gptq": "hub-int4",
    "auto-round awq": "hub-int4", "auto-round 2": "hub-int2", "auto-round 8": "hub-int8",
    "auto-round 5": "hub-int5", "auto-round 6": "hub-int6", "auto-round 7": "hub-int7",
    "auto-round fp8 blocks": "fp8", "auto-round mxfp8": "mxfp8",
}  # fmt: skip
REFUSED = {"W1A16": "1-bit codes", "hqq 1 axis 1": "1-bit codes"}
Get = Callable[[str], tuple[Path, dict[str, Any]]]


def _library(way: str) -> str:
    return {"hqq": "hqq", "auto-round": "auto_round"}.get(way.split()[0], "compressed_tensors")


def _cases(*tables: dict[str, str]) -> list[Any]:
    return [
        pytest.param(way, marks=[libraries.needs(_library(way))] + [pytest.mark.slow] * (way in SLOW))
        for table in tables
        for way in table
    ]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """The folder that a library wrote, and the weights that it makes of it."""
    places: dict[str, Path] = {}

    def get(way: str) -> tuple[Path, dict[str, Any]]:
        if way not in places:
            target = tmp_path_factory.mktemp("written")
            some = [one for one in (SLOW if way in SLOW else DAILY | REFUSED) if libraries.has(_library(one))]
            done = libraries.run_script("hub_writers.py", str(demo.path("digits-flux") / ENCODER), str(target), *some)
            assert not any(done.values()), done
            places.update({one: target / one.replace(" ", "-") for one in some})
        return places[way], load_file(f"{places[way]}.safetensors")

    return get


@pytest.mark.parametrize("way", _cases(DAILY, SLOW))
def test_weights(way: str, written: Get) -> None:
    """Bit for bit those of the library in the dtype that it computes in, HQQ's as near as its order of operations."""
    folder, wanted = written(way)
    scheme = (DAILY | SLOW)[way]
    seen = sdquant.detect(folder)
    assert (seen.quant, seen.warnings) == (scheme, []) and sdquant.verify(folder).quant == scheme
    floats = dict(sdquant.dequantize(folder))
    assert floats.keys() == load_file(next((demo.path("digits-flux") / ENCODER).glob("*.safetensors"))).keys()
    for name, want in wanted.items():
        if way.startswith("hqq"):
            assert (floats[name] - want).norm() <= 1e-6 * want.norm(), name
        else:
            assert torch.equal(floats[name].to(want.dtype), want), name


@pytest.mark.parametrize("way", _cases(DAILY, SLOW))
def test_it_draws_what_the_librarys_weights_draw(way: str, written: Get, tmp_path: Path) -> None:
    folder, wanted = written(way)
    options: dict[str, Any] = {"dtype": "float32", "progress": False}
    floats = Path(shutil.copytree(demo.path("digits-flux") / ENCODER, tmp_path / ENCODER))
    (file,) = floats.glob("*.safetensors")
    mine = {name: weight.float() for name, weight in sdquant.dequantize(folder)}
    save_file(mine | {name: w.float().contiguous() for name, w in wanted.items()}, file, metadata={"format": "pt"})
    drawn = []
    for part in (folder, floats):
        pipe = sdquant.load_model(demo.path("digits-flux"), parts={ENCODER: part}, **options)
        assert dict(quantized(pipe.text_encoder_2)).keys() == (wanted.keys() if part is folder else set())
        drawn.append(images(pipe, 1).astype(int))
    assert np.abs(drawn[0] - drawn[1]).max() <= 1


@pytest.mark.parametrize("way", _cases(REFUSED))
def test_what_is_not_read_is_refused_alike(way: str, written: Get) -> None:
    folder, _ = written(way)
    for ask in (sdquant.detect, sdquant.verify, sdquant.plan, sdquant.load_model, sdquant.dequantize):
        with pytest.raises(UnsupportedFileError, match=REFUSED[way]):
            ask(folder)  # type: ignore[operator]
