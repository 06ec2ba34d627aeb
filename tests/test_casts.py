"""A cast of a quantized model changes what is not packed, and says so."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import sdquant
from sdquant.nn import layer_checks


@pytest.mark.parametrize(
    ("before", "after", "effect"),
    [
        (torch.bfloat16, torch.float32, "takes more memory"),
        (torch.float32, torch.float16, "loses precision"),
        (torch.float16, torch.bfloat16, "has another range"),
    ],
)
def test_a_cast_is_told_once(
    before: torch.dtype, after: torch.dtype, effect: str, caplog: pytest.LogCaptureFixture
) -> None:
    layer_checks.warn_of_cast.cache_clear()
    model = sdquant.quantize(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).to(before), "int8")
    packed = model[0].packed
    model.to("cpu")
    assert not caplog.records
    model.to(after)
    assert model[1].weight.dtype == after and model(torch.ones(2, 64, dtype=after)).dtype == after
    assert all(torch.equal(model[0].packed.parts[name], part) for name, part in packed.parts.items())
    model.to(before).to(after)
    name = str(after).removeprefix("torch.")
    told = [text for text in map(logging.LogRecord.getMessage, caplog.records) if f" to {name}:" in text]
    assert len(told) == 1 and effect in told[0] and f"dtype={name!r}" in told[0]
