"""Measure the magnitudes of the inputs of linear layers as a float model runs, for schemes that smooth them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core import registry
from ..errors import SettingsError
from ..nn import kind_of
from .quality_statistics import models_to_watch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn


def refuse_uncalibrated(quant: str) -> None:
    """Raise SettingsError for a scheme that uses no magnitudes of inputs."""
    if registry.parse(quant).scheme.calibrated:
        return
    names = " or ".join(row.aliases[0] for row in registry.schemes() if row.calibrated and row.aliases)
    raise SettingsError(
        f"Cannot calibrate for {quant}", "it uses nothing that calibration could find", f"Use -q {names}, or rules"
    )


def observe(parts: Mapping[str, nn.Module], components: Sequence[str]) -> dict[str, nn.Module]:
    """Let every linear layer of the chosen components keep the magnitudes of its inputs, while `collecting`.

    Args:
        parts: of a pipeline, by name. components: those chosen; () for the default ones.
    """
    models = models_to_watch(parts, components)
    for model in models.values():
        for path, module in model.named_modules():
            if kind_of(module) == "linear":
                _observe(path, module)
    return models


def _observe(path: str, module: nn.Module) -> None:
    from ..rules import QuantStat, input_operand

    statistics = QuantStat(input_operand(path, "linear"), None)
    module.__dict__["statistics"] = statistics  # where `rules.collecting` and `quant_stats` look

    def see(layer: nn.Module, args: tuple[Any, ...], values: dict[str, Any]) -> None:
        if statistics.collecting:
            x = args[0] if args else values["input"]
            statistics.add({"absmax": x.detach().reshape(-1, x.shape[-1]).abs().amax(dim=0, keepdim=True)})

    module.register_forward_pre_hook(see, with_kwargs=True)
