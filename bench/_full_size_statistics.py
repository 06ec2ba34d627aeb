"""Statistics for a model that no image can be drawn with: of random inputs that are larger in some columns, and of
random gradients that are larger in some layers and rows."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from sdquant.models import components
from sdquant.rules import ComponentStatistics, layer_statistics, statistics_file
from sdquant.rules.core.static_range import operand
from sdquant.rules.quant_spec import operation_of
from sdquant.training import input_moments

ROWS, LIMIT = 512, 10**9  # inputs of a layer; the default of `sdquant calibrate --limit`
CALLS = 12  # of the model that got a gradient


def statistics(source: Path) -> Path:
    """Return the file of statistics beside a component's folder, generated if it is not there."""
    target = source.with_name(f"{source.name}-statistics.safetensors")
    if not target.exists() or not ComponentStatistics(str(target), "transformer").has_gradients:
        config = json.loads((source / "config.json").read_text())
        model = components.empty("diffusers", config["_class_name"], config)
        layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        block = input_moments.block_size([layer.in_features for layer in layers.values()], LIMIT)
        found: dict[str, Tensor] = {}
        random = torch.Generator().manual_seed(0)
        for path, layer in layers.items():
            name = f"transformer.{operand(path, operation_of((1, layer.in_features)))}"
            found[f"{name}.{layer_statistics.ROWS}"] = torch.tensor(ROWS)
            found[f"{name}.{layer_statistics.MOMENTS}"] = _moments(layer.in_features, block, random)
            weight = f"transformer.{path}.{layer_statistics.WEIGHT}"
            found[f"{weight}.count"] = torch.tensor(CALLS, dtype=torch.int32)
            found[f"{weight}.{layer_statistics.SUM}{layer_statistics.GRADIENT}"] = _gradients(layer, random)
        partial = target.with_name(f".{target.name}.tmp")
        statistics_file.write_statistics(partial, found, {})
        os.replace(partial, target)
    return target


def _gradients(layer: nn.Linear, random: torch.Generator) -> Tensor:
    """Return the sums of |row of G|^2 over CALLS calls: float32 [out]. Of a layer that is all noise, 20 dB below the
    output on average."""
    level = 0.01 * CALLS * layer.in_features / layer.out_features * torch.exp(2 * torch.randn(1, generator=random))
    return level * torch.exp(torch.randn(layer.out_features, generator=random))


def _moments(columns: int, block: int | None, random: torch.Generator) -> Tensor:
    """Return the sums of x x^T over ROWS inputs, in blocks: float32 [blocks, b, b]."""
    count, size, _ = input_moments.block_shape(columns, block)
    shared = torch.randn(ROWS, 8, generator=random)
    moments = torch.zeros(count, size, size)
    for number in range(count):
        width = min(size, columns - number * size)
        x = torch.randn(ROWS, width, generator=random) * torch.exp(torch.randn(width, generator=random))
        x += shared @ torch.randn(8, width, generator=random)
        moments[number, :width, :width] = x.T @ x
    return moments
