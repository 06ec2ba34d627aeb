"""An input of a wrong size: what torch's own layer says, and no word of a kernel's shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sdquant.rules import PtqProvider, QtProvider, QuantizationRule, quantize_model

RULES = (
    QuantizationRule(weight_qtype="int8", act_qtype="int8"),
    QuantizationRule(weight_qtype="float8_e4m3fn", act_qtype="float8_e4m3fn"),
    QuantizationRule(op_names=("linear",), weight_qtype="int4", act_qtype="int8", tile_size=32),
    QuantizationRule(weight_qtype="int8"),
)
LAYERS = (
    (nn.Linear(64, 128), [(128, 63), (2, 3, 65), ()]),
    (nn.Conv2d(4, 6, 3, groups=2, padding=1), [(1, 2, 8, 8), (1, 8, 8, 8), (3, 8, 8), (8,), (1, 1, 4, 8, 8)]),
    (nn.Conv1d(1, 3, 3), [(1, 2, 8), (8,)]),
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.weight_qtype} {rule.act_qtype}")
@pytest.mark.parametrize("provider", [PtqProvider, QtProvider])
def test_an_input_that_does_not_fit(provider: Any, rule: QuantizationRule) -> None:
    for layer, shapes in LAYERS:
        if rule.matches("0", f"conv{layer.weight.ndim - 2}d" if layer.weight.ndim > 2 else "linear"):
            made = quantize_model(nn.Sequential(layer), provider([rule]))
            made(
                torch.ones(
                    2, *([64] if layer.weight.ndim == 2 else [layer.in_channels, *[8] * (layer.weight.ndim - 2)])
                )
            )
            for shape in shapes:
                with pytest.raises(RuntimeError) as theirs:
                    layer(torch.ones(shape))
                with pytest.raises(RuntimeError) as ours:
                    made(torch.ones(shape))
                # From torch 2.15 on each operator names itself first, with a bias another one than without.
                assert str(ours.value).removeprefix("mm: ") == str(theirs.value).removeprefix("addmm: ")
