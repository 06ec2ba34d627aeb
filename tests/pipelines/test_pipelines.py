"""Every pipeline class of diffusers, tiny: whole, and in nf4 and int8 with balanced offload, as diffusers loads it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

import sdquant
from sdquant.errors import IncompatibleError, UnsupportedFileError

from . import comparison
from .pipeline_factory import build, names, silent
from .rows import FAST, FLOATS, LOST, MISSING

# What diffusers does itself while it makes a pipeline, which load_model lets through: schedulers that give numpy
# tensors (Helios, Shap-E), and classes that it has older names for.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v(ersion )?1.0.0:FutureWarning"),
]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some classes look for a tokenizer on the hub, again and again."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every pipeline class, where slow tests are asked for: to list them imports all of diffusers."""
    if "pipeline" in metafunc.fixturenames:
        asked = metafunc.config.getoption("markexpr") != "not slow"
        listed = [name for name in names() if name not in MISSING and name not in LOST] if asked else []
        metafunc.parametrize("pipeline", listed)


@pytest.mark.slow
def test_the_rows_name_pipeline_classes_of_diffusers() -> None:
    """A class that diffusers adds has a slow test from then on, which fails until it can be built, or has a row."""
    assert {*FAST, *FLOATS, *MISSING, *LOST} <= set(names())


def check(name: str, folder: Path, quants: Sequence[str]) -> None:
    """See the module."""
    with silent():
        build(name).save_pretrained(folder)
    known = comparison.reference(folder, name)
    check_whole(folder, known)
    if name in FLOATS:
        with pytest.raises(IncompatibleError, match=r"no weight that would be quantized\. Choose other components"):
            sdquant.load_model(folder, quants[0], progress=False)
        return
    for quant in quants:
        check_quantized(folder, quant, comparison.reference(folder, name))  # as no weight norm can be copied


def check_whole(folder: Path, known: Any) -> None:
    """What `load_model` makes of the folder is what diffusers makes of it, and the other readers take it for that."""
    loaded = sdquant.load_model(folder, progress=False)
    comparison.same_pipeline(loaded, known)
    for part, module in comparison.modules(known).items():
        comparison.same_config(comparison.modules(loaded)[part], module)
        comparison.same_tensors(comparison.modules(loaded)[part], module)
    assert not sdquant.detect(folder).prequantized
    assert not sdquant.verify(folder).prequantized


def check_quantized(folder: Path, quant: str, known: Any) -> None:
    """Each quantized weight is diffusers' own one packed, the rest is as it was, and every component computes so."""
    plan = sdquant.plan(folder, quant, "balanced")
    for src in plan.detected.sources.values():  # each was held against its model
        assert src.layers or not any(name.endswith(".weight") for name in src.tensors)
    loaded = comparison.streamed(folder, quant, plan)
    results = {}
    for name, part in comparison.modules(loaded).items():
        given = comparison.inputs(part)
        if given is not None:
            results[name] = given, comparison.outputs(part, given)
    loaded.sdquant.offload.remove()
    count = comparison.quantize_known(loaded, known)
    assert count == sum(len(part.weights) for part in plan.components)
    assert count
    for name, (given, mine) in results.items():
        theirs = comparison.outputs(comparison.modules(known)[name], given)
        assert [(t.shape, t.dtype) for t in mine] == [(t.shape, t.dtype) for t in theirs], name
        for one, other in zip(mine, theirs, strict=True):
            assert torch.isfinite(other).all(), name
            assert comparison.snr(one, other) > comparison.LEAST_SNR, name


@pytest.mark.parametrize(("name", "quant"), FAST.items())
def test_a_pipeline_of_today(name: str, quant: str, tmp_path: Path) -> None:
    check(name, tmp_path / name, (quant,))


@pytest.mark.slow
def test_a_pipeline(pipeline: str, disk: Path) -> None:
    check(pipeline, disk / pipeline, ("nf4", "int8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOST)
def test_a_pipeline_that_diffusers_cannot_find_again_is_refused(name: str, disk: Path) -> None:
    with silent():
        build(name).save_pretrained(disk / name)
    with pytest.raises((AttributeError, ValueError)):
        comparison.reference(disk / name, name)
    with pytest.raises(UnsupportedFileError, match="which diffusers and transformers do not have"):
        sdquant.load_model(disk / name, progress=False)
