"""Presets of a mix: what they set for a model, and that its plan keeps to it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sdquant.cli import main
from sdquant.compat import hardware
from sdquant.demo import path
from sdquant.errors import BudgetError, SettingsError
from sdquant.planning import mix_blocks, mix_presets, prepare
from sdquant.planning.estimate.activation_allowance import allowance
from sdquant.settings import Settings
from sdquant.settings.suggestions import fixes

from . import sparse_pipelines
from .test_presets import GB, with_memory


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sparse_pipelines.flux(tmp_path_factory.mktemp("big") / "flux")


def test_mixes_of_flux(big: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """FLUX.1's shapes, by headers alone: within 2 % below the size, and what is on the device at once fits the card."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes = {}
    for row in mix_presets.MIXES:
        memory = int(row.memory.removesuffix("GB")) * GB
        here = with_memory(memory)
        settings, why = mix_presets.choose_mix_settings(row.name, big, machine=here)
        plan = prepare(
            settings.request(str(big), ["transformer", "text_encoder", "text_encoder_2", "vae"]), here, read=False
        )
        room = memory - allowance(sum(part.bytes_bf16 for part in plan.components))
        asked = plan.curve.pick.bytes if plan.curve is not None and plan.curve.pick is not None else 0
        assert asked == plan.bytes and "mix of" in why
        limit = settings.request("-", []).size_bytes
        assert limit is not None and 0.98 * limit <= plan.bytes <= limit
        largest = max(part.bytes for part in plan.components)
        if settings["offload"] == "none":
            assert plan.bytes <= room
        else:
            assert (settings["budget"] is not None and largest <= 1.1 * room) or row.memory == "6GB"
        sizes[row.name] = plan.bytes
        assert len(mix_blocks.blocks_of(plan)) > 57
    assert sizes["mix-6gb"] < sizes["mix-8gb"] < sizes["mix-12gb"]


def test_a_model_that_fits_stays_as_it_is() -> None:
    settings, why = mix_presets.choose_mix_settings("mix-8gb", path("digits-flux"), settings=Settings({"size": "3MB"}))
    assert settings["size"] is None and "fits as it is" in why
    with pytest.raises(SettingsError, match="mix-6gb"):
        mix_presets.choose_mix_settings("mix-1gb", path("digits-flux"))


def test_settings_of_a_size() -> None:
    """A size needs no scheme; a component that is not to be quantized is left out; others contradict it."""
    names = ["transformer", "text_encoder", "vae"]
    request = Settings({"size": "4MB", "quality": None}).request("m", names)
    assert (request.quant, request.size_bytes, request.components) == ("auto", 4_000_000, None)
    part = Settings({"quality": "30", "quant.text_encoder": "none"}).request("m", names)
    assert (part.quality, part.components) == (30.0, ("transformer",))
    with pytest.raises(SettingsError, match="Cannot use size or quality with nf4"):
        Settings({"size": "4MB", "quant.model": "nf4"})
    values = {**Settings().values, "size": "4MB", "quant.model": "nf4"}
    ways = [fix.text for fix in fixes(values, lambda _: True, most=9)]
    assert "Use no size" in ways


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`sdquant plan --picture` draws each block's formats and the curve; without a mix it says why it does not."""
    from PIL import Image

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = tmp_path / "mix.png"
    assert main(["plan", "digits-flux", "-q", "auto,size=4MB", "--picture", str(out), "--no-progress"]) == 0
    said = capsys.readouterr().out
    assert f"picture: {out}" in said and re.search(r"chosen mix +4\.0 MB", said) and "q4_k" in said
    with Image.open(out) as picture:
        assert picture.width > 800 and len(picture.convert("RGB").getcolors(1 << 20) or ()) > 20
    assert main(["plan", "digits-flux", "-q", "nf4", "--picture", str(tmp_path / "no.png")]) == 2
    assert "only a mix has one" in capsys.readouterr().err and not (tmp_path / "no.png").exists()
    assert main(["plan", "digits-flux", "-q", "auto,size=4MB", "--json", "--no-progress"]) == 0
    assert json.loads(capsys.readouterr().out)["curve"]["chosen"]["bytes"] <= 4_000_000


def test_the_picture_of_a_size_that_quantizes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "floats.png"
    assert main(["plan", "digits-flux", "-q", "auto,size=1GB", "--picture", str(out), "--no-progress"]) == 0
    assert "no noise" in capsys.readouterr().out and out.exists()


def test_too_large_for_any(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mix_presets, "MIXES", (mix_presets.MixPreset(name="tiny", label="Tiny", memory="3GB"),))
    monkeypatch.setattr(mix_presets, "_runs", lambda *_: False)
    with pytest.raises(BudgetError, match="coarsest mix"):
        mix_presets.choose_mix_settings("tiny", big, machine=with_memory(3 * GB))
    assert hardware.probe().best is not None
