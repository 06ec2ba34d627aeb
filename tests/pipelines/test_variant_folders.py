"""Pipelines' folders with the weights of a variant alone: as diffusers loads them when it is told the variant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sdquant

from . import comparison
from .pipeline_factory import build, pipeline_class, silent

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
NAMES = ("StableDiffusionPipeline", "FluxPipeline", "StableDiffusion3Pipeline", "WanPipeline", "QwenImagePipeline")


def known(name: str, folder: Path, variant: str, dtype: torch.dtype) -> Any:
    with silent():
        return pipeline_class(name).from_pretrained(
            str(folder), variant=variant, torch_dtype=dtype, local_files_only=True
        )


def cells() -> list[Any]:
    return [
        pytest.param(name, variant, quant, marks=() if (name, variant, quant) == FAST else pytest.mark.slow)
        for name in NAMES
        for variant in DTYPES
        for quant in ("none", "nf4", "int8")
    ]


FAST = ("StableDiffusionPipeline", "bf16", "nf4")


@pytest.mark.parametrize(("name", "variant", "quant"), cells())
def test_a_folder_of_one_variant(name: str, variant: str, quant: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    with silent():
        build(name, dtype=DTYPES[variant]).save_pretrained(folder, variant=variant)
    assert list(folder.glob(f"*/*.{variant}.safetensors"))
    assert not list(folder.glob("*/model.safetensors")) and not list(
        folder.glob("*/diffusion_pytorch_model.safetensors")
    )
    theirs = known(name, folder, variant, DTYPES[variant])
    if quant == "none":
        for asked in ({}, {"variant": variant}):
            loaded = sdquant.load_model(folder, progress=False, **asked)
            comparison.same_pipeline(loaded, theirs)
            for part, module in comparison.modules(theirs).items():
                comparison.same_tensors(comparison.modules(loaded)[part], module)
        assert not sdquant.verify(folder).prequantized
        return
    plan = sdquant.plan(folder, quant, "balanced")
    loaded = comparison.streamed(folder, quant, plan)
    loaded.sdquant.offload.remove()
    assert comparison.quantize_known(loaded, theirs) == sum(len(part.weights) for part in plan.components) > 0
