"""Tables that are made once for a device and kept to the end of the program: `constant`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

from .inference_mode import ordinary

_modes = torch._C._len_torch_dispatch_stack
_P = ParamSpec("_P")
_T = TypeVar("_T")


def constant(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return `make` such that it runs once for each combination of its arguments, one of which is the device.

    What it makes on a card is allocated outside of any CUDA graph. `torch.compile(mode="reduce-overhead")` runs a model
    for the first time with all memory from a graph's pool, and a tensor that stays there ends it with "tensor(s) in the
    cudagraph pool not tracked as outputs"; in a graph of the user's own it would be given away with the graph. A pool
    is that of a thread (since torch 2.9) or of a stream (before), so that another thread on another stream has none.
    """
    unchanged = ordinary(make)

    @cache
    def kept(*args: Any, **kwargs: Any) -> _T:
        device = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.device))
        if device.type != "cuda":
            return unchanged(*args, **kwargs)

        def elsewhere() -> _T:
            stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.device(device), torch.cuda.stream(stream):
                value = unchanged(*args, **kwargs)
            stream.synchronize()
            return value

        with ThreadPoolExecutor(1, "sdquant-constant") as thread:
            return thread.submit(elsewhere).result()

    @wraps(make)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if _modes():  # a fake tensor is nothing to keep
            return make(*args, **kwargs)
        return kept(*args, **kwargs)  # type: ignore[arg-type]  # what can be hashed, as for any cache

    call.cache_clear = kept.cache_clear  # type: ignore[attr-defined]
    return call
