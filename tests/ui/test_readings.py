"""A file that does not say how it is quantized: what may be said of it is a choice on the page, or a config file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import sdquant
from sdquant import demo
from sdquant.errors import SdquantError, SettingsError, UnsupportedFileError
from sdquant.planning import Settings
from sdquant.saving import export_single_file
from sdquant.ui import conversion, readings
from sdquant.ui.app_state import Desk
from sdquant.ui.model_folders import Roots
from sdquant.ui.page_words import in_page_words
from sdquant.ui.tabs import inspect, settings

from .. import hub_formats

PLAIN = '{"quant_method": "comfyui", "format": "int8_tensorwise"}'
LABEL = "Read it as comfyui, int8_tensorwise"
NAME = "models/flux.safetensors"


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A folder with ComfyUI's INT8 of the shipped Flux, without the markers that say so."""
    models = tmp_path / "models"
    models.mkdir()
    whole = tmp_path / "whole.safetensors"
    export_single_file.quantize_file(demo.path("digits-flux"), "int8_row", whole, progress=False)
    tensors = {name: one for name, one in load_file(whole).items() if not name.endswith("comfy_quant")}
    save_file(tensors, models / "flux.safetensors")
    return Desk(Roots([models]), tmp_path / "settings.json")


def test_a_choice_says_it(desk: Desk) -> None:
    choices = dict(desk.companions(NAME))
    assert choices[LABEL] == json.dumps(json.loads(PLAIN)) and f"{LABEL}, convrot" in choices
    assert desk.base_for(NAME) == "digits-flux"
    with pytest.raises(SdquantError) as caught:
        desk.target(NAME, "digits-flux").components(Settings())
    assert in_page_words(caught.value.fix).startswith(
        f"Say which it is, with “{LABEL}” at Together with, or “{LABEL}, c"
    )

    target = desk.target(NAME, ["digits-flux", choices[LABEL]])
    assert target.components(Settings())["transformer"] == "int8_row"
    assert conversion.foreseen(target, "q8_0", "gguf")[0] > 0
    with pytest.raises(SettingsError, match="two configs"):
        desk.target(NAME, [choices[LABEL], choices[f"{LABEL}, convrot"]])


def test_a_button_of_the_settings_says_it(desk: Desk) -> None:
    shown = json.loads(settings._contents(desk.settings))
    _, changes, _, apply, *ways = settings._look(desk, "page", {}, NAME, "digits-flux", *shown)
    assert json.loads(changes)[LABEL] == {"config": PLAIN}
    assert (ways[0]["value"], ways[0]["visible"], apply["interactive"]) == (LABEL, True, False)
    *_, apply, first, _, _ = settings._look(desk, "page", {}, NAME, ["digits-flux", PLAIN], *shown)[:7]
    assert (apply["interactive"], first["visible"]) == (True, False)


def test_a_config_file_says_it(desk: Desk) -> None:
    folder = desk.roots.folders[1]
    (folder / "int8.json").write_text(PLAIN)
    (folder / "notes.json").write_text('{"author": "me"}')
    assert [one.name for one in desk.roots.configs()] == ["models/int8.json"]
    target = desk.target(NAME, ["digits-flux", "models/int8.json"])
    assert target.components(Settings())["transformer"] == "int8_row"
    with pytest.raises(SettingsError, match="Cannot open"):
        desk.target(NAME, ["../../etc/config.json"])

    html, choices = inspect._look(desk, NAME, None)
    assert f"“{LABEL}” at Config" in html
    assert {LABEL, "models/int8.json"} <= dict(choices).keys()
    for config in (PLAIN, "models/int8.json"):
        assert "int8_row" in inspect._look(desk, NAME, config)[0]


def test_a_sentence_that_names_none_stays() -> None:
    text = "Leave config={wrong out, or config={__import__('os')}"
    assert readings.in_words(text, "Config") == text


def test_what_is_offered_reads_the_file(tmp_path: Path) -> None:
    """Files of one layer without the config that belongs to them: no error says of what a choice reads that it is not
    read, and a choice gives the right weight, or is refused; a wrong one of two gives another."""
    weight, outcomes = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)) * 0.05, dict[str, str]()
    for name, kind in hub_formats.KINDS.items():
        tensors, values = kind.make(weight)
        file = tmp_path / f"{name}.safetensors"
        save_file({f"layer.{key}": one.contiguous().clone() for key, one in tensors.items()}, file)
        try:
            sdquant.detect(file)
        except UnsupportedFileError as error:
            assert "not read" not in error.why, error.why
            outcomes[name] = _outcome(file, readings.readings(error), values)
    bits = {"ct w3a16", "ct w6a16 asymmetric", "ct w8a16"}  # the example has four
    assert {name: outcome for name, outcome in outcomes.items() if outcome != "read"} == dict.fromkeys(bits, "refused")
    assert outcomes.keys() >= {"ct w4a16", "ct w8a8", "ct w8a8 asymmetric", "gptq", "gptq v2", "hqq axis 0", "ct mxfp8"}


def _outcome(file: Path, choices: dict[str, str], values: torch.Tensor) -> str:
    """What comes of a file with the choices for it: "read" if one of them gives these values."""
    found = set()
    for config in choices.values():
        try:
            ((_, made),) = sdquant.dequantize(file, config=json.loads(config))
            found.add("read" if (made - values).norm() < 1e-2 * values.norm() else "another weight")
        except SdquantError:
            found.add("refused")
    return min(found, key=["read", "another weight", "refused"].index, default="no choice")


def test_a_config_in_tables_is_a_choice() -> None:
    config = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "axis": [0, 1]}}}
    error = UnsupportedFileError("Cannot read it", "nothing tells its bits", f"Say it, with config={config}; or do not")
    label = "Read it as hqq, nbits 4, axis 0, axis 1"
    assert readings.readings(error) == {label: json.dumps(config)}
    assert readings.in_words(error.fix, "Config") == f"Say it, with “{label}” at Config; or do not"
