"""Rules: which layers are quantized, and how. The fields and their meanings are Qwix's (qconfig.py, qt.py)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import SettingsError
from .core.calibration_method import method
from .core.qtypes import qtype

# Qwix's names of operations, and torch's for the same.
OPERATIONS = {
    "dot_general": "dot_general", "linear": "dot_general", "matmul": "dot_general", "bmm": "dot_general",
    "conv_general_dilated": "conv_general_dilated", "conv1d": "conv_general_dilated",
    "conv2d": "conv_general_dilated", "conv3d": "conv_general_dilated",
    "einsum": "einsum", "scaled_dot_product_attention": "einsum", "sdpa": "einsum",
}  # fmt: skip
_ALIASES = {"bmm": "matmul", "sdpa": "scaled_dot_product_attention"}
# Products of two activations. Only rules that name them quantize them: a rule for all operations, or for Qwix's
# dot_general, is about weights, and quantized attention costs image quality, which should not come as a surprise.
# A rule that names only these applies to no weight.
PRODUCTS = ("einsum", "matmul", "bmm", "scaled_dot_product_attention", "sdpa")


def covers(name: str, operation: str) -> bool:
    """Return whether a name in op_names covers an operation: the same one, or one of them is Qwix's name for several.

    "einsum" is Qwix's name for attention too where a rule says it, and torch's function where it is the operation.
    """
    name, operation = _ALIASES.get(name, name), _ALIASES.get(operation, operation)
    return name == operation or name == OPERATIONS[operation] or (OPERATIONS[name] == operation != "einsum")


# List fields: element type, description and example; and boolean fields.
_LISTS: Mapping[str, tuple[type, str, str]] = {
    "op_names": (str, "names of operations", '["linear", "conv2d"]'),
    "act_batch_axes": (int, "numbers of axes", "[0, 1]"),
    "channelwise_noise_axes": (int, "numbers of axes", "[0]"),
}
_SWITCHES = ("act_static_scale", "disable_channelwise_axes")


@dataclass(frozen=True, kw_only=True)
class QuantizationRule:
    """Quantization of the layers that a pattern matches.

    Attributes:
        module_path: a regular expression for the whole of a module's path, with dots or with slashes between its parts.
        op_names: operations that the rule is for, by Qwix's names or torch's; none means all.
        weight_qtype: type of the weights; None leaves the operation as it is.
        act_qtype: type of the activations; None leaves them as they are.
        tile_size: how many numbers along the last summed axis share a scale (int), or one over how many such tiles
            there are (float); None for one scale along the whole of it.
        act_static_scale: whether the range of activations is static, from calibration; needs act_qtype.
        weight_calibration_method, act_calibration_method: "absmax|minmax|rms|fixed[,numbers]".
        act_batch_axes: axes that static ranges are averaged over; None means all but the summed one, so that
            a model is not tied to one sequence length. (Qwix has (0,).)

    Raises:
        SettingsError: a field with a value that it cannot have.
    """

    module_path: str = ".*"
    op_names: tuple[str, ...] = ()
    weight_qtype: str | None = None
    act_qtype: str | None = None
    tile_size: int | float | None = None
    act_static_scale: bool | None = None
    weight_calibration_method: str = "absmax"
    act_calibration_method: str | None = None
    act_batch_axes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        try:
            re.compile(self.module_path)
        except (re.error, TypeError) as error:
            why = f"it is not a valid regular expression: {error}"
            raise _refused(self, "module_path", why, 'Use one such as ".*attn.*"') from error
        _tuples(self)
        for name in self.op_names:
            if name not in OPERATIONS:
                raise _refused(self, "op_names", f"{name!r} is not one of {', '.join(OPERATIONS)}", "Use one of them")
        for name in ("weight_qtype", "act_qtype"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, qtype(str(getattr(self, name))).name)
        method(self.weight_calibration_method)
        if self.act_calibration_method is not None:
            method(self.act_calibration_method)
        self._check_zero_points()
        self._check_formats()
        if self.act_static_scale is not None and self.act_qtype is None:
            raise _refused(
                self, "act_static_scale", "act_qtype is not set", "Set act_qtype, or remove act_static_scale"
            )
        _check_tile(self, "tile_size")

    def _check_zero_points(self) -> None:
        for kind, text in (("weight", self.weight_calibration_method), ("act", self.act_calibration_method)):
            name = getattr(self, f"{kind}_qtype")
            if name is not None and text is not None and method(text).asymmetric and not qtype(name).asymmetric:
                why = f"the calibration method {text!r} gives asymmetric ranges, but {name} has no zero point"
                raise _refused(self, f"{kind}_qtype", why, 'Use "absmax", or int4, int8 or int16')

    def _check_formats(self) -> None:
        for name in ("weight_qtype", "act_qtype"):
            tile = qtype(getattr(self, name)).tile if getattr(self, name) is not None else None
            if tile is not None and self.tile_size != tile:
                why = f"it has one scale for every {tile} numbers, but tile_size is {self.tile_size}"
                raise _refused(self, name, why, f"Use tile_size={tile}")

    def matches(self, path: str, operation: str | None = None) -> bool:
        """Return whether the rule applies to the module at `path` ("blocks.0.attn.to_q") and the operation."""
        whole = re.compile(self.module_path).fullmatch
        fits = whole(path) is not None or whole(path.replace(".", "/")) is not None
        if operation is None or not self.op_names:
            return fits
        return fits and any(covers(name, operation) for name in self.op_names)

    def at(self, module_path: str) -> QuantizationRule:
        """Return the same rule for other modules."""
        return replace(self, module_path=module_path)

    @property
    def products(self) -> bool:
        """Return whether the rule quantizes products of two activations: it names one, and has an act_qtype."""
        return self.act_qtype is not None and any(name in PRODUCTS for name in self.op_names)


@dataclass(frozen=True, kw_only=True)
class QtRule(QuantizationRule):
    """A rule for training.

    Attributes:
        bwd_qtype: type of gradients; None passes them straight through (quantization-aware training).
        bwd_calibration_method: of gradients.
        bwd_weight_grad_tile_size: tiles in the sum of the weight's gradient, along the axis before the last of a linear
            layer's input (the rows of [rows, in], the tokens of [batch, tokens, in]).
        bwd_weight_grad_shards: into how many parts, each with scales of its own, the batch is cut in the weight's
            gradient: MaxDiffusion's quantization_local_shard_count. 0 leaves that gradient unquantized.
        disable_channelwise_axes: one scale for a whole tensor, forward and backward.
        bwd_stochastic_rounding: None, "uniform" or "low_bit_uniform".
        channelwise_noise_axes: axes that the noise of stochastic rounding differs along.
    """

    bwd_qtype: str | None = None
    bwd_calibration_method: str = "absmax"
    bwd_weight_grad_tile_size: int | float | None = None
    bwd_weight_grad_shards: int | None = None
    disable_channelwise_axes: bool = False
    bwd_stochastic_rounding: str | None = None
    channelwise_noise_axes: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bwd_qtype is not None:
            object.__setattr__(self, "bwd_qtype", qtype(str(self.bwd_qtype)).name)
        method(self.bwd_calibration_method)
        _check_tile(self, "bwd_weight_grad_tile_size")
        if self.bwd_stochastic_rounding not in (None, "uniform", "low_bit_uniform"):
            raise _refused(
                self,
                "bwd_stochastic_rounding",
                "it must be uniform or low_bit_uniform",
                "Use one of them, or remove it",
            )
        shards = self.bwd_weight_grad_shards
        if shards is not None and (isinstance(shards, bool) or not isinstance(shards, int) or shards < 0):
            raise _refused(self, "bwd_weight_grad_shards", "it must be a number of parts", "Use 0, 1 or more")
        if shards is not None and self.bwd_weight_grad_tile_size is not None:
            why = "bwd_weight_grad_tile_size already splits the same sum"
            raise _refused(self, "bwd_weight_grad_shards", why, "Remove one of them")


def to_dict(rule: QuantizationRule) -> dict[str, Any]:
    """Return the fields of a rule that differ from their defaults, as JSON values; `rule_of` is the inverse."""
    values = {row.name: getattr(rule, row.name) for row in fields(rule) if getattr(rule, row.name) != row.default}
    if isinstance(rule, QtRule) and not set(values) - {row.name for row in fields(QuantizationRule)}:
        values["bwd_calibration_method"] = rule.bwd_calibration_method  # so that it stays a QtRule
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


class Rules:
    """Rules in order: the first that matches decides. Keeps track of which have matched.

    Args:
        rules: QuantizationRule or QtRule, or mappings of their fields.
    """

    def __init__(self, rules: Iterable[QuantizationRule | dict[str, Any]]) -> None:
        self.rules: Sequence[QuantizationRule] = tuple(
            row if isinstance(row, QuantizationRule) else rule_of(row) for row in rules
        )
        self._used = [False] * len(self.rules)

    def of(self, path: str, operation: str | None = None) -> QuantizationRule | None:
        """Return the rule for a module and an operation; None if it is not quantized."""
        for number, row in enumerate(self.rules):
            if row.matches(path, operation):
                self._used[number] = True
                return row
        return None

    def unused(self) -> tuple[QuantizationRule, ...]:
        """Return the rules that have matched nothing yet."""
        return tuple(row for row, used in zip(self.rules, self._used, strict=True) if not used)


def rule_of(values: dict[str, Any]) -> QuantizationRule:
    """Make a rule from its fields by name: a QtRule if one of them exists only there.

    Raises:
        SettingsError: an unknown field, or a value that it cannot have.
    """
    known = {row.name for row in fields(QtRule)}
    unknown = [name for name in values if name not in known]
    if unknown:
        raise SettingsError(
            f"Unknown rule field {unknown[0]!r}", f"the fields are {', '.join(sorted(known))}", "Use one of them"
        )
    kind = QuantizationRule if set(values) <= {row.name for row in fields(QuantizationRule)} else QtRule
    return kind(**values)


def _tuples(rule: QuantizationRule) -> None:
    """Convert lists, as files have them, to tuples; refuse other values in list fields and in boolean fields."""
    for row in fields(rule):
        value = getattr(rule, row.name)
        if row.name in _LISTS and value != row.default:
            kind, description, example = _LISTS[row.name]
            if not isinstance(value, (list, tuple)) or not all(type(one) is kind for one in value):
                raise _refused(rule, row.name, f"it must be a list of {description}", f"Write it like {example}")
            object.__setattr__(rule, row.name, tuple(value))
        if row.name in _SWITCHES and value is not row.default and not isinstance(value, bool):
            raise _refused(rule, row.name, "it must be true or false", "Use one of them")


def _check_tile(rule: QuantizationRule, name: str) -> None:
    size = getattr(rule, name)
    if size is None:
        return
    number = isinstance(size, (int, float)) and not isinstance(size, bool)
    if not number or size <= 0 or (isinstance(size, float) and size > 1):
        why = "it must be a whole number above 0, or one over a number of tiles (a float up to 1.0)"
        raise _refused(rule, name, why, "Use 128, or 0.25")


def _refused(rule: QuantizationRule, name: str, why: str, fix: str) -> SettingsError:
    return SettingsError(f"Invalid rule field {name}={getattr(rule, name)!r}", why, fix)
