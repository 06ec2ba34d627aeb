"""Rules as a `QuantSpec`: what is asked for each weight is what the first matching rule says. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.backend import QuantSpec, Unfit
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
        act_shape: of the static range of its activations, where it is known.
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
        component: name of the component in its pipeline, whose part of the file is meant; "" if it stands alone.
    """

    rules: tuple[QuantizationRule, ...] = ()
    statistics: str | None = None
    component: str = ""

    def of_component(self, name: str) -> RulesSpec:
        return replace(self, component=name)

    def of(self, name: str, shape: tuple[int, ...]) -> RuleSpec:
        """The first rule that matches a weight called "<path>.weight"."""
        path, operation = name.removesuffix(".weight"), operation_of(shape)
        found = first(self.rules, path, operation)
        if found is None:
            raise Unfit(NO_RULE)
        if found.weight_qtype is None:
            raise Unfit(LEFT)
        return RuleSpec(self.scheme, self.options, self.embeddings, found, path, self.statistics, self.component)

    def suits(self, weights: Iterable[tuple[str, tuple[int, ...]]]) -> bool:
        """Whether a rule is for one of these weights, given by name and shape."""
        found = (first(self.rules, name.removesuffix(".weight"), operation_of(shape)) for name, shape in weights)
        return any(row is not None and row.weight_qtype is not None for row in found)

    @property
    def products(self) -> bool:
        """Whether a rule is for products of activations."""
        return any(row.products for row in self.rules)

    def known(self) -> Mapping[str, Tensor]:
        """The ranges in the file of statistics that are of the component."""
        if self.statistics is None:
            return {}
        from .statistics_file import of_component, read_statistics

        return of_component(read_statistics(self.statistics), self.component)

    def unused(self, weights: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[QuantizationRule, ...]:
        """The rules for weights that decide for none of these, given by name and shape. A rule for a kind of layer,
        anywhere, is none of them where there is no such layer: in a model without convolutions, one for these."""
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
    """Rules for what was asked for as the scheme `rules`.

    Raises:
        SettingsError: it is another scheme, or says what rules say.
    """
    if spec.scheme.name != "rules":
        raise SettingsError(
            f"Cannot combine rules with quant={str(spec)!r}", "rules need quant='rules'", "Remove one of the two"
        )
    if spec.options or spec.embeddings:
        raise SettingsError(
            f"Cannot combine rules with quant={str(spec)!r}",
            "its options already are one rule for all layers",
            "Remove either the options or the rules",
        )
    return RulesSpec(spec.scheme, rules=rules, statistics=statistics, component=component)


def digest(file: str | None) -> str | None:
    """sha256 of a small file's bytes."""
    return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


def operation_of(shape: tuple[int, ...]) -> str:
    """The operation that a weight of this shape is for: "linear", or "conv1d" to "conv3d"."""
    return "linear" if len(shape) == 2 else f"conv{len(shape) - 2}d"


def first(rules: Iterable[QuantizationRule], path: str, operation: str) -> QuantizationRule | None:
    """The first rule that matches a module and an operation."""
    return next((row for row in rules if row.matches(path, operation)), None)


def is_for_products_alone(rule: QuantizationRule) -> bool:
    """Whether a rule names operations, and only such as multiply two activations."""
    return bool(rule.op_names) and set(rule.op_names) <= set(PRODUCTS)
