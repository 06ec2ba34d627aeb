"""Patterns for module names, as used by `skip=`."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping


def skipped(name: str, skip: tuple[str, ...], keys: Mapping[str, str] | None = None) -> bool:
    """Return whether a pattern of `skip` matches this weight: consecutive parts of its module path ("mid_block",
    "attn.to_q"), or a pattern with * or ? for the whole path.

    Args:
        keys: names of weights in their file, if they differ from the model's; a pattern may match either.
    """
    modules = {one.removesuffix(".weight") for one in (name, (keys or {}).get(name, name))}
    return any(
        fnmatch.fnmatchcase(module, pattern) if set(pattern) & set("*?[") else f".{pattern}." in f".{module}."
        for pattern in skip
        for module in modules
    )
