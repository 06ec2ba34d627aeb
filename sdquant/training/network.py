"""The network as it is trained, and what is written of it. The one place that knows of rules and of LoRA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .settings import Settings


def quantize_for_training(model: nn.Module, rules: Sequence[Mapping[str, Any]]) -> nn.Module:
    """A copy of the model whose layers compute as the rules say, with weights that can be trained."""
    raise NotImplementedError  # pending: quantize_model(model, QtProvider(rules))


def add_lora(model: nn.Module, settings: Settings) -> None:
    """Put a LoRA on the model's layers and freeze the rest."""
    raise NotImplementedError  # pending: sdquant.lora


def save_lora(pipe: Any, model: nn.Module, target: Path) -> Path:
    """Write the LoRA alone."""
    raise NotImplementedError  # pending: sdquant.lora


def trainable(model: nn.Module, settings: Settings) -> nn.Module:
    """The network to train: of float32 weights, quantized by rules, or frozen under a LoRA."""
    if settings.lora_rank:
        add_lora(model, settings)
        return model
    model = model.float().requires_grad_(True)
    return quantize_for_training(model, settings.rules) if settings.rules else model


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
    shapes = [name for name in wanted if name in state and wanted[name].shape != state[name].shape]
    if apart or shapes:
        raise SettingsError(
            "A training was to go on", f"its checkpoint is of another model: {(apart + shapes)[0]} differs",
            "Use the same settings, or another run_name",
        )  # fmt: skip
    model.load_state_dict(dict(state), strict=False)


def finished(original: nn.Module, trained: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The original network with the weights of the trained one, by name, in a dtype."""
    if original is not trained:
        names = {name for name, _ in original.state_dict().items()}
        state = {name: row for name, row in trained.state_dict().items() if name in names}
        original.load_state_dict(state)
    return original.to(dtype).eval().requires_grad_(False)
