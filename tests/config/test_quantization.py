"""What the keys of quantization come to, for each command."""

from __future__ import annotations

from typing import Any

import pytest

from sdquant import backends
from sdquant.errors import SdquantError, SettingsError, UnknownQuantError
from sdquant.rules.presets import PRESETS
from sdquant.rules.qconfig import QtRule, QuantizationRule
from sdquant.training import config
from sdquant.training.config import Quantization, Shards

QWIX = "use_qwix_quantization=true"
DOT, CONV = ("dot_general", "einsum"), ("conv_general_dilated",)
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
INT8 = {"op_names": (*DOT, *CONV), "weight_qtype": "int8", "act_qtype": "int8", "act_calibration_method": "absmax"}


def asked(*words: str, command: str = "generate", shards: int = 1) -> Quantization:
    made = config.load(None, words, command=command)
    return config.quantization_of(made, Shards(num_slices=shards, found="", count=shards))


def rule(**values: Any) -> QuantizationRule:
    return QuantizationRule(**values)


def qt(**values: Any) -> QtRule:
    return QtRule(**values)


# Nothing.


@pytest.mark.parametrize("words", [(), ("quantization=",), (QWIX,), (QWIX, "quantization=")])
@pytest.mark.parametrize("command", ["generate", "train"])
def test_nothing_is_asked_for(words: tuple[str, ...], command: str) -> None:
    assert asked(*words, command=command) == Quantization(quant=None, rules=None)


# Presets of rules. What MaxDiffusion's modes are: wan_pipeline.py:569-612.

LINEAR8 = {"op_names": DOT, "weight_qtype": "int8", "act_qtype": "int8", "act_calibration_method": "absmax"}
FULL = {
    "weight_qtype": E4M3, "act_qtype": E4M3, "act_calibration_method": "absmax", "disable_channelwise_axes": True,
}  # fmt: skip
CONV8 = {"op_names": CONV, "weight_qtype": "int8"}


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("int8", [rule(**INT8)]),
        ("INT8", [rule(**INT8)]),
        ("fp8", [rule(**INT8 | {"weight_qtype": E4M3, "act_qtype": E4M3})]),
        ("fp8_full", [qt(op_names=DOT, **FULL), qt(op_names=CONV, **FULL)]),
        ("int8_wo", [rule(op_names=(*DOT, *CONV), weight_qtype="int8")]),
        ("fp8_wo", [rule(op_names=(*DOT, *CONV), weight_qtype=E4M3)]),
        ("int4_wo", [rule(op_names=DOT, weight_qtype="int4", tile_size=32), rule(**CONV8)]),
        ("nf4", [rule(op_names=DOT, weight_qtype="nf4", tile_size=32), rule(**CONV8)]),
        (
            "w4a8",
            [
                rule(**LINEAR8 | {"weight_qtype": "int4"}),
                rule(**CONV8, act_qtype="int8", act_calibration_method="absmax"),
            ],
        ),
    ],
)
def test_a_preset_for_drawing(name: str, rules: list[QuantizationRule]) -> None:
    made = asked(QWIX, f"quantization={name}")
    assert (made.quant, list(made.rules or ())) == (None, rules)


def test_every_preset_has_been_seen() -> None:
    assert [row.name for row in PRESETS] == [
        "int8", "fp8", "fp8_full", "int8_wo", "fp8_wo", "int4_wo", "nf4", "w4a8",
    ]  # fmt: skip


def test_presets_for_training() -> None:
    assert asked(QWIX, "quantization=int8", command="train").rules == (qt(**INT8),)
    assert asked(QWIX, "quantization=fp8_full", command="train").rules == (
        qt(op_names=DOT, **FULL, bwd_qtype=E5M2),
        qt(op_names=CONV, **FULL, bwd_qtype=E4M3),
    )


