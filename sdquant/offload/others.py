"""Hooks of other tools that move or cast weights at every call: no mode can work beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import IncompatibleError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

# diffusers' hooks, by the names that it registers them under -> what they do, and how to do without.
_DIFFUSERS = {
    "layerwise_casting": (
        "layerwise casting makes other weights of it at every call, and the mode would lose or collect them",
        'Load it without layerwise casting; quant="fp8" takes as little memory',
    ),
    "group_offloading": (
        "diffusers' group offloading moves its weights already",
        "Load the pipeline again, and choose one kind of offload",
    ),
}
_ACCELERATE = (
    "accelerate moves its weights already (enable_model_cpu_offload, enable_sequential_cpu_offload or cpu_offload)",
    "Call remove_all_hooks() of the pipeline first, or keep to that offload",
)


def refuse_hooked(mode: str, parts: Mapping[str, nn.Module]) -> None:
    """Refuse components that another tool casts or moves. To be asked while no hooks of the mode's own are there.

    Raises:
        IncompatibleError: there is such a hook.
    """
    for name, part in parts.items():
        for module in part.modules():
            reason = _reason(module)
            if reason is not None:
                raise IncompatibleError(f"Cannot offload the {name} with offload={mode!r}", *reason)


def refuse_taken(mode: str, part: nn.Module) -> None:
    """Refuse to compute with a component whose weights accelerate has taken while the mode was on.

    Raises:
        IncompatibleError: it has, and they are not where the mode looks for them.
    """
    hook: Any = part.__dict__.get("_hf_hook")
    if hook is not None and mode in ("model", "balanced") and _takes(hook):
        raise IncompatibleError(f"Cannot run the {type(part).__name__} with offload={mode!r}", *_ACCELERATE)


def _reason(module: nn.Module) -> tuple[str, str] | None:
    """Why no mode can move a module's weights, and the way out; None if one can."""
    registry: Any = module.__dict__.get("_diffusers_hook")
    for name, reason in _DIFFUSERS.items():
        if registry is not None and registry.get_hook(name) is not None:
            return reason
    hook: Any = module.__dict__.get("_hf_hook")
    return _ACCELERATE if hook is not None and _moves(hook) else None


def _takes(hook: Any) -> bool:
    """Whether a hook of accelerate's, that of a whole model, goes with others that have put weights elsewhere."""
    from accelerate.hooks import AlignDevicesHook, SequentialHook

    if isinstance(hook, SequentialHook):
        return any(_takes(one) for one in hook.hooks)
    return isinstance(hook, AlignDevicesHook)


def _moves(hook: Any) -> bool:
    """Whether a hook of accelerate's is one that moves weights; one that only says where to compute is not."""
    from accelerate.hooks import AlignDevicesHook, CpuOffload, SequentialHook

    if isinstance(hook, SequentialHook):
        return any(_moves(one) for one in hook.hooks)
    return isinstance(hook, CpuOffload) or (isinstance(hook, AlignDevicesHook) and bool(hook.offload))
