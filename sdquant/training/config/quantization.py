"""Resolve the quantization keys to a scheme of a backend, rules, or nothing. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...core import registry
from ...errors import SdquantError, SettingsError, UnknownQuantError
from ...planning import AUTO, NOT_QUANTIZED, RULES
from ...rules import QtRule, QuantizationRule, presets, rule_of
from .keys import key

if TYPE_CHECKING:
    from .config import RunConfig
    from .topology import Shards

JOIN = "+"  # between component=scheme of one quantization

_SWITCH = "use_qwix_quantization"
_WEIGHT, _ACT, _BWD = (f"{name}_quantization_calibration_method" for name in ("weight", "act", "bwd"))
# Keys that only the rule engine uses, and those of them that a preset is made with.
_OF_PRESETS = ("qwix_module_path", _WEIGHT, _ACT, _BWD, "tile_size")
_OF_RULES = (*_OF_PRESETS, "quant_stats")
_OF_SHARDS = ("quantization_local_shard_count", "compile_topology_num_slices")


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Resolved quantization keys; at most one of `quant` and `rules` is set.

    Attributes:
        quant: as for `load_model`; None to change nothing.
        rules: for the rule engine. For training all are QtRule.
        quant_stats: file of the ranges of activations, for rules with act_static_scale.
        unused: keys that are set and have no effect together with the others, each with the reason.
    """

    quant: str | Mapping[str, str] | None = None
    rules: tuple[QuantizationRule, ...] | None = None
    quant_stats: str | None = None
    unused: Mapping[str, str] = dataclasses.field(default_factory=dict)


def quantization_of(config: RunConfig, shards: Shards | None = None) -> Quantization:
    """Resolve the quantization keys of a config, for the command that it was loaded for.

    Args:
        shards: for training: the weight gradient has one scale per shard, unless a rule sets its own.

    Raises:
        UnknownQuantError: no such preset or scheme. SettingsError: keys that contradict each other.
    """
    training = config.command == "train"
    name = config.quantization.strip()
    rules: tuple[QuantizationRule, ...] | None = None
    quant: str | Mapping[str, str] | None = None
    if config.rules:
        _refuse_beside_rules(config, name)
        rules = tuple(_own(number, row) for number, row in enumerate(config.rules))
    elif config.use_qwix_quantization and name:
        rules = _of_preset(name, config, training)
    elif not config.use_qwix_quantization:
        is_mix = _is_mix(config)
        _refuse_rule_keys(config, but=("quant_stats",) if is_mix else ())
        quant = _of_backend(name) if name else AUTO if is_mix else None
    if rules is not None:
        rules = tuple(_for_training(rule, shards) if training else _forward(rule) for rule in rules)
    if config.quant_stats is None and any(rule.act_static_scale for rule in rules or ()):
        raise SettingsError(
            "Cannot use a rule with act_static_scale",
            "the ranges of its activations must be calibrated beforehand, and quant_stats names no file with them",
            "Create one with `sdquant calibrate`, or leave act_static_scale out",
        )
    return Quantization(
        quant=quant,
        rules=rules,
        quant_stats=config.quant_stats if rules is not None or _is_mix(config) else None,
        unused=dict(_unused(config, rules)),
    )


def _refuse_beside_rules(config: RunConfig, name: str) -> None:
    what = f"Cannot combine rules with {{}} ({config.source or 'no file'})"
    if not config.use_qwix_quantization:
        raise SettingsError(what.format(f"{_SWITCH}=false"), "rules belong to the rule engine", f"Set {_SWITCH}: true")
    if name:
        raise SettingsError(
            what.format(f"quantization={name}"),
            "a preset is itself a list of rules",
            "Set quantization: '', or rules: []",
        )
    for one in _set(config, _OF_PRESETS):
        raise SettingsError(
            what.format(one), f"{one} applies to presets; a rule has its own field for it", "Move it into the rules"
        )


def _is_mix(config: RunConfig) -> bool:
    """Return whether each weight is to get a scheme of its own, by a size or quality."""
    return any(_set(config, ("size", "quality")))


def _refuse_rule_keys(config: RunConfig, but: tuple[str, ...]) -> None:
    for name in _set(config, tuple(name for name in _OF_RULES if name not in but)):
        raise SettingsError(
            f"Cannot combine {name} with {_SWITCH}=false",
            "only the rule engine uses it",
            f"Set {_SWITCH}: true, or leave {name} out",
        )


def _of_preset(name: str, config: RunConfig, training: bool) -> tuple[QuantizationRule, ...]:
    choices = presets.Choices(
        module_path=config.qwix_module_path,
        weight_method=config[_WEIGHT],
        act_method=config[_ACT],
        bwd_method=config[_BWD],
        tile_size=config.tile_size,
        static=config.quant_stats is not None,
        training=training,
    )
    try:
        return presets.preset_rules(name, choices)
    except UnknownQuantError as error:
        raise _other_engine(name, error) from None


