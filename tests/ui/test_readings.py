"""A file that does not say how it is quantized: what may be said of it is a choice on the page, or a config file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sdquant import demo
from sdquant.errors import SdquantError, SettingsError
from sdquant.planning import Settings
from sdquant.saving import export_single_file
from sdquant.ui import conversion, readings
from sdquant.ui.app_state import Desk
from sdquant.ui.model_folders import Roots
from sdquant.ui.page_words import in_page_words
from sdquant.ui.tabs import inspect, settings

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
