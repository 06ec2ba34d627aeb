"""docs/rules.md: what it says that Qwix's and MaxDiffusion's names are here exists."""

from __future__ import annotations

import importlib
import re
from dataclasses import fields

import pytest

from sdquant import cli, rules
from sdquant.rules import QtRule, QuantizationRule
from sdquant.training.config import keys
from tools import qwix_names, readme

TEXT = readme.RULES.read_text(encoding="utf-8")
ROWS = [row for table in qwix_names.TABLES.values() for row in table]
# What `qwix` has at aa623acb (2026-08-13): the names that its __init__ imports, `contrib` and `pallas` among them.
QWIX = {
    "quantize_model", "quantize_params", "PtqProvider", "QtProvider", "QtRule", "QuantizationRule",
    "QuantizationProvider", "LoraProvider", "LoraRule", "apply_lora_to_model", "OdmlQatProvider",
    "OdmlConversionProvider", "QArray", "quantize", "dequantize", "dot_general", "dot", "einsum",
    "conv_general_dilated", "ragged_dot", "ragged_dot_general", "QuantStat", "process_prequantized_params",
    "restore_quantization_rules", "contrib", "pallas",
}  # fmt: skip
# The fields of its rules.
FIELDS = {
    "module_path", "op_names", "weight_qtype", "act_qtype", "tile_size", "act_static_scale",
    "weight_calibration_method", "act_calibration_method", "act_batch_axes", "bwd_qtype", "bwd_calibration_method",
    "bwd_weight_grad_tile_size", "disable_channelwise_axes", "bwd_stochastic_rounding", "channelwise_noise_axes",
    "additional_qt_config", "rank", "alpha", "dropout", "lora_a_initializer", "lora_b_initializer",
}  # fmt: skip
# MaxDiffusion's keys about quantization.
KEYS = {
    "quantization", "use_qwix_quantization", "qwix_module_path", "weight_quantization_calibration_method",
    "act_quantization_calibration_method", "bwd_quantization_calibration_method", "quantization_calibration_method",
    "compile_topology_num_slices", "quantization_local_shard_count", "replicate_quant_scale", "run_name", "output_dir",
    "per_device_batch_size",
}  # fmt: skip


def _names(rows: tuple[qwix_names.Row, ...]) -> set[str]:
    return {name for row in rows for name in row.theirs.split(", ")}


def test_every_name_of_theirs_is_there() -> None:
    assert _names(qwix_names.QWIX) == {*QWIX, "QuantizationProvider.get_unused_rules"}
    assert _names(qwix_names.FIELDS) == FIELDS and _names(qwix_names.KEYS) == KEYS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.theirs)
def test_what_is_named_here_exists(row: qwix_names.Row) -> None:
    assert row.ours or row.note
    for name in row.ours:
        kind, _, rest = name.partition(" ")
        if kind == "key":
            assert rest in {key.name for key in keys()}
        elif kind == "sdquant":
            assert rest in cli.parser().format_help()
        elif name.partition(".")[0] in ("QuantizationRule", "QtRule"):
            rule, _, field = name.partition(".")
            assert field in {one.name for one in fields({"QtRule": QtRule}.get(rule, QuantizationRule))}
        else:
            _look_up(name)


def _look_up(name: str) -> None:
    """Import the longest part of a name that is a module, and get the rest from it."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return
    raise AssertionError(name)


# What people import from `sdquant.rules`; the other exports are for sdquant's other rooms.
OURS = {
    "HowToQuantize", "PtqProvider", "QArray", "QtProvider", "QtRule", "QuantizationRule", "assign", "collecting",
    "dequantize", "load_params", "load_quant_stats", "merge_quant_stats", "missing_params",
    "process_prequantized_params", "quant_stats", "quantize", "quantize_model", "quantize_params", "require_complete",
    "restore_quantization_rules", "rules_of_model",
}  # fmt: skip


def test_every_field_and_public_name_of_ours_is_on_the_page() -> None:
    assert not [one.name for one in fields(QtRule) if f"`QtRule.{one.name}`" not in TEXT
                and f"`QuantizationRule.{one.name}`" not in TEXT]  # fmt: skip
    said = set(re.findall(r"\w+", TEXT))
    assert set(rules.__all__) > OURS
    assert not {name for name in OURS if name not in said} - {"load_quant_stats", "merge_quant_stats"}
