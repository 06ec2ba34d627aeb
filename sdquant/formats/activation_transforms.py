"""What a config wants done beside dequantizing weights: with activations as layers run, or with sparse weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_IN_THE_WEIGHTS = ("weight_input", "weight_output")
_ROTATIONS = ("rotation_config", "spinquant_config")  # AutoRound's


def left_to_do(table: Mapping[str, Any]) -> str | None:
    """Return what a `quantization_config` requires beyond dequantizing its weights, as the end of a sentence; None if
    nothing."""
    transforms = table.get("transform_config")
    for kind, location in _applied(transforms) if transforms else ():
        if location not in _IN_THE_WEIGHTS:
            return f"that its layers transform activations as they run ({kind} at {location}, by transform_config)"
    rotation = next((key for key in _ROTATIONS if table.get(key)), None)
    if rotation is not None:
        return f"that its layers rotate activations as they run (by {rotation})"
    sparse = table.get("sparsity_config")
    form = sparse.get("format") if isinstance(sparse, Mapping) else None
    if form not in (None, "dense"):
        return f"that its weights are stored sparse ({form!r:.40}, by sparsity_config)"
    return None


def _applied(transforms: Any) -> Iterator[tuple[str, str]]:
    """Yield the kind and location of each transform; "unknown" if it is not as compressed-tensors writes it."""
    groups = transforms.get("config_groups") if isinstance(transforms, Mapping) else None
    if not isinstance(groups, Mapping):
        yield "one", "an unknown place"
        return
    for group in groups.values():
        kind = f"{group.get('type', 'one')!s:.40}" if isinstance(group, Mapping) else "one"
        rows = group.get("apply") if isinstance(group, Mapping) else None
        for row in rows if isinstance(rows, list) else [None]:
            location = row.get("location") if isinstance(row, Mapping) else None
            yield kind, f"{location:.40}" if isinstance(location, str) else "an unknown place"
