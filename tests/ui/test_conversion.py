"""Names and sizes of what the Convert tab writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdquant import demo
from sdquant.errors import BudgetError, SettingsError
from sdquant.models import Stopped
from sdquant.ui import conversion
from sdquant.ui.conversion_time import seconds_for
from sdquant.ui.mix_conversion import MIX, Mix, usual_size
from sdquant.ui.plan_preview import Target
from sdquant.utils.byte_sizes import parse_size


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("FLUX.1-dev/", "FLUX.1-dev-nf4"),
        ("realistic (v2) [fp16].safetensors", "realistic -v2- -fp16--nf4"),
        ("(x).gguf", "x--nf4"),
        ("()", "model-nf4"),
        ("\N{CJK UNIFIED IDEOGRAPH-4E00}" * 60 + ".gguf", "\N{CJK UNIFIED IDEOGRAPH-4E00}" * 22 + "-nf4"),
    ],
)
def test_a_name_is_one_that_can_be_written(tmp_path: Path, source: str, name: str) -> None:
    path = tmp_path / source
    if source.endswith((".gguf", ".safetensors")):
        path.touch()
    else:
        path.mkdir()
    assert conversion.name_for(path, "nf4") == name
    for kind in ("folder", "gguf", "file"):
        conversion.target_path(tmp_path, name, kind)


@pytest.mark.parametrize(
    "name", ["", "../x", "a/b", "x.", "NUL", "com1.gguf", "\N{CJK UNIFIED IDEOGRAPH-4E00}" * 99, "x" * 101, None, 5]
)
def test_a_name_that_cannot_be_written_is_refused(tmp_path: Path, name: object) -> None:
    with pytest.raises(SettingsError, match="Cannot convert"):
        conversion.target_path(tmp_path, name, "gguf")


def test_the_size_of_what_is_quantized_already_is_foreseen(tmp_path: Path) -> None:
    folder = Target(path=str(demo.path("digits-flux")))
    out = tmp_path / "model.gguf"
    conversion.convert_model(folder, "q8_0", "gguf", out, lambda done, total: None)
    again = Target(path=str(out), base=folder.path)
    for scheme, kind in (("q4_k", "gguf"), ("fp8", "file")):
        before, after = conversion.foreseen(again, scheme, kind)
        assert before == pytest.approx(out.stat().st_size, rel=0.01)
        assert after == conversion.foreseen(folder, scheme, kind)[1] < before


@pytest.mark.parametrize(("model", "scheme", "kind"), [("digits-flux", "q4_k", "gguf"), ("digits-sd", "fp8", "file")])
def test_the_size_of_a_file_is_foreseen(tmp_path: Path, model: str, scheme: str, kind: str) -> None:
    source = Target(path=str(demo.path(model)))
    out = tmp_path / ("model.gguf" if kind == "gguf" else "model.safetensors")
    conversion.convert_model(source, scheme, kind, out, lambda done, total: None)
    written, foreseen = out.stat().st_size, conversion.foreseen(source, scheme, kind)[1]
    assert 0 <= written - foreseen < 70_000  # the header


@pytest.mark.parametrize("kind", ["gguf", pytest.param("file", marks=pytest.mark.slow)])
def test_a_mix_is_as_small_as_asked(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = Target(path=str(demo.path("digits-flux")))
    out = tmp_path / ("model.gguf" if kind == "gguf" else "model.safetensors")
    mix = Mix(size=usual_size(source, kind))
    before, most = conversion.foreseen(source, MIX, kind, mix)
    seen: list[tuple[int, int]] = []

    def count(done: int, total: int) -> None:
        seen.append((done, total))

    conversion.convert_model(source, MIX, kind, out, lambda done, total: None, mix, count)
    assert out.stat().st_size <= most < before and seen[-1][0] == seen[-1][1] == len(seen) > 3
    with pytest.raises(BudgetError, match=r"Write [0-9.]+MB or more") as refused:
        conversion.foreseen(source, MIX, kind, Mix(size="10KB"))
    least = str(refused.value.fix).split()[1]
    assert conversion.foreseen(source, MIX, kind, Mix(size=least))[1] > 10_000

    def stop(done: int, total: int) -> None:
        raise Stopped

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    with pytest.raises(Stopped):
        conversion.convert_model(source, MIX, kind, tmp_path / f"b{out.suffix}", lambda done, total: None, mix, stop)
    assert {path.name for path in tmp_path.iterdir()} <= {out.name, "cache", "other"}


@pytest.mark.parametrize(
    ("model", "size", "share"),
    # The most that headers may take is reserved, of digits-sd's many small weights a fiftieth more than they do.
    [("digits-flux", "4MB", 0.98), pytest.param("digits-sd", "2.2MB", 0.96, marks=pytest.mark.slow)],
)
def test_a_folder_of_a_mix_is_as_small_as_asked(tmp_path: Path, model: str, size: str, share: float) -> None:
    """With all its files: the configs, the tokenizers, and what headers say of schemes."""
    source, out, most = Target(path=str(demo.path(model))), tmp_path / "mixed", parse_size(size, "A size")
    assert conversion.foreseen(source, MIX, "folder", Mix(size=size))[1] == most
    conversion.convert_model(source, MIX, "folder", out, lambda done, total: None, Mix(size=size))
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert share * most < written <= most
    with pytest.raises(BudgetError, match=r"Use size=\d+") as refused:
        conversion.foreseen(source, MIX, "folder", Mix(size="1.2MB"))
    least = refused.value.fix.split("size=")[1].split()[0]
    assert conversion.foreseen(source, MIX, "folder", Mix(size=least))[1] == int(least)


@pytest.mark.parametrize("mix", [Mix(), Mix(size="3MB", quality="20")])
def test_a_mix_has_one_goal(mix: Mix) -> None:
    with pytest.raises(SettingsError, match="Cannot choose a mix"):
        conversion.foreseen(Target(path=str(demo.path("digits-flux"))), MIX, "folder", mix)


def test_how_long_it_takes_grows_with_the_model() -> None:
    small, large = (seconds_for("int8_row", "file", nbytes) for nbytes in (10**7, 10**10))
    mixed = seconds_for(MIX, "gguf", 10**10)
    assert small is not None and large is not None and mixed is not None
    assert small < large < mixed
