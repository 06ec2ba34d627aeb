"""Parameters that a model's files may lack: its library lists them (`_keys_to_ignore_on_load_missing`), and initializes
them itself, with the model's own initialization; and tensors of files that no model uses. Importing this module imports
no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import BadFileError

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

TOGETHER = "Check that the weights and the config belong together"
_GIVEN = "_is_hf_initialized"  # by which transformers' initialization knows what it must not touch


def refuse_lacking(model: nn.Module, names: Iterable[str], path: Path) -> None:
    """Raise BadFileError if one of these parameters, which the files at `path` lack, is not left out by its library."""
    patterns: Any = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    missing = [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]
    if missing:
        why = f"it lacks {len(missing)} of the model's tensors, the first is {missing[0]!r}"
        raise BadFileError(f"Cannot load {path}", why, TOGETHER)


def stray_warnings(path: Path, strays: Sequence[str], user: str = "the model") -> list[str]:
    """Return the sentence about tensors of the files at `path` that nothing uses, in a list; [] if there are none."""
    if not strays:
        return []
    what = f"{len(strays)} tensors" if len(strays) > 1 else "a tensor"
    which = f", the first is {strays[0]!r}" if len(strays) > 1 else f": {strays[0]!r}"
    return [f"{path} contains {what} that {user} does not use{which}"]


def initialize(model: nn.Module, tied: Sequence[tuple[str, ...]], dtype: torch.dtype | None) -> None:
    """Initialize parameters on the meta device as their library does, and no others.

    Args:
        tied: all names of each. dtype: of them; None is the one that they would have in a new model.
    """
    import torch

    from . import components

    names = [one[0] for one in tied]
    for every in tied:
        like = model.get_parameter(every[0])
        # Zeros, and not whatever is in memory, where the library's initialization passes a parameter by.
        components.set_tensor(model, every, torch.zeros(like.shape, dtype=dtype or like.dtype, device="cpu"))
    ours = {id(model.get_parameter(name)) for name in names}
    others = [
        one for one in (*model.parameters(), *model.buffers()) if id(one) not in ours and not hasattr(one, _GIVEN)
    ]
    for one in others:
        setattr(one, _GIVEN, True)
    try:
        with torch.no_grad():
            for owner, initializer in _owners(model, names):
                initializer._init_weights(owner)
    finally:
        for one in others:
            delattr(one, _GIVEN)


def _owners(model: nn.Module, names: Sequence[str]) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the modules that contain these parameters, the innermost first, each with the model that initializes it:
    the nearest one around it with `_init_weights`."""
    done: set[int] = set()
    for name in names:
        words = name.split(".")[:-1]
        around = [model.get_submodule(".".join(words[:count])) for count in range(len(words) + 1)]
        for place in reversed(range(len(around))):
            owner = around[place]
            initializer = next((one for one in reversed(around[: place + 1]) if hasattr(one, "_init_weights")), None)
            if initializer is not None and id(owner) not in done:
                done.add(id(owner))
                yield owner, initializer
