"""What other rooms do to a model whose weights are in place, loaded or quantized: the entries of a table.

`integrations` gives models their quantizer for diffusers and transformers here, without being imported from below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_STEPS: dict[str, Callable[[nn.Module], None]] = {}


def register(name: str, step: Callable[[nn.Module], None]) -> None:
    """Call `step` with every component that `load_model` or `quantize` is done with; a name counts once."""
    _STEPS[name] = step


def finish(model: nn.Module) -> None:
    """Do all registered steps to a component."""
    for step in _STEPS.values():
        step(model)
