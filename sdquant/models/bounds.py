"""Limits on what a model's constructor allocates, checked without allocating it.

Parameters take no memory while a model is built (they are on the meta device), but position tables, masks and other
buffers that a constructor computes do. Building everything on the meta device first shows their sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import BadFileError
from ..formats import config_numbers
from ..utils.byte_sizes import gib

# Bytes. The largest table that a class of diffusers makes, OmniGen's positions, has 0.9 GB; the largest parameter, a
# language model's vocabulary, some 5 GB.
TABLE = 1 << 31
TABLES = 1 << 34  # of all that is computed, one after the other
PARAMETER = 1 << 36


_KEPT = 1000
_bounded: set[str] = set()  # of what was found sound


class _TooLarge(Exception):
    """A constructor allocates a tensor that is larger than any known model's. Args: its shape, its size in bytes."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Checks the sizes of all tensors that are created."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_new = func._schema.returns and func._schema.returns[0].alias_info is None  # else it is a view, or in place
        if is_new and isinstance(result, torch.Tensor):
            self._look(result, empty=func._schema.name.startswith("aten::empty"))
        return result

    def _look(self, tensor: torch.Tensor, *, empty: bool) -> None:
        size = tensor.numel() * tensor.element_size()
        if not empty:  # what nobody has written to takes no memory
            self.total += size
        if size > (PARAMETER if empty else TABLE) or self.total > TABLES:
            raise _TooLarge(tuple(tensor.shape), size)


def refuse_oversized(name: str, config: Mapping[str, Any], make: Callable[[], Any]) -> None:
    """Raise BadFileError if a model would have to allocate more than any known model does.

    Args:
        name: of its class. config: its config. make: builds it, on torch's default device.
    """
    key = json.dumps([name, config], sort_keys=True, default=str)
    if key in _bounded:
        return
    try:
        with torch.device("meta"), _Watch():
            make()
    except _TooLarge as error:
        shape, size = error.args
        key, value = _to_blame(config, shape)
        why = f"its config has {key} = {value}, so " if key else "with its config, "
        raise BadFileError(
            f"Cannot build {name}",
            f"{why}a tensor of {list(shape)} would take {gib(size)}; no known model has one so large",
            "Get the config.json that belongs to the weights",
        ) from None
    except Exception:  # a constructor that looks at its numbers, of which there are none: it is tried for real
        return
    if len(_bounded) < _KEPT:
        _bounded.add(key)


def _to_blame(config: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[str, Any]:
    """Return the config entry that a tensor's size comes from: the largest that divides one of its dimensions."""
    all_ = list(config_numbers(config))
    rows = [(key, value) for key, value in all_ if value > 256 and any(n and n % value == 0 for n in shape)]
    return max(rows or all_, key=lambda row: row[1], default=("", 0))
