"""What makes floats of packed weights says so, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

import sdquant
from sdquant.nn import packed_tensor

if TYPE_CHECKING:
    import pytest


def test_joining_packed_weights_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    packed_tensor._say_floats.cache_clear()
    model = sdquant.quantize(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "int8")
    for _ in range(2):
        joined = torch.cat([layer.weight for layer in model])
    assert torch.equal(joined, torch.cat([layer.dequantize() for layer in model]))
    said = [record.getMessage() for record in caplog.records if "joined" in record.getMessage()]
    assert len(said) == 1 and "float weight" in said[0]
