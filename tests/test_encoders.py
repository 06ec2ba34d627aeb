"""The models that diffusers' pipelines take from transformers, whose names in files are often others than the model's:
loaded, quantized in every way, saved, verified and planned, from folders that `save_pretrained` wrote."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sdquant
from sdquant.errors import BadFileError, IncompatibleError
from sdquant.kernels.prepack import as_filed
from sdquant.models.components import quiet
from sdquant.nn.weights import plain, quantized

from . import encoders

SCHEMES = ("nf4", "int8", "qint8", "sdnq-int8", "fp8", "bnb-int8")
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """folder_of(name): what `save_pretrained` writes of a model. Do not change it."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("encoders") / name
            with quiet():
                encoders.model(name).save_pretrained(made[name])
        return made[name]

    return get


def each(*, schemes: tuple[str, ...] = ("",)) -> Any:
    """For each model, and each scheme; on every day the usual ones, in a scheme or two."""
    return pytest.mark.parametrize(
        ("name", "scheme"),
        [
            pytest.param(
                name,
                scheme,
                marks=() if scheme in row.usual else pytest.mark.slow,
                id=f"{name}-{scheme}" if scheme else name,
            )
            for name, row in encoders.ROWS.items()
            if not row.apart
            for scheme in schemes
        ],
    )


def _load(path: Path, *args: Any, **values: Any) -> Any:
    return sdquant.load_model(path, *args, progress=False, **values)


def _theirs(name: str, folder: Path) -> Any:
    with quiet():
        return encoders.kind(name).from_pretrained(folder)


def _assert_same(one: Any, other: Any) -> None:
    state, wanted = one.state_dict(), other.state_dict()
    assert state.keys() == wanted.keys()
    assert not [key for key in wanted if not torch.equal(state[key], wanted[key])]


def test_every_class_of_diffusers_has_a_config() -> None:
    """Another one that a later diffusers names needs a row in `encoders.ROWS`."""
    assert encoders.named().keys() <= encoders.ROWS.keys()


@each()
def test_floats(name: str, scheme: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folder_of(name)
    wanted = _theirs(name, folder)
    assert sdquant.plan(folder).bytes > 0
    sdquant.verify(folder)
    model = _load(folder)
    _assert_same(model, wanted)
    sdquant.save(model, tmp_path / "saved")
    with quiet():
        model.save_pretrained(tmp_path / "theirs")
    original = load_file(folder / FILE).keys()
    for again in ("saved", "theirs"):
        assert load_file(tmp_path / again / FILE).keys() == original
        _assert_same(_load(tmp_path / again), wanted)
        _assert_same(_theirs(name, tmp_path / again), wanted)


def _packs(model: Any) -> dict[str, dict[str, torch.Tensor]]:
    return {name: dict(as_filed(packed).parts) for name, packed in quantized(model)}


def _assert_same_weights(one: Any, other: Any) -> None:
    mine, wanted = _packs(one), _packs(other)
    assert mine.keys() == wanted.keys() and mine
    for name, parts in wanted.items():
        assert all(torch.equal(mine[name][part], tensor) for part, tensor in parts.items()), name
    floats, theirs = plain(one), plain(other)
    assert floats.keys() == theirs.keys()
    assert all(torch.equal(floats[name], tensor) for name, tensor in theirs.items())


@each(schemes=SCHEMES)
def test_quantized(name: str, scheme: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folder_of(name)
    if encoders.ROWS[name].bare:
        for call in (sdquant.plan, _load):
            with pytest.raises(IncompatibleError, match=r"its layer \(Conv1D\) cannot be quantized"):
                call(folder, scheme)
        return
    made = sdquant.plan(folder, scheme, runtime="plain")
    model = _load(folder, scheme, runtime="plain")
    assert _packs(model).keys() == {weight.name for weight in made.components[0].weights}
    _assert_same_weights(_load(folder, scheme, runtime="plain", mode="post"), model)
    with quiet():
        asked = encoders.kind(name).from_pretrained(folder, quantization_config=sdquant.Config(scheme))
    assert _packs(asked).keys() == _packs(model).keys()
    _assert_same_weights(asked, model)
    sdquant.save(model, tmp_path / "saved")
    with quiet():
        model.save_pretrained(tmp_path / "theirs")
        asked.save_pretrained(tmp_path / "asked")
    for again in ("saved", "theirs", "asked"):
        sdquant.verify(tmp_path / again)
        assert len(sdquant.plan(tmp_path / again).components[0].weights) == len(made.components[0].weights)
        _assert_same_weights(_load(tmp_path / again, runtime="plain"), model)
        if not scheme.startswith("sdnq"):  # which the sdnq package reads itself, where it is imported
            with quiet():
                theirs = encoders.kind(name).from_pretrained(tmp_path / again)
            _assert_same_weights(theirs, model)


def test_a_missing_tensor_is_said_by_the_plan(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = _changed(folder_of("Qwen2_5_VLForConditionalGeneration"), tmp_path / "less", lambda state: state.popitem())
    for call in (sdquant.plan, _load, sdquant.verify):
        with pytest.raises(BadFileError, match="it lacks 1 of the model's tensors, the first is 'model"):
            call(folder)


def test_another_shape_is_said_by_the_plan(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    def widen(state: dict[str, torch.Tensor]) -> None:
        state["model.norm.weight"] = torch.ones(65)

    folder = _changed(folder_of("Qwen2_5_VLForConditionalGeneration"), tmp_path / "other", widen)
    for call in (sdquant.plan, _load, sdquant.verify):
        with pytest.raises(BadFileError, match=r"'model.norm.weight' .*shape \[65\], but the model expects \[64\]"):
            call(folder)


def test_what_the_model_has_no_place_for(
    folder_of: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def more(state: dict[str, torch.Tensor]) -> None:
        state["visual.left.weight"] = torch.ones(64, 64)

    source = folder_of("Qwen2_5_VLForConditionalGeneration")
    folder = _changed(source, tmp_path / "more", more)
    made = sdquant.plan(folder, "nf4")
    assert made.bytes == sdquant.plan(source, "nf4").bytes
    line = f"{folder} contains a tensor that the model does not use: 'visual.left.weight'"
    assert made.warnings == (line,) and sdquant.verify(folder).warnings == [line]
    assert sdquant.plan(source, "nf4").warnings == () and sdquant.verify(source).warnings == []
    with caplog.at_level(logging.WARNING):
        model = _load(folder, "nf4", runtime="plain")
    assert caplog.text.count(line) == 1
    _assert_same_weights(model, _load(source, "nf4", runtime="plain"))


def _changed(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    shutil.copytree(source, folder)
    state = load_file(source / FILE)
    change(state)
    save_file(state, folder / FILE, {"format": "pt"})
    return folder


@pytest.mark.parametrize("pattern", ["visual.blocks.0", "model.visual.blocks.0", "visual.blocks.0.*", "model.layers.1"])
def test_skip_means_names_of_the_file_too(pattern: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("Qwen2_5_VLForConditionalGeneration")
    made = sdquant.plan(folder, "nf4", skip=(pattern,))
    assert not made.warnings
    model = _load(folder, "nf4", skip=(pattern,), runtime="plain")
    kept = {name for name, reason in made.components[0].kept.items() if reason == "skipped as asked"}
    part = "language_model.layers.1" if "layers" in pattern else "visual.blocks.0"
    assert kept and all(f"model.{part}." in name for name in kept)
    assert not kept & _packs(model).keys()