def test_shards_are_those_of_the_weights_gradient() -> None:
    def parts(*words: str, shards: int) -> list[int | None]:
        made = asked(QWIX, *words, command="train", shards=shards).rules or ()
        return [row.bwd_weight_grad_shards for row in made if isinstance(row, QtRule)]

    assert parts("quantization=fp8_full", shards=4) == [4, 4]
    assert parts("quantization=fp8_full", shards=1) == [None, None]
    assert parts("quantization=fp8_full", shards=0) == [0, 0]
    assert parts("quantization=int8", shards=4) == [None]  # no gradient is quantized
    own = "rules=[{'weight_qtype': 'int8', 'bwd_qtype': 'int8', 'bwd_weight_grad_%s': 8}]"
    assert parts(own % "tile_size", shards=4) == [None]
    assert parts(own % "shards", shards=4) == [8]


def test_the_calibration_methods_and_the_path_are_for_all_presets() -> None:
    words = (
        QWIX, r"qwix_module_path=.*\.attn.*", "weight_quantization_calibration_method=fixed,-224,224",
        "act_quantization_calibration_method=rms,7",
    )  # fmt: skip
    for preset in PRESETS:
        rest = words if any(part.act for part in preset.parts) else words[:3]
        for made in asked(*rest, f"quantization={preset.name}").rules or ():
            assert made.module_path == r".*\.attn.*"
            assert made.weight_calibration_method == "fixed,-224,224"
            assert made.act_calibration_method == ("rms,7" if made.act_qtype else None)
    made = asked(*words, "quantization=fp8_full", "bwd_quantization_calibration_method=absmax,0.5", command="train")
    assert [row.bwd_calibration_method for row in made.rules or () if isinstance(row, QtRule)] == ["absmax,0.5"] * 2


def test_a_tile_size_is_for_linear_layers() -> None:
    made = asked(QWIX, "quantization=int8", "tile_size=128").rules
    assert made == (
        rule(**INT8 | {"op_names": DOT, "tile_size": 128}),
        rule(**INT8 | {"op_names": CONV}),
    )
    assert [row.tile_size for row in asked(QWIX, "quantization=nf4", "tile_size=0.5").rules or ()] == [0.5, None]


def test_a_file_of_ranges_makes_them_static() -> None:
    made = asked(QWIX, "quantization=int8", "quant_stats=ranges.safetensors")
    assert made.rules == (rule(**INT8, act_static_scale=True),)
    assert made.quant_stats == "ranges.safetensors"


# Rules of one's own.


def test_own_rules() -> None:
    text = "rules=[{'module_path': '.*attn.*', 'weight_qtype': 'int4', 'bwd_qtype': 'int8'}, {'weight_qtype': 'int8'}]"
    first = {"module_path": ".*attn.*", "weight_qtype": "int4"}
    assert asked(QWIX, text).rules == (rule(**first), rule(weight_qtype="int8"))
    trained = asked(QWIX, text, command="train").rules
    assert trained == (qt(**first, bwd_qtype="int8"), qt(weight_qtype="int8"))


# Backends.


@pytest.mark.parametrize(
    "name", sorted(row.name for row in backends.schemes() if row.on_the_fly and row.name != "rules")
)
def test_a_scheme(name: str) -> None:
    assert asked(f"quantization={name}") == Quantization(quant=name)


@pytest.mark.parametrize(
    ("text", "quant"),
    [
        ("bnb:nf4", "bnb:nf4"),
        ("none", "none"),
        ("int4,group_size=32", "int4,group_size=32"),
        ("unet=nf4", {"unet": "nf4"}),
        ("unet=nf4 + text_encoder=int8", {"unet": "nf4", "text_encoder": "int8"}),
        ("nf4+text_encoder=none", {"*": "nf4", "text_encoder": "none"}),
    ],
)
def test_what_a_scheme_may_be(text: str, quant: Any) -> None:
    assert asked(f"quantization={text}").quant == quant


# What does not go together.


