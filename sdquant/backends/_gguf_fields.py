"""GGUF blocks as a struct of arrays (`core.gguf_fields`), and back: the same bytes in another order."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.gguf_fields import FIELDS
from ..core.gguf_types import TYPES


def apart(kind: str, blocks: Tensor) -> Tensor:
    """Separate the fields of `blocks`, uint8 [n, bytes per block] of type `kind`: uint8 [n * bytes per block]."""
    fields = torch.empty(blocks.numel(), dtype=torch.uint8, device=blocks.device)
    for field, part in zip(FIELDS[kind], views(kind, fields), strict=True):
        part.copy_(blocks[:, field.start : field.start + field.size])
    return fields


def together(kind: str, fields: Tensor) -> Tensor:
    """Restore blocks: the inverse of `apart`."""
    blocks = torch.empty(fields.numel() // TYPES[kind].nbytes, TYPES[kind].nbytes, dtype=torch.uint8,
                         device=fields.device)  # fmt: skip
    for field, part in zip(FIELDS[kind], views(kind, fields), strict=True):
        blocks[:, field.start : field.start + field.size] = part
    return blocks


def views(kind: str, fields: Tensor) -> list[Tensor]:
    """Return a view of each field of `apart`'s result, uint8 [n, bytes of the field], in their order."""
    rows, count = FIELDS[kind], fields.numel() // TYPES[kind].nbytes
    parts = torch.split(fields, [count * field.size for field in rows])
    return [part.view(count, field.size) for field, part in zip(rows, parts, strict=True)]
