"""Hooks before and after a module is used, through any of its entry methods."""

from __future__ import annotations

import functools
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

# The methods through which pipelines use a component. A VAE is never called, only its encode and decode are.
ENTRIES = ("forward", "encode", "decode", "get_text_features", "get_image_features", "generate")

_WHY = (
    "Cannot compile an offloaded model as one graph: its weights are fetched while it runs. "
    "Leave fullgraph=True out, compile its blocks (compile_repeated_blocks), or load it with offload='none'."
)
_OUTERMOST = "_sdquant_outermost"  # of a module: by name of a method, the wrapper that is called first now
_NOTHING: AbstractContextManager[object] = nullcontext()


def _nothing_around() -> AbstractContextManager[object]:
    return _NOTHING


def wrap(
    module: nn.Module,
    before: Callable[[str], None],
    after: Callable[[str], None],
    names: tuple[str, ...] = ENTRIES,
    *,
    lock: AbstractContextManager[object] = _NOTHING,
    around: Callable[[], AbstractContextManager[object]] = _nothing_around,
    outcome: Callable[[Any], None] | None = None,
) -> Callable[[], None]:
    """Call `before(name)` and `after(name)` around those of the module's methods that it has; returns how to undo it.

    The wrappers are attributes of the instance, so that its class and its other instances stay as they are. `after` is
    called when the method raises, too.

    Args:
        lock: held from `before` to `after`, a re-entrant one: `OffloadHandle.lock`.
        around: makes a context that the method runs in.
        outcome: called with what the method returns.
    """
    done: list[tuple[str, Any, Any]] = []
    active, buried = [True], set[str]()
    outermost: dict[str, Any] = module.__dict__.setdefault(_OUTERMOST, {})
    inner: dict[str, Any] = {}  # what was the outermost before
    for name in names:
        method = getattr(module, name, None)
        if method is None:
            continue
        # What was on the instance before, if anything: another tool may have wrapped the method already.
        earlier = module.__dict__.get(name)
        wrapper = _wrapper(module, name, method, before, after, lock, around, outcome, active, buried)
        module.__dict__[name] = wrapper
        done.append((name, earlier, wrapper))
        inner[name] = outermost.get(name)
        outermost[name] = wrapper

    def undo() -> None:
        active[0] = False
        for name, earlier, wrapper in reversed(done):
            outermost[name] = inner[name]
            if not any(outermost.values()):
                module.__dict__.pop(_OUTERMOST, None)
            if module.__dict__.get(name) is not wrapper:
                buried.add(name)  # another tool has wrapped it since, and calls what is left inside
                continue
            if earlier is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = earlier

    return undo


def serialize(
    module: nn.Module, lock: AbstractContextManager[object], outcome: Callable[[Any], None] | None = None
) -> Callable[[], None]:
    """Let one thread at a time be inside the module's methods; returns how to undo it. `outcome`: see `wrap`."""
    return wrap(module, _nothing, _nothing, lock=lock, outcome=outcome)


def _nothing(name: str) -> None:
    """Do nothing before or after a method, for a module whose weights are moved by its own leaves."""


def _wrapper(
    module: nn.Module,
    name: str,
    method: Callable[..., Any],
    before: Callable[[str], None],
    after: Callable[[str], None],
    lock: AbstractContextManager[object],
    around: Callable[[], AbstractContextManager[object]],
    outcome: Callable[[Any], None] | None,
    active: list[bool],
    buried: set[str],
) -> Callable[..., Any]:
    # The compiler breaks its graph here, compiles what the method calls, and looks at nothing of the mode's.
    before, after, around = _not_compiled(before), _not_compiled(after), _not_compiled(around)
    outcome = None if outcome is None else _not_compiled(outcome)
    passing: set[int] = set()  # threads that look for what is there now

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if name in buried:
            return method(*args, **kwargs)
        with lock:
            if active[0]:
                before(name)
                try:
                    with around():
                        result = method(*args, **kwargs)
                    if outcome is not None:
                        outcome(result)
                    return result
                finally:
                    after(name)
        # The mode was taken off, or put on anew: while this thread waited, or since another tool took hold of this
        # method, to call it inside its own (accelerate does, between a move of the module and its next call).
        now = module.__dict__.get(_OUTERMOST, {}).get(name)
        if now is not None:
            return now(*args, **kwargs)
        me = threading.get_ident()
        if me in passing:  # what is there now is that tool's, and calls this
            return getattr(type(module), name)(module, *args, **kwargs)
        passing.add(me)
        try:
            return getattr(module, name)(*args, **kwargs)
        finally:
            passing.discard(me)

    # functools.wraps copies the marks of a method that is such a wrapper itself.
    call.__dict__.pop("_torchdynamo_orig_callable", None)
    broken: Callable[..., Any] = functools.wraps(method)(_not_compiled(call, recursive=False))
    return broken


def _not_compiled(function: Callable[..., Any], recursive: bool = True) -> Callable[..., Any]:
    """Return the function with graph breaks for torch.compile. `recursive`: also in all that it calls."""
    import torch

    disable: Any = torch.compiler.disable
    try:
        disabled: Callable[..., Any] = disable(function, recursive, reason=_WHY)
    except TypeError:  # torch 2.6 takes no reason
        disabled = disable(function, recursive)
    return disabled


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
