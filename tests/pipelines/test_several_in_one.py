"""Components that are several models, each in a folder of its own: ControlNets, and adapters of text to image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sdquant
from sdquant import offload
from sdquant.errors import UnsupportedFileError
from sdquant.nn.weights import quantized

from . import comparison
from .pipeline_factory import build, silent
from .rows import Given

NAME = "StableDiffusionControlNetPipeline"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with silent():
        build(NAME, {"controlnet": [Given("ControlNetModel")] * 2}).save_pretrained(tmp_path / "several")
    assert (tmp_path / "several" / "controlnet_1" / "config.json").is_file()
    return tmp_path / "several"


def answers(several: Any) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=drawn)

    given = {
        "sample": noise(1, 4, 8, 8), "timestep": torch.tensor(10), "encoder_hidden_states": noise(1, 5, 64),
        "controlnet_cond": [noise(1, 3, 16, 16)] * 2, "conditioning_scale": [1.0, 0.5],
        "added_cond_kwargs": {"text_embeds": noise(1, 32), "time_ids": noise(1, 6)}, "return_dict": False,
    }  # fmt: skip
    with torch.no_grad():
        down, mid = several(**given)
    return [*down, mid]


def test_a_folder_is_no_bad_one_and_the_way_out_is_told(folder: Path) -> None:
    for ask in (sdquant.load_model, sdquant.detect, sdquant.verify, sdquant.plan):
        with pytest.raises(UnsupportedFileError, match="first of several ControlNetModels") as caught:
            ask(folder)
        assert "from_pretrained" in caught.value.fix and "offload.apply" in caught.value.fix


@pytest.mark.slow
def test_adapters_are_told_as_well(tmp_path: Path) -> None:
    with silent():
        build("StableDiffusionAdapterPipeline", {"adapter": [Given("T2IAdapter")] * 2}).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedFileError, match="first of several T2IAdapters"):
        sdquant.load_model(tmp_path)


@pytest.mark.parametrize("quant", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_the_ways_out(quant: str, folder: Path, tmp_path: Path) -> None:
    """What diffusers has loaded, quantized and offloaded; and each folder alone. Both are the same, and are saved."""
    from diffusers import MultiControlNetModel

    pipe = comparison.reference(folder, NAME)
    floats = answers(pipe.controlnet)
    sdquant.quantize(pipe, quant, components=("unet", "controlnet"), progress=False)
    wanted = answers(pipe.controlnet)
    for one, other in zip(wanted, floats, strict=True):
        assert comparison.snr(one, other) > 10
    alone = [sdquant.load_model(folder / name, quant, progress=False) for name in ("controlnet", "controlnet_1")]
    several = MultiControlNetModel(alone)
    assert all(torch.equal(one, other) for one, other in zip(answers(several), wanted, strict=True))

    total = offload.weight_bytes(*comparison.modules(pipe).values())
    handle = offload.apply(pipe, "balanced", device="cpu", budget=int(0.8 * total))
    assert all(torch.equal(one, other) for one, other in zip(answers(pipe.controlnet), wanted, strict=True))
    assert handle.report()["fetches"] > 0
    handle.remove()

    with silent():
        pipe.save_pretrained(tmp_path / "saved")
    names = ("controlnet", "controlnet_1")
    again = MultiControlNetModel([sdquant.load_model(tmp_path / "saved" / name, progress=False) for name in names])
    assert any(True for _ in quantized(again))
    assert all(torch.equal(one, other) for one, other in zip(answers(again), wanted, strict=True))
