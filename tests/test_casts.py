"""A cast of a quantized model changes what is not packed, and says so; on the meta device it tells shapes alone."""

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


@pytest.mark.parametrize("compute", [None, "int8"])
@pytest.mark.parametrize("scheme", ["int8", "int8_convrot", "svdq-int4"])
def test_on_the_meta_device_shapes_come_out(scheme: str, compute: str | None) -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.Flatten(2), nn.Linear(256, 128)).eval()
    model = sdquant.quantize(model, scheme, compute=compute)
    with torch.inference_mode():
        out = model.to("meta")(torch.empty(2, 64, 16, 16, device="meta"))
    assert out.shape == (2, 64, 128) and out.is_meta