def _other_engine(name: str, error: UnknownQuantError) -> SdquantError:
    """Return the error, with another fix if `name` is valid for the other engine."""
    what = f"Cannot use quantization={name} with {_SWITCH}=true"
    if name.lower() == NOT_QUANTIZED:
        return SettingsError(what, error.why, "Set quantization: '', which quantizes nothing")
    if "=" in name:
        why = "it names a scheme of a backend for each component, but a preset applies to all of them"
        return SettingsError(what, why, f"Name a preset, with the components in `components`, or set {_SWITCH}: false")
    try:
        row = registry.parse(name).scheme
    except SdquantError:
        return UnknownQuantError(what, error.why, error.fix)
    why = f"{error.why}; {row.name} is a scheme of the backend {row.backend}"
    return UnknownQuantError(what, why, f"Set {_SWITCH}: false, or use one of the presets")


def _of_backend(text: str) -> str | Mapping[str, str]:
    """Parse a scheme, or component=scheme pairs joined by JOIN."""
    each: dict[str, str] = {}
    for word in text.split(JOIN):
        head, sign, tail = word.partition("=")
        # In "int4,group_size=32" the sign belongs to an option.
        component, scheme = (head.strip(), tail.strip()) if sign and "," not in head else ("*", word.strip())
        if component in each:
            raise SettingsError(
                f"Cannot use quantization={text}",
                "each component has one scheme",
                f"Write it like unet=nf4{JOIN}text_encoder=int8",
            )
        if word.strip().lower() != AUTO or JOIN in text:
            _check_scheme(scheme)
        each[component] = scheme
    return each["*"] if set(each) == {"*"} else each


def _check_scheme(scheme: str) -> None:
    if scheme.lower() == NOT_QUANTIZED:
        return
    what = f"Cannot use quantization={scheme} with {_SWITCH}=false"
    if scheme.partition(",")[0].strip().lower() == RULES:
        raise SettingsError(
            what, "rules belong to the rule engine", f"Set {_SWITCH}: true and quantization: '', and list the rules"
        )
    try:
        registry.parse(scheme)
    except UnknownQuantError as error:
        if scheme.lower() in {row.name for row in presets.PRESETS}:
            why = f"{scheme} is a preset of the rule engine, not a scheme of a backend"
            raise UnknownQuantError(what, why, f"Set {_SWITCH}: true") from None
        names = ", ".join(row.name for row in registry.schemes() if row.on_the_fly and row.name != RULES)
        raise UnknownQuantError(what, f"the schemes for quantizing weights are {names}", error.fix) from None


def _own(number: int, values: Mapping[str, Any]) -> QuantizationRule:
    try:
        return rule_of(dict(values))
    except SdquantError as error:
        raise type(error)(f"Rule {number + 1} of `rules`: {error.inner}", error.why, error.fix) from error


def _for_training(rule: QuantizationRule, shards: Shards | None) -> QtRule:
    qt_rule = QtRule(**vars(rule))
    own = qt_rule.bwd_weight_grad_tile_size is not None or qt_rule.bwd_weight_grad_shards is not None
    if shards is None or qt_rule.bwd_qtype is None or own:
        return qt_rule
    return replace(qt_rule, bwd_weight_grad_shards=shards.of_weight_gradient)


def _forward(rule: QuantizationRule) -> QuantizationRule:
    """Return a rule without its fields about gradients."""
    values = {row.name: getattr(rule, row.name) for row in dataclasses.fields(QuantizationRule)}
    if isinstance(rule, QtRule) and rule.disable_channelwise_axes:
        return QtRule(**values, disable_channelwise_axes=True)
    return QuantizationRule(**values)


def _set(config: RunConfig, names: tuple[str, ...]) -> Iterator[str]:
    """Return the keys whose values differ from their defaults."""
    return (name for name in names if config[name] != key(name).default and config.command in key(name).commands)


def _unused(config: RunConfig, rules: tuple[QuantizationRule, ...] | None) -> Iterator[tuple[str, str]]:
    if rules is None:
        is_mix = _is_mix(config)
        reason = "only the rule engine uses it" if config.quantization or is_mix else "nothing is quantized"
        rows = (*_set(config, _OF_RULES), *_set(config, _OF_SHARDS))
        yield from ((name, reason) for name in rows if not (is_mix and name == "quant_stats"))
        return
    if not any(rule.act_qtype for rule in rules):
        yield from ((name, "no rule quantizes activations") for name in _set(config, (_ACT,)))
    if not any(rule.act_static_scale for rule in rules):
        yield from ((name, "no rule has act_static_scale") for name in _set(config, ("quant_stats",)))
    if config.command == "train" and not any(isinstance(rule, QtRule) and rule.bwd_qtype for rule in rules):
        yield from ((name, "no rule quantizes gradients") for name in _set(config, (_BWD, *_OF_SHARDS)))
    elif config.quantization_local_shard_count != -1:
        reason = "it only sets the default of quantization_local_shard_count, which is set"
        yield from ((name, reason) for name in _set(config, ("compile_topology_num_slices",)))
