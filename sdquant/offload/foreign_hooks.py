"""Detect hooks of other tools that move or cast weights at every call, with which no mode can work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import IncompatibleError
from .mode import mode_named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

# diffusers' hooks, by the names that it registers them under -> the reason and fix of the error.
_DIFFUSERS = {
    "layerwise_casting": (
        "layerwise casting replaces its weights at every call, and the mode would lose or accumulate them",
        'Load it without layerwise casting; quant="fp8" uses as little memory',
    ),
    "group_offloading": (
        "diffusers' group offloading already moves its weights",
        "Load the pipeline again and use one kind of offload",
    ),
}
_ACCELERATE = (
    "accelerate already moves its weights (enable_model_cpu_offload, enable_sequential_cpu_offload or cpu_offload)",
    "Call remove_all_hooks() on the pipeline first, or keep using that offload",
)


def refuse_hooked(mode: str, parts: Mapping[str, nn.Module]) -> None:
    """Refuse components that another tool casts or moves. Call this before the mode has hooks of its own.

    Raises:
        IncompatibleError: there is such a hook.
    """
    for name, part in parts.items():
        for module in part.modules():
            reason = _reason(module, mode)
            if reason is not None:
                raise IncompatibleError(f"Cannot offload the {name} with offload={mode!r}", *reason)


def hook_of(part: nn.Module) -> Any:
    """Return accelerate's hook of a whole component, or None."""
    return part.__dict__.get("_hf_hook")


def refuse_taken(mode: str, part: nn.Module, hook: Any) -> None:
    """Refuse to run a component whose weights accelerate has moved to the meta device (`cpu_offload`, `dispatch_model`)
    while a mode was active that moves them itself. In group and sequential the hooks that fetch them keep working.

    Args:
        hook: `hook_of` the component when the mode was applied.

    Raises:
        IncompatibleError: the weights are not where the mode expects them.
    """
    if hook_of(part) is hook or mode_named(mode).hooks != "sdquant":
        return
    if any(one.is_meta for one in part.parameters()):
        raise IncompatibleError(f"Cannot run the {type(part).__name__} with offload={mode!r}", *_ACCELERATE)


def _reason(module: nn.Module, mode: str) -> tuple[str, str] | None:
    """Return why no mode can move a module's weights, and the fix; None if modes can."""
    registry: Any = module.__dict__.get("_diffusers_hook")
    for name, reason in _DIFFUSERS.items():
        if registry is not None and registry.get_hook(name) is not None:
            return reason
    hook = hook_of(module)
    return _ACCELERATE if hook is not None and _moves(hook, placed=mode_named(mode).hooks == "diffusers") else None


def _moves(hook: Any, *, placed: bool) -> bool:
    """Return whether a hook of accelerate moves weights. One that only sets the execution device does not, but
    diffusers' group offloading accepts no such hook either (`placed`)."""
    from accelerate.hooks import AlignDevicesHook, CpuOffload, SequentialHook

    if isinstance(hook, SequentialHook):
        return any(_moves(one, placed=placed) for one in hook.hooks)
    return isinstance(hook, CpuOffload) or (isinstance(hook, AlignDevicesHook) and (placed or bool(hook.offload)))
