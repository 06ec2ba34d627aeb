"""Schemes whose format is a rotated weight take `hadamard` for what they do anyway, and do not go without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sdquant
from sdquant import backends
from sdquant.core import Unfit, registry
from sdquant.errors import SettingsError

ROTATING = [row.name for row in registry.schemes() if row.rotates]


def test_are_those_that_rotate_what_they_encode() -> None:
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = []
    for row in registry.schemes():
        try:
            packed = backends.encode(weight, registry.parse(row.name))
        except Unfit:  # is read from files only
            assert not row.on_the_fly
            continue
        if packed.spec.rotation:
            found.append(row.name)
    assert found == ROTATING == ["int8_convrot", "w4a8", "w6a8", "w4a4"]


@pytest.mark.parametrize("word", ["hadamard", "hadamard=true", "hadamard=1"])
@pytest.mark.parametrize("scheme", ROTATING)
def test_the_name_is_the_plain_one(scheme: str, word: str, sd: Path) -> None:
    spec = registry.parse(f"{scheme},{word}")
    assert spec == registry.parse(scheme) and str(spec) == scheme
    plan = sdquant.plan(sd, quant=f"{scheme},{word}")
    assert "hadamard" not in str(plan) and plan.to_dict() == sdquant.plan(sd, quant=scheme).to_dict()


@pytest.mark.parametrize("scheme", ROTATING)
def test_going_without_is_refused(scheme: str) -> None:
    with pytest.raises(SettingsError) as caught:
        registry.parse(f"{scheme},hadamard=false")
    assert caught.value.what == f"Cannot quantize to {scheme} without its rotation"
    assert "int8_row" in caught.value.fix
    with pytest.raises(SettingsError, match="Invalid option hadamard='maybe'"):
        registry.parse(f"{scheme},hadamard=maybe")


def test_beside_another_option() -> None:
    assert str(registry.parse("w4a4,hadamard,gptq")) == "w4a4,gptq"


@pytest.mark.parametrize("scheme", ["int8_row", "nf4", "q4_k"])
def test_others_do_not_know_the_option(scheme: str) -> None:
    with pytest.raises(SettingsError, match="Unknown option 'hadamard'"):
        registry.parse(f"{scheme},hadamard")
