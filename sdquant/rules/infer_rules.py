"""Inference of rules from how each layer is quantized; the first rule that matches a layer decides. No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from .qconfig import QtRule, QuantizationRule
from .quant_spec import first


@dataclass(frozen=True)
class Layer:
    """A layer and how it is quantized.

    Attributes:
        operation: the operation of its weight. rule: by which it is quantized; None if it is not.
    """

    operation: str
    rule: QuantizationRule | None


def recovered(layers: Mapping[str, Layer], known: Iterable[QuantizationRule] = ()) -> tuple[QuantizationRule, ...]:
    """Return rules by which every layer is quantized as it is.

    Args:
        layers: by path of the module.
        known: rules that were used for them; they are kept, with rules before them for layers that they are wrong about
            (skipped ones, for example). Without any: the rules of the layers, in a correct order.
    """
    rows = tuple(known) or _in_order(layers)
    common = (rule for rule in _by_name(_wrong(rows, layers), wildcard) if _for_all(rule, layers))
    rows = (*common, *rows)
    return (*_by_name(_wrong(rows, layers), re.escape), *rows)  # exact paths are always right


def by_path(layers: Mapping[str, Layer]) -> tuple[QuantizationRule, ...]:
    """Return rules by which every layer is quantized as it is, one for layers whose paths differ only in numbers."""
    return recovered(layers, _by_name({path: one for path, one in layers.items() if one.rule is not None}, wildcard))


def wildcard(path: str) -> str:
    """Return a path as a pattern in which numbers between dots match anything but a dot."""
    return r"\.".join("[^.]+" if part.isdigit() else re.escape(part) for part in path.split("."))


def does(rule: QuantizationRule | None) -> str | None:
    """Return what a rule does with a layer, as text to compare (tile sizes 1 and 1.0 differ); None if it leaves the
    layer unquantized."""
    if rule is None or rule.weight_qtype is None:
        return None
    known = (row for row in fields(QtRule) if row.name not in ("module_path", "op_names"))
    return repr([getattr(rule, row.name, row.default) for row in known])


def _wrong(rules: Sequence[QuantizationRule], layers: Mapping[str, Layer]) -> dict[str, Layer]:
    """Return the layers that these rules would quantize differently."""
    return {
        path: layer for path, layer in layers.items() if does(first(rules, path, layer.operation)) != does(layer.rule)
    }


def _for_all(rule: QuantizationRule, layers: Mapping[str, Layer]) -> bool:
    """Return whether every layer that a rule matches is quantized as the rule says."""
    return all(does(layer.rule) == does(rule) for path, layer in layers.items() if rule.matches(path, layer.operation))


def _by_name(layers: Mapping[str, Layer], named: Callable[[str], str]) -> tuple[QuantizationRule, ...]:
    """Return one rule for each name that layers share: that of most of these layers."""
    groups: dict[str, list[Layer]] = {}
    for path, layer in layers.items():
        groups.setdefault(named(path), []).append(layer)
    rules = []
    for name, rows in groups.items():
        counts = Counter(does(layer.rule) for layer in rows)
        rules.append(_bare(max(rows, key=lambda layer: counts[does(layer.rule)]).rule, name))
    return tuple(rules)


def _bare(rule: QuantizationRule | None, name: str) -> QuantizationRule:
    if rule is None:
        return QuantizationRule(module_path=name)
    return replace(rule, module_path=name, op_names=())


def _in_order(layers: Mapping[str, Layer]) -> tuple[QuantizationRule, ...]:
    """Return the rules of quantized layers in an order in which the first match is each layer's own rule.

    A rule may come next if all layers that it matches, and that no earlier rule matches, are its own. Rules that
    cannot be put in order are left out.
    """
    open_ = {path: layer for path, layer in layers.items() if layer.rule is not None}
    left = {repr(layer.rule): layer.rule for layer in open_.values() if layer.rule is not None}
    rows: list[QuantizationRule] = []
    while left:
        for text, rule in left.items():
            matched = [path for path, layer in open_.items() if rule.matches(path, layer.operation)]
            if all(repr(open_[path].rule) == text for path in matched):
                break
        else:
            break
        rows.append(left.pop(text))
        for path in matched:
            del open_[path]
    return tuple(rows)