@pytest.mark.parametrize(
    ("words", "error", "why", "fix"),
    [
        (["quantization=fp8_full"], UnknownQuantError, "a preset of the rule engine", "use_qwix_quantization: true"),
        (["quantization=in8"], UnknownQuantError, "nf4, fp4, fp8, ", "Did you mean 'int8'"),
        (["quantization=rules"], SettingsError, "rules belong to the rule engine", "use_qwix_quantization: true"),
        (["quantization=nf4+int8"], SettingsError, "each component has one scheme", "unet=nf4+text_encoder=int8"),
        (["quantization=nf4,dubble_quant"], SettingsError, "its options are", "double_quant"),
        ([QWIX, "quantization=int9"], UnknownQuantError, "int8, fp8, fp8_full", "Did you mean 'int8'?"),
        ([QWIX, "quantization=qint8"], UnknownQuantError, "a scheme of the backend quanto", "qwix_quantization: false"),
        ([QWIX, "quantization=none"], SettingsError, "int8, fp8", "quantization: ''"),
        ([QWIX, "quantization=unet=int8"], SettingsError, "a preset applies to all of them", "components"),
        (["qwix_module_path=.*attn.*"], SettingsError, "only the rule engine", "use_qwix_quantization: true"),
        (["quantization=nf4", "tile_size=32"], SettingsError, "only the rule engine", "leave tile_size out"),
        (["quant_stats=x.safetensors"], SettingsError, "only the rule engine", "use_qwix_quantization: true"),
        (["act_quantization_calibration_method=rms,7"], SettingsError, "only the rule engine", "leave"),
        (
            ["rules=[{'weight_qtype': 'int8'}]"],
            SettingsError, "rules belong to the rule engine", "use_qwix_quantization: true",
        ),
        ([QWIX, "quantization=int8", "rules=[{}]"], SettingsError, "itself a list of rules", "rules: []"),
        ([QWIX, "tile_size=32", "rules=[{}]"], SettingsError, "its own field", "Move it"),
        ([QWIX, "rules=[{}, {'weight_qtyp': 'int8'}]"], SettingsError, "the fields are", "Use one"),
        ([QWIX, "rules=[{'act_qtype': 'int8', 'act_static_scale': True}]"], SettingsError, "quant_stats", "calibrate"),
        (
            [QWIX, "quantization=int8", "weight_quantization_calibration_method=minmax",
             "act_quantization_calibration_method=minmax"], SettingsError, "one side of a product", "absmax",
        ),
        (
            [QWIX, "quantization=fp8", "weight_quantization_calibration_method=minmax"],
            SettingsError, "float8_e4m3fn, which has no zero point; int4, int8, int16 have one", "absmax",
        ),
        ([QWIX, "tile_size=8"], SettingsError, "nothing is quantized", "Leave it out"),
        ([QWIX, "quantization=int8_wo", "quant_stats=x"], SettingsError, "act_static_scale", "Leave it out"),
        (["quantization=nf4", "quantization_local_shard_count=2"], SettingsError, "only the rule engine", "Leave"),
        (
            [QWIX, "quantization=int8", "quantization_local_shard_count=2", "compile_topology_num_slices=2"],
            SettingsError, "only sets the default of", "Leave it out",
        ),
    ],
)  # fmt: skip
def test_a_contradiction(words: list[str], error: type[SdquantError], why: str, fix: str) -> None:
    with pytest.raises(error) as refused:
        asked(*words)
    assert type(refused.value) is error
    assert why in refused.value.why and fix in refused.value.fix


def test_a_wrong_rule_is_told_by_its_number() -> None:
    with pytest.raises(SettingsError) as error:
        asked(QWIX, "rules=[{'weight_qtype': 'int8'}, {'weight_qtype': 'int9'}]")
    assert error.value.what.startswith("Rule 2 of `rules`:")


def test_a_gradients_method_without_quantized_gradients() -> None:
    words = [QWIX, "quantization=int8", "bwd_quantization_calibration_method=rms,7"]
    with pytest.raises(SettingsError, match="no rule quantizes gradients"):
        asked(*words, command="train")
