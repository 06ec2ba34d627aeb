"""Layers for training: the provider of `quantize_model` (Qwix's QtProvider)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..qconfig import QtRule, QuantizationRule, Rules
from .layers import LAYERS, QtLayer

if TYPE_CHECKING:
    from torch import nn


class QtProvider:
    """Float weights, quantized each time that a layer runs, with gradients.

    Args:
        rules: QtRule, QuantizationRule (which trains straight-through), or mappings of their fields; the first that
            matches a layer decides.
    """

    def __init__(self, rules: Iterable[QuantizationRule | dict[str, Any]] | Rules) -> None:
        self.rules = rules if isinstance(rules, Rules) else Rules(rules)

    def layer(self, module: nn.Module, rule: QuantizationRule, path: str) -> QtLayer:
        """Return the layer that replaces a float one at `path`; it shares the parameters.

        Raises:
            SettingsError: the rule cannot be used for this layer.
        """
        if isinstance(module, QtLayer):
            module = module.float_layer()
        kind = next(layer_type for base, layer_type in LAYERS.items() if isinstance(module, base))
        return kind.of(module, as_qt(rule), path)

    def mark(self, model: nn.Module) -> int:
        """Have the products of activations that rules name quantized; return the number of modules with some."""
        from ..interception import mark  # which needs this package

        return mark(model, self.rules, collects=True)

    def get_unused_rules(self) -> tuple[QuantizationRule, ...]:
        """Return the rules that have matched nothing."""
        return self.rules.unused()


def as_qt(rule: QuantizationRule) -> QtRule:
    """Convert a rule to one for training: straight-through unless it has a bwd_qtype."""
    return rule if isinstance(rule, QtRule) else QtRule(**vars(rule))
