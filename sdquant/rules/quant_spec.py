"""Rules as a `QuantSpec`: each weight is quantized by the first matching rule. No torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ..core import QuantSpec, Unfit
from ..errors import SettingsError
from .qconfig import PRODUCTS, QuantizationRule, to_dict

if TYPE_CHECKING:
    from torch import Tensor

NO_RULE = "no rule matches it"
LEFT = "the first rule that matches leaves it unquantized (no weight_qtype)"


@dataclass(frozen=True)
class RuleSpec(QuantSpec):
    """One rule, for one weight.

    Attributes:
        path: of its module. statistics, component: see `RulesSpec`.
        act_shape: shape of the static range of its activations, if known.
    """

    rule: QuantizationRule = QuantizationRule()  # noqa: RUF009  # frozen
    path: str = ""
    statistics: str | None = None
    component: str = ""
    act_shape: tuple[int, ...] | None = None

    def described(self) -> str:
        return json.dumps([str(self), to_dict(self.rule)], sort_keys=True)


@dataclass(frozen=True)
class RulesSpec(QuantSpec):
    """Several rules.

    Attributes:
        rules: in order; the first that matches a weight decides.
        statistics: path of the file with the ranges of activations, for rules with act_static_scale.
        component: name of the component in its pipeline, whose statistics in the file are used; "" if it stands alone.
    """

    rules: tuple[QuantizationRule, ...] = ()
    statistics: str | None = None
    component: str = ""

    def of_component(self, name: str) -> RulesSpec:
        return replace(self, component=name)

    def of(self, name: str, shape: tuple[int, ...]) -> RuleSpec:
        """Return the first rule that matches a weight called "<path>.weight"."""
        path, operation = name.removesuffix(".weight"), operation_of(shape)
        rule = first(self.rules, path, operation)
        if rule is None:
            raise Unfit(NO_RULE)
        if rule.weight_qtype is None:
            raise Unfit(LEFT)
        return RuleSpec(self.scheme, self.options, self.embeddings, rule, path, self.statistics, self.component)

    def suits(self, weights: Iterable[tuple[str, tuple[int, ...]]]) -> bool:
        """Return whether a rule quantizes one of these weights, given by name and shape."""
        matches = (first(self.rules, name.removesuffix(".weight"), operation_of(shape)) for name, shape in weights)
        return any(row is not None and row.weight_qtype is not None for row in matches)

    @property
    def products(self) -> bool:
        """Return whether a rule is for products of activations."""
        return any(row.products for row in self.rules)

    def known(self) -> Mapping[str, Tensor]:
        """Return the component's ranges in the file of statistics."""
        if self.statistics is None:
            return {}
        from .statistics_file import of_component, read_statistics

        return of_component(read_statistics(self.statistics), self.component)

    def unused(self, weights: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[QuantizationRule, ...]:
        """Return the rules for weights that match none of these first, given by name and shape. A catch-all rule for a
        layer type counts as used if the model has no such layer."""
        return without_effect(self.rules, weights)

    def described(self) -> str:
        rows = [to_dict(row) for row in self.rules]
        return json.dumps([str(self), rows, self.component, digest(self.statistics)], sort_keys=True)


def without_effect(
    rules: Iterable[QuantizationRule], weights: Iterable[tuple[str, tuple[int, ...]]]
) -> tuple[QuantizationRule, ...]:
    """See `RulesSpec.unused`."""
    rules = tuple(rules)
    layers = [(name.removesuffix(".weight"), operation_of(shape)) for name, shape in weights]
    used = {id(first(rules, *layer)) for layer in layers}
    unused = (row for row in rules if id(row) not in used and not is_for_products_alone(row))
    return tuple(row for row in unused if row.module_path != ".*" or any(row.matches(*layer) for layer in layers))


def with_rules(
    spec: QuantSpec, rules: tuple[QuantizationRule, ...], statistics: str | None = None, component: str = ""
) -> RulesSpec:
    """Return the spec of the scheme `rules` with these rules.

    Raises:
        SettingsError: `spec` is another scheme, or has options, which are a rule themselves.
    """
    what = f"Cannot combine rules with quant={str(spec)!r}"
    if spec.scheme.name != "rules":
        raise SettingsError(what, "rules need quant='rules'", "Remove one of the two")
    if spec.options or spec.embeddings:
        why = "its options already are one rule for all layers"
        raise SettingsError(what, why, "Remove either the options or the rules")
    return RulesSpec(spec.scheme, rules=rules, statistics=statistics, component=component)


def digest(file: str | None) -> str | None:
    """Return the SHA-256 of a file."""
    if file is None:
        return None
    status = os.stat(file)
    return _digest(os.path.abspath(file), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=16)
def _digest(file: str, changed: int, size: int) -> str:
    hashed = hashlib.sha256()
    with open(file, "rb") as opened:
        while chunk := opened.read(1 << 24):
            hashed.update(chunk)
    return hashed.hexdigest()


def operation_of(shape: tuple[int, ...]) -> str:
    """Return the operation of a weight of this shape: "linear", or "conv1d" to "conv3d"."""
    return "linear" if len(shape) == 2 else f"conv{len(shape) - 2}d"


def first(rules: Iterable[QuantizationRule], path: str, operation: str) -> QuantizationRule | None:
    """Return the first rule that matches a module and an operation."""
    return next((row for row in rules if row.matches(path, operation)), None)


def is_for_products_alone(rule: QuantizationRule) -> bool:
    """Return whether a rule names operations, and only products of two activations."""
    return bool(rule.op_names) and set(rule.op_names) <= set(PRODUCTS)
