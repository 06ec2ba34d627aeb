"""`quantize_model(model, provider)`: a copy of a model with the provider's layers."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConflictError, IncompatibleError
from ..models import peft_hooks
from ..nn import QuantizedLayer, kind_of, packed_of
from ..utils.malloc_trim import trim
from .model_rules import keep
from .qconfig import to_dict
from .qt.layers import QtLayer
from .quant_spec import operation_of, without_effect

if TYPE_CHECKING:
    from torch import nn

    from .providers.ptq import Provider
    from .qconfig import QuantizationRule

log = logging.getLogger(__name__)


def quantize_model(model: nn.Module, provider: Provider, *inputs: Any) -> Any:
    """Return a copy of `model` whose linear and convolution layers, and products of activations that rules name, are
    quantized by the rules of `provider`.

    A model on the meta device gives a template, which allocates nothing: `quantize_params` returns its tensors.

    Args:
        model: any module; one component of a pipeline. It is not changed, and float weights that are quantized are not
            copied. A model made with a QtProvider can be quantized again for inference; its collected ranges become the
            static ones.
        provider: has the rules; without any, the copy is a float model, as in Qwix.
        inputs: if there are any, the new model is called with them once, so that it fails now if it cannot run.

    Returns:
        The copy, of the same class. Rules that matched nothing are logged; see `provider.get_unused_rules`.

    Raises:
        ConflictError: a layer is quantized already. IncompatibleError: no rule matched anything.
        SettingsError: a rule cannot hold a weight that it matches.
    """
    memo: dict[int, Any] = {}
    weights = []
    for path, module in model.named_modules():
        if _suits(module):
            weights.append((f"{path}.weight", tuple(module.weight.shape)))
        row = _rule_for(module, path, provider)
        if row is not None:
            memo[id(module)] = _with_own_parameters(provider.layer(module, row, path), module)
    quantized = copy.deepcopy(model, {**memo})  # which fills the dict that it is given
    rules = provider.rules.rules
    if not provider.mark(quantized) and not memo and rules:  # without rules the float model is what was asked for
        raise IncompatibleError(
            f"Cannot quantize a {type(model).__name__} by {len(rules)} rules",
            "none of them matches any of its layers",
            "Compare its module names (`for name, _ in model.named_modules()`) with module_path and op_names",
        )
    keep(quantized, provider.rules.rules)
    for row in without_effect(provider.rules.rules, weights):  # those for products are told after the first run
        log.warning("A rule matched nothing: %s", to_dict(row))
    if inputs:
        with torch.no_grad():
            quantized(*inputs)
    peft_hooks.prepare(quantized)
    trim()  # what the arithmetic has freed
    return quantized


def _with_own_parameters(layer: nn.Module, original: nn.Module) -> nn.Module:
    """Return the layer with copies of the parameters that it shares with the original."""
    for name, parameter in layer._parameters.items():
        if parameter is not None and parameter is original._parameters.get(name):
            layer._parameters[name] = copy.deepcopy(parameter)
    return layer


def _rule_for(module: nn.Module, path: str, provider: Provider) -> QuantizationRule | None:
    if isinstance(module, QuantizedLayer) or packed_of(module) is not None:
        raise ConflictError(
            f"Cannot quantize layer {path!r} by a rule", "it is already quantized", "Start from the float model"
        )
    if not _suits(module):
        return None
    row = provider.rules.of(path, operation_of(tuple(module.weight.shape)))  # type: ignore[arg-type]
    return row if row is not None and row.weight_qtype is not None else None


def _suits(module: nn.Module) -> bool:
    return isinstance(module, QtLayer) or kind_of(module) in ("linear", "conv")
