"""LoRA files put on a pipeline for an image, changed, and taken off again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sdquant.errors import SettingsError
from sdquant.models import Lora, LoraSet

from .conftest import load, out

Files = Callable[..., Path]


@pytest.mark.parametrize(
    ("model", "scheme", "offload"),
    [
        ("digits-sd", "nf4", "balanced"),
        ("digits-flux", "int8", "sequential"),
        *(
            pytest.param("digits-sd", scheme, offload, marks=pytest.mark.slow)
            for scheme in (None, "int8", "sdnq-uint4")
            for offload in ("none", "model", "group", "sequential", "balanced")
        ),
    ],
)
def test_put_on_changed_and_taken_off(model: str, scheme: str | None, offload: str, lora_file: Files) -> None:
    pipe = load(model, scheme, offload, runtime="plain" if scheme == "nf4" else None)
    loras = LoraSet(pipe)
    one, both = lora_file(model, False, True), lora_file(model, True)
    before = out(pipe)
    loras.use([Lora(path=one, strength=0.5)])
    half = out(pipe) - before
    loras.use([Lora(path=one)])
    whole = out(pipe) - before
    loras.use([Lora(path=one), Lora(path=both, strength=-0.5)])
    assert not torch.equal(out(pipe) - before, whole)
    loras.use([Lora(path=one), Lora(path=both, strength=0)])
    assert torch.equal(out(pipe) - before, whole)
    assert 0.3 < half.norm() / whole.norm() < 0.7
    loras.use([])
    assert torch.equal(out(pipe), before)


def test_what_does_not_fit_leaves_none(lora_file: Files, tmp_path: Path) -> None:
    pipe = load("digits-sd", "int8")
    loras, before = LoraSet(pipe), out(pipe)
    (tmp_path / "cut.safetensors").write_bytes(lora_file("digits-sd").read_bytes()[:3000])
    for path, words in (
        (lora_file("digits-flux"), "none of its layers is in this model"),
        (tmp_path / "cut.safetensors", "not for this model, or damaged"),
        (tmp_path / "away.safetensors", "not there any more"),
    ):
        with pytest.raises(SettingsError, match=words):
            loras.use([Lora(path=lora_file("digits-sd")), Lora(path=path)])
        assert torch.equal(out(pipe), before)
