"""Patterns for module names, as used by `skip=`, and those of embeddings."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping

# As diffusers and transformers name their `nn.Embedding` modules.
_TABLES = re.compile(
    r"(^|\.)((?!patch_|proj_)[a-z_]*embeddings?|shared|embed_tokens|embed_positions|relative_attention_bias|pos_embed|"
    r"embedding_table|style_embedder|wte|wpe)\.weight$"
)


def is_table(name: str) -> bool:
    """Return whether a two-dimensional weight of this name is looked up, not multiplied, by the last part of its module
    path: such weights are quantized only on request (`nf4,embeddings`)."""
    return _TABLES.search(name) is not None


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
