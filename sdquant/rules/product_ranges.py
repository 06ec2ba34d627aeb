"""Static ranges of products of activations, stored in a model as buffers of the module that multiplies.

A product's operand is called "einsum0_lhs", with Qwix's names of operations, counted in each run of its module; its
buffers "einsum0_lhs_scale" (float32) and, where the range is asymmetric, "einsum0_lhs_zero_point". They are in state
dicts and files, move with the model, and exist with or without a mark (`interception`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..core import RANGE_BUFFER, RANGE_OPERAND, is_range
from ..errors import SettingsError
from .core.static_range import StaticRange, of_operand, spellings
from .quant_spec import first

if TYPE_CHECKING:
    from .qconfig import QuantizationRule, Rules

MARK = "_sdquant_mark"  # the attribute of a marked module
# What rules can name that Qwix counts under one name.
COUNTED = {"einsum": ("scaled_dot_product_attention", "einsum"), "dot_general": ("matmul",)}


def static_rule(rules: Rules, path: str, name: str) -> QuantizationRule | None:
    """Return the rule that gives a static range to operand `name` of the module at `path`, or None."""
    match = RANGE_OPERAND.fullmatch(name)
    if match is None:
        return None
    candidates = (first(rules.rules, path, operation) for operation in COUNTED[match[1]])
    return next((row for row in candidates if row is not None and row.products and row.act_static_scale), None)


def ranges_of(model: nn.Module, rules: Rules, statistics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the buffers that follow from statistics of products in a model, by their names in the model.

    Raises:
        SettingsError: statistics without data, or of another rule.
    """
    modules, tensors = dict(model.named_modules()), dict[str, Tensor]()
    for prefix in sorted({key.rpartition(".")[0] for key in statistics}):
        stored_path, _, name = prefix.rpartition(".")
        path = next((one for one in spellings(stored_path) if one in modules), None)
        rule = None if path is None else static_rule(rules, path, name)
        if rule is not None:
            tensors |= buffers(f"{path}.{name}" if path else name, of_operand(statistics, prefix, rule))
    return tensors


def buffers(operand: str, static: StaticRange) -> dict[str, Tensor]:
    """Return the buffers of a range by name. operand: with the path of its module."""
    tensors = {f"{operand}_scale": static.scale}
    return tensors if static.zero_point is None else tensors | {f"{operand}_zero_point": static.zero_point}


def register_ranges(model: nn.Module, ranges: Mapping[str, Tensor]) -> None:
    """Register ranges, given by the names of their buffers, in a model, on the device of its other tensors."""
    modules = dict(model.named_modules())
    here = next((one.device for one in model.parameters() if not one.is_meta), torch.device("cpu"))
    for key, value in ranges.items():
        stored_path, _, leaf = key.rpartition(".")
        path = next((one for one in spellings(stored_path) if one in modules), None)
        if path is not None:
            modules[path].register_buffer(leaf, value.to(here) if not value.is_meta else value)


def stand_in(model: nn.Module, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Register meta buffers for the ranges among a file's tensors, given by key and shape."""
    kinds = {"scale": torch.float32, "point": torch.int8}
    register_ranges(
        model,
        {
            key: torch.empty(shape, dtype=kinds[key.rpartition("_")[2]], device="meta")
            for key, shape in shapes
            if is_range(key)
        },
    )


def drop(module: nn.Module) -> None:
    """Remove a module's own ranges."""
    for name in [name for name in module._buffers if RANGE_BUFFER.fullmatch(name)]:
        delattr(module, name)


def range_in(module: nn.Module, path: str, name: str) -> StaticRange:
    """Return the static range of an operand of a running module.

    Raises:
        SettingsError: it has none.
    """
    scale = module._buffers.get(f"{name}_scale")
    if scale is None:
        raise SettingsError(
            f"Cannot find a static range for {f'{path}.{name}' if path else name}",
            "the model has none: calibration saw no data for this product",
            "Calibrate with `sdquant calibrate` and pass the result as quant_stats, or remove act_static_scale",
        )
    return StaticRange(scale, module._buffers.get(f"{name}_zero_point"))
