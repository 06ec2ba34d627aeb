"""What is done before the weights of components are loaded or quantized, and after: libraries that are imported, rules,
what a component computes in, its runtime.

Other packages register steps of their own: `integrations` attaches the quantizer for diffusers and transformers;
nothing here imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ..core import registry

if TYPE_CHECKING:
    from torch import nn

    from ..planning import ComponentPlan
    from ..rules import RulesSpec

_STEPS: dict[str, Callable[[nn.Module], None]] = {}


def register(name: str, step: Callable[[nn.Module], None]) -> None:
    """Call `step` on every component that `load_model` or `quantize` finishes; a name is registered once."""
    _STEPS[name] = step


def prepare_libraries(components: Iterable[ComponentPlan], device: str) -> None:
    """Import what the libraries of components that run by these need on `device`; see `Backend.prepare_library`."""
    by_library = (part for part in components if part.runtime == "library" and part.action != "keep")
    for scheme in sorted({weight.scheme for part in by_library for weight in part.weights}):
        registry.scheme(scheme).codec.prepare_library(scheme, device)


def finish(model: nn.Module, component: ComponentPlan, rules: RulesSpec | None) -> None:
    """Finish a component as planned.

    Args:
        rules: those that it is quantized by.
    """
    from ..nn import openvino, set_compute
    from ..rules import attach_rules

    if rules is not None:
        attach_rules(model, rules)
    if component.compute is not None:
        set_compute(model, component.compute)
    if component.runtime == openvino.NAME and component.weights:
        openvino.attach(model)
    for step in _STEPS.values():
        step(model)
