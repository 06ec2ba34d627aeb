"""Names and sizes of what the Convert tab writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdquant import demo
from sdquant.errors import SettingsError
from sdquant.ui import conversion
from sdquant.ui.plan_preview import Target


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
