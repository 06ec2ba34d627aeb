"""The rules that a model was quantized by, kept on it and in its files: `rules_of_model`."""

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
    """Have a model remember the rules that it was quantized by. Copies and pickles of it do, too."""
    model.__dict__[_ATTRIBUTE] = tuple(rules)


def attach_rules(model: nn.Module, spec: RulesSpec) -> None:
    """Have a component, whose layers are in place, remember the rules of `spec`, and its products of activations
    quantized where the rules name them."""
    keep(model, spec.rules)
    if spec.products:
        mark(model, Rules(spec.rules), spec.known())


def given_rules(model: nn.Module) -> dict[str, Any]:
    """The same as `library_config.said_rules`, before the model's layers are in place: those that were given for it."""
    rules = model.__dict__.get(_ATTRIBUTE, ())
    return {"rules": [to_dict(row) for row in rules]} if rules else {}


def forget(model: nn.Module) -> None:
    """Undo `keep`, and what is done with products of activations: the model is to be a float one again."""
    model.__dict__.pop(_ATTRIBUTE, None)
    unmark(model)


def rules_of_model(model: nn.Module) -> list[QuantizationRule]:
    """Rules by which each layer of a model is quantized as it is: of one that was loaded, quantized, or made for
    training, or read from a file that was saved.

    They are those that were given, where these are known, after rules of their own for layers that were not done by
    them (skipped ones). [] if the model has no layer that is quantized by rules, and was given none.
    """
    from .providers.ptq import rule_of_layer

    layers: dict[str, Layer] = {}
    for path, module in model.named_modules():
        if isinstance(module, QtLayer):
            layers[path] = Layer(operation_of(tuple(module._float()[0].shape)), module.rule)
        elif isinstance(module, QuantizedLayer):
            ours = module.spec.scheme == SCHEME
            layers[path] = Layer(operation_of(module.spec.shape), rule_of_layer(module) if ours else None)
        elif kind_of(module) in ("linear", "conv"):
            layers[path] = Layer(operation_of(tuple(module.weight.shape)), None)
    known = model.__dict__.get(_ATTRIBUTE, ())
    if not known and not any(layer.rule is not None for layer in layers.values()):
        return []
    return list(recovered(layers, known))
