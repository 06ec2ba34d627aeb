"""Prepare the network for training, and extract the weights to save. The one module that knows rules and LoRA."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError
from ..rules import QuantizationRule

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .settings import TrainingSettings


def trainable(model: nn.Module, settings: TrainingSettings, quantized: Collection[str] | None) -> Any:
    """Return the network to train: with float32 weights, quantized by rules as it runs, or frozen under a LoRA.

    Args:
        quantized: names of the weights that rules apply to; None without rules.

    Raises:
        SettingsError: a rule cannot apply to a layer, or no layer can get a LoRA.
    """
    if settings.lora_rank:
        import torch

        from . import lora
        from .rng import seed_of

        torch.manual_seed(seed_of(settings.seed, "lora"))
        lora.add_lora(
            model, rank=settings.lora_rank, alpha=settings.lora_alpha, dropout=settings.lora_dropout,
            target_modules=settings.lora_target_modules,
        )  # fmt: skip
        return model
    model = model.float().requires_grad_(True)
    return quantize_for_training(model, settings, quantized) if quantized is not None else model


def quantize_for_training(model: nn.Module, settings: TrainingSettings, quantized: Collection[str]) -> Any:
    """Return a copy of the model whose layers compute as the rules define. Its weights stay floats of the same names.

    Layers that are skipped, or whose weight does not fit their rule, stay unquantized, as they do in a model that is
    loaded with the rules.
    """
    from ..nn import kind_of
    from ..rules import QtProvider, load_quant_stats, quantize_model, statistics_file

    others = [
        re.escape(path)
        for path, module in model.named_modules()
        if kind_of(module) in ("linear", "conv") and f"{path}.weight" not in quantized
    ]
    first = [QuantizationRule(module_path="|".join(others))] if others else []
    net = quantize_model(model, QtProvider([*first, *settings.rules]))
    if settings.quant_stats is not None:
        load_quant_stats(net, statistics_file.of_component(statistics_file.read_statistics(settings.quant_stats), ""))
    return net


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that training changes: the state dict, or a partly frozen model's trainable weights."""
    learning = {name: row for name, row in model.named_parameters() if row.requires_grad}
    if len(learning) < sum(1 for _ in model.parameters()):
        return {name: row.detach() for name, row in learning.items()}
    return dict(model.state_dict())


def put_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state returned by `state_of`.

    Raises:
        SettingsError: it is of another model.
    """
    expected = state_of(model)
    apart = sorted(set(expected) ^ set(state))
    apart += [name for name in expected if name in state and expected[name].shape != state[name].shape]
    if apart:
        raise SettingsError(
            "Cannot resume the training",
            f"its checkpoint is of another model: {apart[0]} differs",
            "Use the model that it began with, or choose another run_name",
        )
    model.load_state_dict(dict(state), strict=False)


def finished(original: nn.Module, trained: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the original network with the weights of the trained one, by name, in a dtype."""
    if original is not trained:
        original.load_state_dict(trained.state_dict())
    return original.to(dtype).eval().requires_grad_(False)
