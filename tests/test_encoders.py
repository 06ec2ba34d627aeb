"""The models that diffusers' pipelines take from transformers, whose names in files are often others than the model's:
loaded, quantized in every way, saved, verified and planned, from folders that `save_pretrained` wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import sdquant
from sdquant.components import quiet

from . import encoders

FAST = ("nf4", "int8")
SCHEMES = (*FAST, "qint8", "sdnq-int8", "fp8", "bnb-int8", "int8_row")
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
    """For each model, and each scheme; on every day the usual ones, in fast schemes."""
    return pytest.mark.parametrize(
        ("name", "scheme"),
        [
            pytest.param(
                name,
                scheme,
                marks=() if row.usual and scheme in ("", *FAST) else pytest.mark.slow,
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
