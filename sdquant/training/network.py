"""The network as it is trained, and what is written of it. The one place that knows of rules and of LoRA."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError
from ..rules.rule import QuantizationRule

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .settings import Settings

LORA = "default"  # PEFT's name of the only LoRA there is


def trainable(model: nn.Module, settings: Settings, quantized: Collection[str]) -> Any:
    """The network to train: with float32 weights, quantized by rules as it runs, or frozen under a LoRA.

    Args:
        quantized: names of the weights that rules are for.

    Raises:
        SettingsError: a rule cannot be for a layer, or no layer is one that a LoRA is put on.
    """
    if settings.lora_rank:
        add_lora(model, settings)
        return model
    model = model.float().requires_grad_(True)
    return quantize_for_training(model, settings, quantized) if quantized else model


def quantize_for_training(model: nn.Module, settings: Settings, quantized: Collection[str]) -> Any:
    """A copy of the model whose layers compute as the rules say. Its weights stay floats, under the same names.

    Other layers stay as they are even if a rule is for them: those that were asked to be skipped, or whose weight the
    rule cannot hold. It is the same in a model that is loaded with the rules.
    """
    from ..rules.flow import quantize_model
    from ..rules.qt import QtProvider, load_quant_stats
    from ..rules.statistics_file import read_statistics

    others = [
        re.escape(path)
        for path, module in model.named_modules()
        if hasattr(module, "weight") and f"{path}.weight" not in quantized
    ]
    first = [QuantizationRule(module_path="|".join(others))] if others else []
    net = quantize_model(model, QtProvider([*first, *settings.rules]))
    if settings.quant_stats is not None:
        load_quant_stats(net, read_statistics(settings.quant_stats))
    return net


def add_lora(model: Any, settings: Settings) -> None:
    """Put a LoRA on the model's layers and freeze the rest. Its weights are float32, drawn by the seed."""
    import torch
    from peft import LoraConfig

    from .chance import seed_of

    model.requires_grad_(False)
    torch.manual_seed(seed_of(settings.seed, "lora"))
    alpha: Any = settings.lora_rank if settings.lora_alpha is None else settings.lora_alpha  # PEFT takes fractions too
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=list(settings.lora_target_modules),
    )
    try:
        model.add_adapter(config, adapter_name=LORA)
    except ValueError as error:
        raise SettingsError(
            f"A LoRA on {', '.join(settings.lora_target_modules)} was asked for", str(error).rstrip("."),
            "Name layers in lora_target_modules by the ends of their paths",
        ) from error  # fmt: skip


def save_lora(pipe: Any, model: Any, folder: Path) -> Path:
    """Write the LoRA alone, as diffusers' `load_lora_weights` reads it: a folder."""
    from peft.utils import get_peft_model_state_dict

    from ..detection import MAIN
    from ..writing import whole_folder

    name = next(name for name in MAIN if name in pipe.components)
    layers = {key: row.detach().cpu().contiguous() for key, row in get_peft_model_state_dict(model).items()}
    with whole_folder(folder, sum(row.nbytes for row in layers.values())) as beside:
        type(pipe).save_lora_weights(beside, **{f"{name}_lora_layers": layers})
    return folder


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """What training changes: all weights and buffers; of a model that is frozen in part, the weights that are not."""
    learning = {name: row for name, row in model.named_parameters() if row.requires_grad}
    if len(learning) < sum(1 for _ in model.parameters()):
        return {name: row.detach() for name, row in learning.items()}
    return dict(model.state_dict())


def put_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put back what `state_of` gave.

    Raises:
        SettingsError: it is of another model.
    """
    wanted = state_of(model)
    apart = sorted(set(wanted) ^ set(state))
    apart += [name for name in wanted if name in state and wanted[name].shape != state[name].shape]
    if apart:
        raise SettingsError(
            "A training was to go on",
            f"its checkpoint is of another model: {apart[0]} differs",
            "Use the model that it began with, or another run_name",
        )
    model.load_state_dict(dict(state), strict=False)


def finished(original: nn.Module, trained: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The original network with the weights of the trained one, by name, in a dtype."""
    if original is not trained:
        original.load_state_dict(trained.state_dict())
    return original.to(dtype).eval().requires_grad_(False)
