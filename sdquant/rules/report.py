"""Report of what rules for products of activations have quantized in a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import SdquantWarning
from .quant_spec import is_for_products_alone

if TYPE_CHECKING:
    from .qconfig import QuantizationRule, Rules


class UnusedRuleWarning(SdquantWarning):
    """A rule that names products of activations has quantized none."""


@dataclass(frozen=True, kw_only=True)
class Unused:
    """A rule that has quantized no product yet, and why."""

    rule: QuantizationRule
    why: str

    def __str__(self) -> str:
        return f"The rule for {self.rule.module_path!r} with op_names={list(self.rule.op_names)}: {self.why}"


@dataclass
class RulesReport:
    """Counts of what the rules have quantized in a model, shared by all of its marks.

    Attributes:
        rules: of the model.
        modules: number of modules for which each rule that names products decides. attention: how many of them attend.
        done: number of calls that each has quantized.
    """

    rules: Rules
    modules: Counter[QuantizationRule] = field(default_factory=Counter)
    attention: Counter[QuantizationRule] = field(default_factory=Counter)
    done: Counter[QuantizationRule] = field(default_factory=Counter)

    def unused(self) -> tuple[Unused, ...]:
        """Return the rules that name products and have quantized none yet.

        A rule that is for weights too, like those of presets, only counts if it decides for attention modules."""
        rows = [rule for rule in self.rules.rules if rule.products and not self.done[rule]]
        return tuple(
            Unused(rule=rule, why=self._why(rule))
            for rule in rows
            if rule.weight_qtype is None or is_for_products_alone(rule) or self.attention[rule]
        )

    def _why(self, rule: QuantizationRule) -> str:
        count = self.modules[rule]
        if not count:
            return "no module path matches it, or earlier rules match all of those modules first"
        return (
            f"none of the {count} modules that it applies to called a torch function for these operations (diffusers' "
            'attention backends other than "native" call kernels of their own, and so does nn.MultiheadAttention)'
        )
