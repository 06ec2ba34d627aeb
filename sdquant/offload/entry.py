"""Calling something before and after a module is used, whichever of its methods it is used through."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

# The methods through which pipelines use a component. A VAE is never called, only its encode and decode are.
ENTRIES = ("forward", "encode", "decode", "get_text_features", "get_image_features", "generate")


def wrap(
    module: nn.Module,
    before: Callable[[str], None],
    after: Callable[[str], None],
    names: tuple[str, ...] = ENTRIES,
) -> Callable[[], None]:
    """Call `before(name)` and `after(name)` around those of the module's methods that it has; returns how to undo it.

    The wrappers are attributes of the instance, so that its class and its other instances stay as they are. `after` is
    called when the method raises, too.
    """
    done: list[tuple[str, Any, Any]] = []
    for name in names:
        method = getattr(module, name, None)
        if method is None:
            continue
        # What was on the instance before, if anything: another tool may have wrapped the method already.
        earlier = module.__dict__.get(name)
        wrapper = _wrapper(name, method, before, after)
        module.__dict__[name] = wrapper
        done.append((name, earlier, wrapper))

    def undo() -> None:
        for name, earlier, wrapper in reversed(done):
            if module.__dict__.get(name) is not wrapper:
                raise RuntimeError(
                    f"{type(module).__name__}.{name} was wrapped again after its weights were offloaded; "
                    "take the later hooks off first"
                )
            if earlier is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = earlier

    return undo


def _wrapper(
    name: str, method: Callable[..., Any], before: Callable[[str], None], after: Callable[[str], None]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        before(name)
        try:
            return method(*args, **kwargs)
        finally:
            after(name)

    return call


def announce(module: nn.Module, device: torch.device) -> Callable[[], None]:
    """Tell diffusers where the module computes, as accelerate's hooks do; returns how to undo it."""
    if "_hf_hook" in module.__dict__:
        return lambda: None
    from accelerate.hooks import ModelHook

    hook = ModelHook()
    hook.execution_device = device
    module.__dict__["_hf_hook"] = hook
    return lambda: module.__dict__.pop("_hf_hook", None)


def tidy(module: nn.Module) -> None:
    """Delete a `forward` on the instance that is the class's own, which libraries leave when they take hooks off."""
    if getattr(module.__dict__.get("forward"), "__func__", None) is type(module).forward:
        del module.__dict__["forward"]
