"""diffusers' modular pipelines, whose components are loaded and exchanged one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ModularPipeline

import sdquant
from sdquant import demo, offload
from sdquant.errors import SettingsError, UnsupportedFileError
from sdquant.nn import quantized

FLUX = demo.path("digits-flux")
BUDGET = 3_200_000  # bytes: less than the transformer in int8_convrot, more than its largest block and what is outside


def loaded() -> Any:
    pipe = ModularPipeline.from_pretrained(str(FLUX))
    pipe.load_components(dtype=torch.float32)
    return pipe


def layers(part: Any) -> list[str]:
    """The names of what is quantized, of which there is something."""
    names = [name for name, _ in quantized(part)]
    assert names
    return names


def drawn(pipe: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    images = pipe(
        prompt="a handwritten seven", num_inference_steps=2, generator=generator, height=32, width=32,
        output_type="pt", output="images",
    )  # fmt: skip
    assert isinstance(images, torch.Tensor)
    return images


@pytest.fixture(scope="module")
def pipe() -> Any:
    """Quantized; do not change it."""
    quantized_pipe = loaded()
    assert sdquant.quantize(quantized_pipe, "int8_convrot", progress=False) is quantized_pipe
    return quantized_pipe


def test_quantized_as_an_ordinary_pipeline_is(pipe: Any) -> None:
    ordinary = sdquant.load_model(FLUX, "int8_convrot", dtype="float32", progress=False)
    assert layers(pipe.transformer) == layers(ordinary.transformer)
    others = loaded()
    networks = ("transformer", "text_encoder", "text_encoder_2")
    others.update_components(**{name: getattr(ordinary, name) for name in networks})
    assert torch.equal(drawn(pipe), drawn(others))


def test_components_that_diffusers_loads_quantized(pipe: Any) -> None:
    others = ModularPipeline.from_pretrained(str(FLUX))
    mapping = {name: sdquant.Config("int8_convrot") for name in ("transformer", "text_encoder", "text_encoder_2")}
    others.load_components(dtype=torch.float32, quantization_config=mapping)
    assert layers(others.transformer) == layers(pipe.transformer)
    assert torch.equal(drawn(others), drawn(pipe))


def test_saved_by_diffusers(pipe: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="save_pretrained"):
        sdquant.save(pipe, tmp_path / "ours")
    pipe.save_pretrained(str(tmp_path / "theirs"), overwrite_modular_index=True)
    again = ModularPipeline.from_pretrained(str(tmp_path / "theirs"))
    again.load_components(dtype=torch.float32)
    assert torch.equal(drawn(again), drawn(pipe))
    for call in (sdquant.load_model, sdquant.detect, sdquant.verify):
        with pytest.raises(UnsupportedFileError, match="modular pipeline of diffusers"):
            call(tmp_path / "theirs")
    part = sdquant.load_model(tmp_path / "theirs" / "transformer", progress=False)
    assert layers(part) == layers(pipe.transformer)


@pytest.mark.parametrize(
    "mode", ["balanced", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("model", "sequential", "group"))]
)
def test_offloaded(pipe: Any, mode: str) -> None:
    """And a component that is exchanged, or a second pipeline of the same components, is offloaded, too."""
    expected = drawn(pipe)
    handle = offload.apply(pipe, mode, device="cpu", budget=BUDGET if mode == "balanced" else None)
    try:
        assert torch.equal(drawn(pipe), expected)
        second = ModularPipeline.from_pretrained(str(FLUX))
        second.update_components(**pipe.components)
        assert torch.equal(drawn(second), expected)
        vae = loaded().vae
        pipe.update_components(vae=vae)
        assert torch.equal(drawn(pipe), expected)
        assert mode != "balanced" or handle.counters.prefetched > 0
    finally:
        handle.remove()
    assert torch.equal(drawn(pipe), expected)
