"""Registry of the steps that other packages apply to a model after its weights are loaded or quantized.

`integrations` registers one that attaches the quantizer for diffusers and transformers; nothing here imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_STEPS: dict[str, Callable[[nn.Module], None]] = {}


def register(name: str, step: Callable[[nn.Module], None]) -> None:
    """Call `step` on every component that `load_model` or `quantize` finishes; a name is registered once."""
    _STEPS[name] = step


def run_steps(model: nn.Module) -> None:
    """Apply all registered steps to a component."""
    for step in _STEPS.values():
        step(model)
