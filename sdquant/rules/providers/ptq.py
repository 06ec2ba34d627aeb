"""Layers with quantized weights, for inference: the provider of `quantize_model` (Qwix's PtqProvider)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ...core import Packed, PackedSpec, QuantSpec, Unfit, dtype_name, dtype_named, registry
from ...errors import SettingsError
from ...models import require_finite
from ...nn import QuantizedLayer, quantized_layer
from ..core.static_range import static_range
from ..interception import mark
from ..packed_layout import ACT_SHAPE, layout, weight_how
from ..packed_qarray import encode
from ..qconfig import QuantizationRule, Rules, rule_of, to_dict
from ..qt.layers import QtLayer
from ..qt.statistics import quant_stats
from ..quant_spec import operation_of

if TYPE_CHECKING:
    from ..core.how_to_quantize import HowToQuantize

SCHEME = "rules"


class Provider(Protocol):
    """Interface that `quantize_model` needs."""

    rules: Rules

    def layer(self, module: nn.Module, rule: QuantizationRule, path: str) -> nn.Module:
        """Return the layer that replaces the float layer `module` at `path`, quantized by `rule`."""

    def mark(self, model: nn.Module) -> int:
        """Have the products of activations that rules name quantized; return the number of modules with some."""


class PtqProvider:
    """Quantized weights, and activations quantized at run time.

    Args:
        rules: QuantizationRule, or mappings of their fields; the first that matches a layer decides.
        quant_stats: of calibration, for rules with act_static_scale where the model has its weights already. A
            template on the meta device gets them in `quantize_params`.
    """

    def __init__(
        self,
        rules: Iterable[QuantizationRule | dict[str, Any]] | Rules,
        quant_stats: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.rules = rules if isinstance(rules, Rules) else Rules(rules)
        self._statistics = quant_stats

    def layer(self, module: nn.Module, rule: QuantizationRule, path: str) -> QuantizedLayer:
        """Return a layer of `module`'s type with a packed weight; on the meta device its tensors have no values yet.

        Raises:
            SettingsError: the rule cannot hold this weight, or there are no statistics of its input.
            BadFileError: the weight has values that are not finite.
        """
        statistics = self._statistics
        if isinstance(module, QtLayer):
            if statistics is None and module.statistics is not None:
                statistics = module.statistics.to_dict(exact=False)
            module = module.float_layer()
        weight = module.weight
        assert isinstance(weight, Tensor)
        spec = QuantSpec(registry.scheme(SCHEME))
        try:
            packed = template(weight, rule) if weight.is_meta else _packed(weight.data, rule, path, statistics or {})
        except Unfit as reason:
            what = f"Cannot quantize layer {path!r} by the rule for {rule.module_path!r}"
            raise SettingsError(
                what, str(reason), "Change the rule, or add an earlier one that matches this layer"
            ) from None
        if not weight.is_meta:
            require_finite(f"{path}.weight", packed.parts["scale"].float(), spec)
        layer = quantized_layer(module, packed, path=path)
        if weight.is_meta:
            for parameter in layer.parameters():
                parameter.how = how_of(layer)  # type: ignore[attr-defined]
        return layer

    def mark(self, model: nn.Module) -> int:
        """See `Provider`. Static ranges come from the statistics, or those that a model for training has collected."""
        known = quant_stats(model) if self._statistics is None else self._statistics
        return mark(model, self.rules, known)

    def get_unused_rules(self) -> tuple[QuantizationRule, ...]:
        """Return the rules that have matched nothing."""
        return self.rules.unused()


def _packed(weight: Tensor, rule: QuantizationRule, path: str, statistics: Mapping[str, Tensor]) -> Packed:
    static = None
    if rule.act_static_scale:
        static = static_range(statistics, path, operation_of(tuple(weight.shape)), rule)
    return encode(weight, rule, static)


def template(weight: Tensor, rule: QuantizationRule) -> Packed:
    """Return a packed weight on the meta device: tensors of the right shapes and dtypes, without values."""
    shape, dtype = tuple(weight.shape), dtype_name(weight.dtype)
    parts = {
        name: torch.empty(part.shape, dtype=dtype_named(part.dtype), device="meta")
        for name, part in layout(rule, shape, dtype).items()
    }
    spec = PackedSpec(scheme=registry.scheme(SCHEME), shape=shape, dtype=dtype, details=to_dict(rule))
    return Packed(spec=spec, parts=parts)


def rule_of_layer(layer: QuantizedLayer) -> QuantizationRule:
    """Return the rule that a layer was quantized by."""
    return rule_of({name: value for name, value in layer.spec.details.items() if name != ACT_SHAPE})


def how_of(layer: QuantizedLayer) -> HowToQuantize:
    """Return the quantization settings of a quantized layer's weight."""
    return weight_how(rule_of_layer(layer), layer.spec.shape)
