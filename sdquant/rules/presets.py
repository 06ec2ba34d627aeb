"""Presets of rules, one table entry each. int8, fp8 and fp8_full are MaxDiffusion's, the others ours. No torch.

MaxDiffusion's: int8 and fp8 quantize weights and activations and leave gradients as they are; fp8_full quantizes
gradients too, a scale for each tensor. There the calibration methods apply to fp8_full alone; here to all presets.

Ours keep convolutions at 8 bits: at 4 bits thousands of numbers would share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import SettingsError, UnknownQuantError
from ..utils.suggestions import did_you_mean
from .core.calibration_method import method
from .core.qtypes import QTYPES, qtype
from .qconfig import QtRule, QuantizationRule

LINEAR = ("dot_general", "einsum")
CONV = ("conv_general_dilated",)
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


@dataclass(frozen=True, kw_only=True)
class PresetTypes:
    """Types that a preset uses for some operations.

    Attributes:
        ops: Qwix's names of the operations.
        weight, act, bwd: types of weights, activations and gradients; None leaves them as they are.
        tile: how many numbers along the sum share a scale; None for all.
    """

    ops: tuple[str, ...]
    weight: str
    act: str | None = None
    bwd: str | None = None
    tile: int | None = None


@dataclass(frozen=True, kw_only=True)
class RulePreset:
    """A preset.

    Attributes:
        per_tensor: one scale for a whole tensor.
    """

    name: str
    help: str
    parts: tuple[PresetTypes, ...]
    per_tensor: bool = False


PRESETS = (
    RulePreset(
        name="int8", help="weights and activations in 8-bit integers",
        parts=(PresetTypes(ops=(*LINEAR, *CONV), weight="int8", act="int8"),),
    ),
    RulePreset(
        name="fp8", help="weights and activations in float8",
        parts=(PresetTypes(ops=(*LINEAR, *CONV), weight=E4M3, act=E4M3),),
    ),
    RulePreset(
        name="fp8_full", help="weights, activations and, in training, gradients in float8, a scale for each tensor",
        parts=(
            PresetTypes(ops=LINEAR, weight=E4M3, act=E4M3, bwd=E5M2),
            PresetTypes(ops=CONV, weight=E4M3, act=E4M3, bwd=E4M3),
        ),
        per_tensor=True,
    ),
    RulePreset(
        name="int8_wo", help="weights in 8-bit integers",
        parts=(PresetTypes(ops=(*LINEAR, *CONV), weight="int8"),),
    ),
    RulePreset(
        name="fp8_wo", help="weights in float8",
        parts=(PresetTypes(ops=(*LINEAR, *CONV), weight=E4M3),),
    ),
    RulePreset(
        name="int4_wo", help="weights of linear layers in 4-bit integers, of convolutions in 8-bit ones",
        parts=(PresetTypes(ops=LINEAR, weight="int4", tile=32), PresetTypes(ops=CONV, weight="int8")),
    ),
    RulePreset(
        name="nf4", help="weights of linear layers in NF4, of convolutions in 8-bit integers",
        parts=(PresetTypes(ops=LINEAR, weight="nf4", tile=32), PresetTypes(ops=CONV, weight="int8")),
    ),
    RulePreset(
        name="w4a8", help="as int8, with weights of linear layers in 4-bit integers",
        parts=(PresetTypes(ops=LINEAR, weight="int4", act="int8"), PresetTypes(ops=CONV, weight="int8", act="int8")),
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Settings that a preset leaves open.

    Attributes:
        module_path: as of a rule.
        weight_method, act_method, bwd_method: calibration methods.
        tile_size: of linear layers; None for the preset's own.
        static: whether the ranges of activations are static (from calibration).
        training: whether to make rules for training (QtRule).
    """

    module_path: str = ".*"
    weight_method: str = "absmax"
    act_method: str = "absmax"
    bwd_method: str = "absmax"
    tile_size: int | float | None = None
    static: bool = False
    training: bool = False


def preset(name: str) -> RulePreset:
    """Return the preset of this name, in upper or lower case.

    Raises:
        UnknownQuantError: there is no such preset.
    """
    known = [row.name for row in PRESETS]
    short = name.strip().lower()
    if short in known:
        return PRESETS[known.index(short)]
    raise UnknownQuantError(
        f"Unknown preset {name!r:.80}",
        f"the rule presets are {', '.join(known)}",
        did_you_mean(short, known, "Use one of them"),
    )


def preset_rules(name: str, choices: Choices | None = None) -> tuple[QuantizationRule, ...]:
    """Return the rules of a preset.

    Raises:
        UnknownQuantError: there is no such preset. SettingsError: a choice that it cannot have.
    """
    row, choices = preset(name), choices or Choices()
    parts = [one for part in row.parts for one in _split(part, choices)]
    for part in parts:
        _check(row, part, choices)
    return tuple(_rule(row, part, choices) for part in parts)


def _split(part: PresetTypes, choices: Choices) -> tuple[PresetTypes, ...]:
    """Split a part, if a tile size is set, into operations that have tiles and those that have none."""
    if choices.tile_size is None or not set(CONV) < set(part.ops):
        return (part,)
    return replace(part, ops=tuple(op for op in part.ops if op not in CONV)), replace(part, ops=CONV)


def _rule(row: RulePreset, part: PresetTypes, choices: Choices) -> QuantizationRule:
    common = QuantizationRule(
        module_path=choices.module_path,
        op_names=part.ops,
        weight_qtype=part.weight,
        act_qtype=part.act,
        tile_size=part.tile if choices.tile_size is None or part.ops == CONV else choices.tile_size,
        act_static_scale=True if choices.static and part.act is not None else None,
        weight_calibration_method=choices.weight_method,
        act_calibration_method=choices.act_method if part.act is not None else None,
    )
    if not choices.training and not row.per_tensor:
        return common
    return QtRule(
        **vars(common),
        bwd_qtype=part.bwd if choices.training else None,
        bwd_calibration_method=choices.bwd_method if choices.training else "absmax",
        disable_channelwise_axes=row.per_tensor,
    )


def _check(row: RulePreset, part: PresetTypes, choices: Choices) -> None:
    bwd = part.bwd if choices.training else None
    asymmetric = []
    for what, type_name, text in (
        ("weights", part.weight, choices.weight_method),
        ("activations", part.act, choices.act_method),
        ("gradients", bwd, choices.bwd_method),
    ):
        if type_name is None or not method(text).asymmetric:
            continue
        asymmetric.append(what)
        if not qtype(type_name).asymmetric:
            able = ", ".join(one.name for one in QTYPES if one.asymmetric)
            raise SettingsError(
                f"Cannot use preset {row.name} with {text!r} for its {what}",
                f"they become {type_name}, which has no zero point; {able} have one",
                'Use a symmetric method such as "absmax"',
            )
    if len(asymmetric) > 1:
        raise SettingsError(
            f"Cannot use preset {row.name} with zero points for its {' and its '.join(asymmetric)}",
            "only one side of a product can have a zero point",
            'Use "absmax" for one of them',
        )
