"""Patterns of module names, as `skip=` takes them."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping


def skipped(name: str, skip: tuple[str, ...], keys: Mapping[str, str] | None = None) -> bool:
    """Whether a pattern of `skip` means this weight: a run of whole parts of its module's path ("mid_block",
    "attn.to_q"), or a pattern with * or ? for the whole path.

    Args:
        keys: what files call weights that the model calls otherwise: a pattern may have either.
    """
    modules = {one.removesuffix(".weight") for one in (name, (keys or {}).get(name, name))}
    return any(
        fnmatch.fnmatchcase(module, pattern) if set(pattern) & set("*?[") else f".{pattern}." in f".{module}."
        for pattern in skip
        for module in modules
    )
