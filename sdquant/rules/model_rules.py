"""The rules that a model was quantized by, stored on it and in its files: `rules_of_model`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..nn import QuantizedLayer, kind_of
from .infer_rules import Layer, recovered
from .interception import mark, unmark
from .qconfig import Rules, to_dict
from .qt.layers import QtLayer
from .quant_spec import operation_of

if TYPE_CHECKING:
    from torch import nn

    from .qconfig import QuantizationRule
    from .quant_spec import RulesSpec

_ATTRIBUTE = "_sdquant_rules"
SCHEME = "rules"


def keep(model: nn.Module, rules: Iterable[QuantizationRule]) -> None:
    """Store on a model the rules that it was quantized by; copies and pickles keep them."""
    model.__dict__[_ATTRIBUTE] = tuple(rules)


def attach_rules(model: nn.Module, spec: RulesSpec) -> None:
    """Store the rules of `spec` on a component whose layers are in place, and mark it if they name products of
    activations."""
    keep(model, spec.rules)
    if spec.products:
        mark(model, Rules(spec.rules), spec.known())


def given_rules(model: nn.Module) -> dict[str, Any]:
    """Return what `quantization_config.said_rules` does, before layers are in place: the rules passed for the model."""
    rules = model.__dict__.get(_ATTRIBUTE, ())
    return {"rules": [to_dict(row) for row in rules]} if rules else {}


def forget(model: nn.Module) -> None:
    """Undo `keep` and the marks of products of activations, for a model that becomes a float one again."""
    model.__dict__.pop(_ATTRIBUTE, None)
    unmark(model)


def rules_of_model(model: nn.Module) -> list[QuantizationRule]:
    """Return rules by which each layer of a model is quantized as it is. The model may have been loaded, quantized,
    made for training, or read from a saved file.

    These are the original rules if they are known, after rules of their own for layers that do not follow them (skipped
    ones). [] if no layer of the model is quantized by rules and none were passed for it.
    """
    from .providers.ptq import rule_of_layer

    layers: dict[str, Layer] = {}
    for path, module in model.named_modules():
        if isinstance(module, QtLayer):
            layers[path] = Layer(operation_of(tuple(module._float()[0].shape)), module.rule)
        elif isinstance(module, QuantizedLayer):
            ours = module.spec.scheme.name == SCHEME
            layers[path] = Layer(operation_of(module.spec.shape), rule_of_layer(module) if ours else None)
        elif kind_of(module) in ("linear", "conv"):
            layers[path] = Layer(operation_of(tuple(module.weight.shape)), None)
    known = model.__dict__.get(_ATTRIBUTE, ())
    if not known and not any(layer.rule is not None for layer in layers.values()):
        return []
    return list(recovered(layers, known))
