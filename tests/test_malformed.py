"""Malformed quantized weights, a thousand: refused by name, and the same files before they were spoiled are not.

The rows are in `malformed_cases`. Formats that share their reader with another are marked slow.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import sdquant
from sdquant.errors import BadFileError, ConflictError, MissingComponentError, UnsupportedFileError
from sdquant.nn.weights import quantized

from .entry_points import one_answer
from .malformed import FORMATS, NAME, OTHER, Model, tiny
from .malformed_cases import CASES

REFUSALS = (BadFileError, UnsupportedFileError, MissingComponentError, ConflictError)
# Formats whose weights go through the same checks as those of another that every run goes through.
ALIKE = {
    "nf4", "fp4", "qint8", "fp8 scale_weight", "fp8 weight_scale_inv", "qfloat8", "qint2", "diffusers qint8",
    "diffusers qint4", "sdnq-int8", "sdnq-uint3", "own nf4", "own bnb-int8", "own qint4", "own int8", "own float8",
    "own qint8", "own qint3", "own int8_sym", "own int4_sym", "own sdnq-uint3", "comfy int8_row", "comfy w4a4",
    "comfy w4a8", "comfy mxfp8",
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """The sound model in each format."""
    folder = tmp_path_factory.mktemp("formats")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what other libraries say while they are imported
        source = tiny(folder / "float")
        return {name: row.make(source, folder / name.replace(" ", "-")) for name, row in FORMATS.items()}


def _refused(error: Exception, file: Path, says: str) -> None:
    text = str(error)
    assert str(file) in text or str(file.parent) in text, text
    assert says in text, text
    assert all(getattr(error, part) for part in ("what", "why", "fix"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if case.form in ALIKE else ()) for name, case in CASES.items()]
)
def test_refused(name: str, sound: dict[str, Model], tmp_path: Path) -> None:
    case = CASES[name]
    model = sound[case.form].copy()
    case.change(model)
    file = model.write(tmp_path / "model")
    with pytest.raises(REFUSALS) as caught:
        sdquant.verify(file.parent)
    _refused(caught.value, file, case.says)
    if case.load:
        with pytest.raises(REFUSALS) as caught:
            sdquant.load_model(file.parent, progress=False)
        _refused(caught.value, file, case.says)
    if case.lone and "sdnq" not in case.form:  # SDNQ's keys say nothing without its config
        file = model.write(tmp_path / "lone", lone=True)
        with pytest.raises(REFUSALS) as caught:
            sdquant.verify(file)
        _refused(caught.value, file, case.says)


_SPOIL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "half the columns": lambda tensor: tensor[..., : tensor.shape[-1] // 2],
    "half the rows": lambda tensor: tensor[: len(tensor) // 2],
    "another dtype": lambda tensor: (tensor.float() if tensor.dtype.itemsize == 1 else tensor).to(torch.int16),
}


@pytest.mark.parametrize("form", FORMATS)
def test_a_plan_refuses_what_the_load_would(form: str, sound: dict[str, Model], tmp_path: Path) -> None:
    """By the header, as far as dtypes and shapes show it; what it says is what loading says."""
    large = [key for key in FORMATS[form].parts.values() if sound[form].tensors[key].ndim > 1]
    assert sdquant.plan(sound[form].copy().write(tmp_path / "sound").parent).warnings == ()
    for key in large[:2]:
        for how, change in _SPOIL.items():
            model = sound[form].copy()
            model.tensors[key] = change(model.tensors[key])
            folder = model.write(tmp_path / "model").parent
            said = []
            for ask in (sdquant.detect, sdquant.plan, lambda path: sdquant.load_model(path, progress=False)):
                with pytest.raises(REFUSALS) as caught:
                    ask(folder)
                said.append(str(caught.value))
            assert len(set(said)) == 1, (key, how, said)


@pytest.mark.parametrize("form", FORMATS)
def test_what_was_not_spoiled_is_accepted(form: str, sound: dict[str, Model], tmp_path: Path) -> None:
    """The control: refusing everything would pass the other test."""
    model = sound[form].copy()
    file = model.write(tmp_path / "model")
    seen = sdquant.verify(file.parent)
    assert seen.quant == FORMATS[form].scheme.partition(",")[0] and seen.warnings == []
    assert set(seen.sources["model"].prequantized) == {NAME, OTHER}
    loaded = sdquant.load_model(file.parent, progress=False)
    assert {name for name, _ in quantized(loaded)} == {NAME, OTHER}
    lone = model.write(tmp_path / "lone", lone=True)
    if "sdnq" in form and not form.startswith("own"):  # whose keys say nothing without its config
        assert "config.json" in one_answer(lone, UnsupportedFileError, NAME).fix
    else:
        sdquant.verify(lone)


@pytest.mark.parametrize("form", [name for name, row in FORMATS.items() if not row.own])
def test_what_others_wrote_is_saved_and_loaded_again(form: str, sound: dict[str, Model], tmp_path: Path) -> None:
    """Also where the file is not quite as sdquant would have made it, with one scale or none for a weight."""
    model = sdquant.load_model(sound[form].write(tmp_path / "theirs").parent, runtime="plain", progress=False)
    sdquant.save(model, tmp_path / "ours")
    assert sdquant.verify(tmp_path / "ours").warnings == []
    again = dict(quantized(sdquant.load_model(tmp_path / "ours", runtime="plain", progress=False)))
    for name, packed in quantized(model):
        assert packed.parts.keys() == again[name].parts.keys() and packed.spec == again[name].spec
        assert all(torch.equal(_bits(part), _bits(again[name].parts[key])) for key, part in packed.parts.items())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
