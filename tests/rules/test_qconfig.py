"""Rules: what they match, which one decides, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from sdquant.errors import SettingsError
from sdquant.rules.qconfig import QtRule, QuantizationRule, Rules, rule_of


def test_the_first_that_matches_decides() -> None:
    rules = Rules([
        QuantizationRule(module_path=r".*\.attn\..*", weight_qtype="int4"),
        {"module_path": "blocks/0/.*", "weight_qtype": "int8"},
        QuantizationRule(module_path="nowhere", weight_qtype="nf4"),
    ])  # fmt: skip
    found = [rules.of(path) for path in ("blocks.0.attn.to_q", "blocks.0.ff", "blocks.1.ff")]
    assert [row.weight_qtype if row else None for row in found] == ["int4", "int8", None]
    assert [row.module_path for row in rules.unused()] == ["nowhere"]


def test_the_whole_path_has_to_match() -> None:
    assert not QuantizationRule(module_path="attn").matches("blocks.0.attn")
    assert QuantizationRule().matches("")  # the root


@pytest.mark.parametrize(
    ("asked", "operation", "matches"),
    [
        ((), "linear", True),
        (("dot_general",), "linear", True),
        (("linear",), "dot_general", True),
        (("conv2d",), "linear", False),
        (("conv_general_dilated",), "conv3d", True),
        (("einsum",), "scaled_dot_product_attention", True),
    ],
)
def test_operations_by_qwixs_names_and_torchs(asked: tuple[str, ...], operation: str, matches: bool) -> None:
    assert QuantizationRule(op_names=asked, weight_qtype="int8").matches("any", operation) is matches


@pytest.mark.parametrize(
    "values",
    [
        {"module_path": "("},
        {"op_names": ("add",)},
        {"weight_qtype": "int1"},
        {"act_qtype": "float32"},
        {"tile_size": 0},
        {"tile_size": 1.5},
        {"tile_size": True},
        {"act_static_scale": True},
        {"weight_calibration_method": "median"},
        {"act_calibration_method": "rms"},
        {"bwd_qtype": "int99"},
        {"bwd_stochastic_rounding": "yes"},
        {"colour": "red"},
    ],
    ids=str,
)
def test_refused(values: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        rule_of(values)


def test_a_rule_for_training_is_told_by_its_fields() -> None:
    assert type(rule_of({"weight_qtype": "torch.int8"})) is QuantizationRule
    made = rule_of({"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "float8_e5m2"})
    assert isinstance(made, QtRule) and made.bwd_qtype == "float8_e5m2"


def test_lists_of_a_file_become_tuples() -> None:
    rule = rule_of({"op_names": ["linear"], "act_batch_axes": [0, 1], "channelwise_noise_axes": []})
    assert isinstance(rule, QtRule)
    assert (rule.op_names, rule.act_batch_axes, rule.channelwise_noise_axes) == (("linear",), (0, 1), ())
    assert hash(rule) == hash(
        rule_of({"op_names": ("linear",), "act_batch_axes": (0, 1), "channelwise_noise_axes": ()})
    )


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"op_names": "linear"}, "a list of names of operations"),
        ({"op_names": None}, "a list of names of operations"),
        ({"op_names": [["linear"]]}, "a list of names of operations"),
        ({"act_batch_axes": "0"}, "a list of numbers of axes"),
        ({"act_batch_axes": [True]}, "a list of numbers of axes"),
        ({"act_static_scale": "yes", "act_qtype": "int8"}, "true or false"),
        ({"disable_channelwise_axes": 1}, "true or false"),
        ({"bwd_weight_grad_tile_size": -2}, "a whole number above 0"),
        ({"bwd_weight_grad_tile_size": 1.5}, "one over a number of tiles"),
    ],
)
def test_a_field_of_another_type_is_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        rule_of(values)
