"""Names that diffusers' single-file converters do not handle, as a table: newer models of a family."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Apply = Callable[..., Mapping[str, Any]]
# (pattern of a name, what it becomes)
Names = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The missing names of one class.

    Attributes:
        unread: names that the converter drops, but requires. Some files lack them.
        missed: (original name, diffusers' name) patterns that it does not know.
        moved: (its name, correct name) patterns of its result, applied if the config has a true value for `when`.
    """

    unread: tuple[str, ...] = ()
    missed: Names = ()
    moved: Names = ()
    when: str = ""


_LABELS = tuple((rf"label_emb\.0\.{2 * i}\.(\w+)", rf"add_embedding.linear_{i + 1}.\1") for i in (0, 1))
_GAPS: Mapping[str, Gap] = {
    # ControlNets for XL
    "ControlNetModel": Gap(missed=_LABELS),
    # Sana 1.5 has norms of queries and keys, and Sprint is told how strongly it is guided.
    "SanaTransformer2DModel": Gap(
        unread=("pos_embed", "y_embedder.y_embedding"),
        missed=(
            (r"blocks\.(\d+)\.attn\.([qk])_norm\.weight", r"transformer_blocks.\1.attn1.norm_\2.weight"),
            (r"blocks\.(\d+)\.cross_attn\.([qk])_norm\.weight", r"transformer_blocks.\1.attn2.norm_\2.weight"),
            (r"cfg_embedder\.mlp\.0\.(\w+)", r"time_embed.guidance_embedder.linear_1.\1"),
            (r"cfg_embedder\.mlp\.2\.(\w+)", r"time_embed.guidance_embedder.linear_2.\1"),
        ),
        moved=((r"time_embed\.emb\.(timestep_embedder\..+)", r"time_embed.\1"),),
        when="guidance_embeds",
    ),
}  # fmt: skip


def completed(class_name: str, apply: Apply) -> Apply:
    """Return diffusers' converter for a class, extended by the names that it lacks."""
    gap = _GAPS.get(class_name)
    return apply if gap is None else lambda state, config: _apply(gap, apply, state, config)


def _apply(gap: Gap, apply: Apply, state: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    absent = {name: None for name in gap.unread if name not in state}
    result = dict(apply({**state, **absent}, config=config))
    if config.get(gap.when):
        result = {_renamed(name, gap.moved) or name: value for name, value in result.items()}
    for name, value in state.items():
        target = _renamed(name, gap.missed)
        if target is not None:
            result[target] = value
    return result


def _renamed(name: str, rows: Names) -> str | None:
    return next((re.sub(pattern, text, name) for pattern, text in rows if re.fullmatch(pattern, name)), None)
