"""Random numbers for one call, apart from those that everything else in the process draws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class PrivateRandom(TorchFunctionMode):
    """While it is entered, this thread's `torch.randn`, as `torch.svd_lowrank` calls it, has a generator of its own.

    torch's default generators stay as they are, so that neither this thread nor another one repeats or misses numbers.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        self.generator = torch.Generator(device).manual_seed(seed)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.randn:
            return func(*args, **{"generator": self.generator, **(kwargs or {})})
        return func(*args, **(kwargs or {}))
