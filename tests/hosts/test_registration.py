"""The extension in each host: its section, its tab, its route, and what is left when it is unloaded."""

from __future__ import annotations

import asyncio
import importlib.machinery
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from sdquant import SettingsError
from sdquant.compat import hardware
from sdquant.hosts import extension, options, preflight, tab
from sdquant.hosts.host import HOSTS
from sdquant.planning.settings_fields import fields
from sdquant.utils import install

from .conftest import Running

if TYPE_CHECKING:
    from ..conftest import Saved

NAMES = [row.name for row in HOSTS]
Start = Callable[[str], Running]
POINTS = {
    "sdnext": "load_diffuser", "forge": "forge_loader", "neo": "forge_loader", "a1111": "load_model_weights",
    "reforge": "reload_model_weights",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_host_is_told_by_its_modules(host: Start, name: str) -> None:
    running = host(name)
    running.start()
    assert running.status["host"] == name
    assert running.shown == []


def test_a_process_that_is_no_host_says_so() -> None:
    with pytest.raises(SettingsError, match=r"none of SD\.Next, Forge Neo, Forge, reForge and AUTOMATIC1111"):
        extension.register()


@pytest.mark.parametrize("name", NAMES)
def test_the_section_has_every_setting_or_says_who_decides(host: Start, name: str) -> None:
    running = host(name)
    running.start()
    labels = running.modules.shared.opts.data_labels
    ours = {key: row for key, row in labels.items() if row.section == ("sdquant", "Quantization")}
    row = extension._session.host
    shown = {options.key_of(field) for field in row.fields()}
    assert shown | {"sdquant_about", "sdquant_theirs"} == set(ours)
    assert {field.name for field in fields()} == {field.name for field in row.fields()} | set(row.theirs)
    for key, made in ours.items():
        assert isinstance(made.default, (str, bool)), key
        assert not key.endswith(("_version", "_token", "_key", "_secret", "_password")), key
        arguments = made.component_args() if callable(made.component_args) else made.component_args or {}
        component = made.component(label=made.label, value=made.default, elem_id=key, **arguments)
        assert component.value == made.default, key
    for text in (*row.can, *row.cannot):
        assert text.split("'")[0] in ours["sdquant_about"].default


@pytest.mark.parametrize("name", NAMES)
def test_what_is_set_is_read_as_settings(host: Start, name: str) -> None:
    running = host(name)
    running.start({"sdquant_quant_model": "nf4", "sdquant_skip": "mid_block, time_embedding"})
    read = options.read(extension._session.host)
    assert (read["quant.model"], read["skip"]) == ("nf4", ("mid_block", "time_embedding"))
    assert read.to_dict().keys() == {"quant.model", "skip"}


@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_can_never_be_is_taken_back(host: Start, name: str) -> None:
    running = host(name)
    running.start({"sdquant_quant_model": "nf4"})
    for value in ("int9", "nf4,no_such_option", "<script>"):
        assert not running.modules.shared.opts.set("sdquant_quant_model", value)
    assert options.read(extension._session.host)["quant.model"] == "nf4"
    assert len(running.shown) == 3
    assert "no backend has such a scheme" in running.shown[0]


def test_a_scheme_with_options_is_among_the_choices(host: Start) -> None:
    running = host("sdnext")
    running.start({"sdquant_quant_model": "int4,group_size=32"})
    made = running.modules.shared.opts.data_labels["sdquant_quant_model"]
    assert "int4,group_size=32" in made.component_args()["choices"]


def test_old_options_of_sdnext_are_read_in_once(host: Start) -> None:
    old = {"bnb_quantization": ["Model"], "bnb_quantization_type": "nf4", "sdnq_quantize_weights": ["TE"]}
    running = host("sdnext")
    running.start(stored=old)
    data = running.modules.shared.opts.data
    assert options.read(extension._session.host).to_dict() == {"quant.model": "nf4"}  # SDNQ is still SD.Next's
    data["sdquant_quant_model"] = "as found"
    running.modules.script_callbacks.ui_settings_callback()
    assert options.read(extension._session.host)["quant.model"] is None


def test_old_options_do_not_replace_what_was_set_here(host: Start) -> None:
    running = host("sdnext")
    running.start(stored={"bnb_quantization": ["Model"], "sdquant_quant_vae": "int8"})
    assert options.read(extension._session.host).to_dict() == {"quant.vae": "int8"}


@pytest.mark.parametrize("name", NAMES)
def test_the_route_answers_and_only_reads(host: Start, name: str) -> None:
    running = host(name)
    running.start()
    app = FastAPI()
    for _ in range(2):  # a reloaded page starts the app again
        running.modules.script_callbacks.app_started_callback(None, app)
    client = TestClient(app)
    answer = client.get("/sdquant/status")
    assert answer.status_code == 200
    assert answer.json()["host"] == name
    assert client.post("/sdquant/status").status_code == 405
    assert sum(getattr(route, "path", "") == "/sdquant/status" for route in app.routes) == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_tab_inspects_what_is_below_the_hosts_folders(host: Start, name: str, saved: Saved, tmp_path: Path) -> None:
    running = host(name)
    running.start()
    shutil.copytree(saved("int8") / "unet", tmp_path / "models" / "quantized")
    running.modules.paths.models_path = str(tmp_path / "models")
    ((blocks, title, elem_id),) = asyncio.run(_tabs(running))
    assert (title, elem_id) == ("sdquant", "sdquant_tab")
    assert len(blocks.fns) == 3
    assert "models/quantized" in tab._names()
    assert "int8" in tab.inspected_html("models/quantized")
    outside = tmp_path / "other" / "model.safetensors"
    outside.parent.mkdir()
    outside.write_bytes(b"")
    for wrong in (str(outside), "../../etc/passwd", "http://host/x", None, 5):
        assert "<table>" not in tab.inspected_html(wrong)
        assert str(tmp_path) not in tab.inspected_html(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_unloaded_the_host_is_as_it_was(host: Start, name: str) -> None:
    running = host(name)
    patched = [
        module
        for word, module in sys.modules.items()
        if word.startswith("modules.") and word.partition(".")[2] in ("sd_models", "model_quant", "sd_offload")
    ]
    before = [{key: _copy(value) for key, value in vars(module).items()} for module in patched]
    running.start()
    assert any(_changed(vars(module), old) for module, old in zip(patched, before, strict=True))
    running.modules.script_callbacks.script_unloaded_callback()
    for module, old in zip(patched, before, strict=True):
        assert _changed(vars(module), old) == []


@pytest.mark.parametrize("name", NAMES)
def test_registered_twice_it_is_there_once(host: Start, name: str) -> None:
    running = host(name)
    running.start()
    models = running.modules.sd_models
    point = POINTS[name]
    running.modules.script_callbacks.clear_callbacks()
    extension.register()
    assert not hasattr(getattr(models, point).__wrapped__, "__wrapped__")


def test_what_others_have_wrapped_since_does_nothing_more_of_ours(host: Start) -> None:
    running = host("forge")
    running.start({"sdquant_quant_model": "qint8"})
    models = running.modules.sd_models
    ours = models.forge_loader
    models.forge_loader = lambda *args, **kwargs: ours(*args, **kwargs)
    running.modules.script_callbacks.script_unloaded_callback()
    with pytest.raises(Exception, match="no-such-model"):  # diffusers' own words: the settings are not asked
        models.forge_loader("/no-such-model")
    assert running.status["model"] is None


@pytest.mark.parametrize("name", NAMES)
def test_a_version_without_the_functions_is_told_and_left_as_it_was(host: Start, name: str) -> None:
    running = host(name)
    models = running.modules.sd_models
    missing = POINTS[name]
    delattr(models, missing)
    before = dict(vars(models))
    with pytest.raises(SettingsError, match=f"no modules.sd_models.{missing}"):
        extension.register()
    assert _changed(vars(models), before) == []
    assert not any(running.modules.script_callbacks.callback_map.values())


@pytest.mark.parametrize("what", ["classic", "module", "torch"])
def test_what_cannot_run_is_told_in_the_console_and_the_tab(
    host: Start, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Forge Classic, where `forge_loader` is a module; a fork that calls another thing so; and Forge's own torch."""
    running = host("a1111" if what == "classic" else "forge")
    if what == "classic":
        monkeypatch.setitem(sys.modules, "modules_forge.forge_loader", _module("modules_forge.forge_loader"))
        said = "Cannot use sdquant in Forge Classic"
    elif what == "module":
        monkeypatch.setattr(running.modules.sd_models, "forge_loader", _module("modules_forge.loader"))
        said = "has another thing as modules.sd_models.forge_loader"
    else:
        monkeypatch.setattr(preflight, "version_here", lambda name: "2.3.1+cu121" if name == "torch" else "1")
        said = "the web UI has torch 2.3.1+cu121, and sdquant needs 2.6 or newer. Set the variable TORCH_COMMAND"
    before = dict(vars(running.modules.sd_models))
    running.start()
    assert _changed(vars(running.modules.sd_models), before) == []
    assert said in caplog.text
    ((blocks, *_),) = asyncio.run(_tabs(running))
    assert said in str(blocks.get_config_file()["components"])
    assert not install.in_web_ui()


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    return module


def test_the_status_is_that_of_when_the_page_is_opened(host: Start) -> None:
    running = host("forge")
    running.start()
    ((blocks, *_),) = asyncio.run(_tabs(running))
    extension._session.status.begin("late.safetensors")
    rows = enumerate(blocks.get_config_file()["dependencies"])
    (number,) = [number for number, row in rows if any(event == "load" for _, event in row["targets"])]
    assert "late.safetensors" in blocks.fns[number].fn()[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_scheme_without_its_package_is_not_offered_and_taken_back(
    host: Start, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {row: version for row, version in hardware.versions().items() if row != "bitsandbytes"}
    monkeypatch.setattr(hardware, "versions", lambda: here)
    running = host(name)
    running.start()
    opts = running.modules.shared.opts
    choices = opts.data_labels["sdquant_quant_model"].component_args()["choices"]
    assert not {"nf4", "none", "rules"} & set(choices) and {"as found", "fp8", "int8_row", "qint8"} <= set(choices)
    assert choices[:3] == ["as found", "int8", "sdnq-uint4"]  # what keeps the effect of LoRAs is first
    assert "<code>sdnq-uint4</code> (4 bits)" in opts.data_labels["sdquant_about"].default
    assert "nf4, fp4, bnb-int8: <code>" in opts.data_labels["sdquant_lacking"].default
    assert not opts.set("sdquant_quant_model", "nf4")
    assert not opts.set("sdquant_quant_model", "rules")
    said, other = running.shown
    assert "no list of rules" in other
    python = install.spaced(sys.executable)
    assert f'which is not installed. Run: {python} -m pip install --no-deps "bitsandbytes>=0.48"' in said


def test_old_options_of_sdnext_are_not_imported_without_their_package(
    host: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = {row: version for row, version in hardware.versions().items() if row != "bitsandbytes"}
    monkeypatch.setattr(hardware, "versions", lambda: here)
    running = host("sdnext")
    shown = []
    log = types.SimpleNamespace(warning=lambda text, *args: shown.append(text % args))
    monkeypatch.setattr(running.modules.shared, "log", log, raising=False)
    running.start(stored={"bnb_quantization": ["Model"], "bnb_quantization_type": "nf4"})
    assert options.read(extension._session.host)["quant.model"] is None
    assert any("stays as it is. Cannot use nf4: it needs bitsandbytes" in text for text in shown), shown


@pytest.mark.parametrize("layers", [False, True])
def test_hosts_import_no_torch_gradio_or_diffusers(layers: bool) -> None:
    """Those with layers import torch, which is there long before."""
    code = f"""
import importlib, pkgutil, sys
import sdquant.hosts
names = [row.name for row in pkgutil.iter_modules(sdquant.hosts.__path__) if row.name != "comfyui"]  # another host's
for name in names:
    if {layers} or (name != "forge_layers" and not name.startswith("comfy_")):
        importlib.import_module(f"sdquant.hosts.{{name}}")
print([name for name in ("torch", "gradio", "diffusers", "transformers", "accelerate") if name in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ("['torch']" if layers else "[]")


async def _tabs(running: Running) -> list[Any]:
    """In a loop: without one, gradio's blocks make some that nobody closes."""
    return running.modules.script_callbacks.ui_tabs_callback()


def _copy(value: object) -> object:
    return list(value) if isinstance(value, list) else value


def _changed(now: dict[str, object], before: dict[str, object]) -> list[str]:
    return [key for key, value in before.items() if not (now[key] is value or _copy(now[key]) == value)]
