"""GGUF blocks as a struct of arrays (`core.gguf_fields`), and back; and the check that their scales are finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..core import ggml_iq, gguf_fields, gguf_types
from ..utils.tensors import is_finite


def apart(kind: str, blocks: Tensor) -> Tensor:
    """Separate the fields of `blocks`, uint8 [n, bytes per block] of type `kind`: uint8 [n * bytes per block]."""
    fields = torch.empty(blocks.numel(), dtype=torch.uint8, device=blocks.device)
    for field, part in zip(gguf_fields.FIELDS[kind], views(kind, fields), strict=True):
        part.copy_(blocks[:, field.start : field.start + field.size])
    return fields


def together(kind: str, fields: Tensor) -> Tensor:
    """Restore blocks: the inverse of `apart`."""
    size = gguf_types.TYPES[kind].nbytes
    blocks = torch.empty(fields.numel() // size, size, dtype=torch.uint8, device=fields.device)
    for field, part in zip(gguf_fields.FIELDS[kind], views(kind, fields), strict=True):
        blocks[:, field.start : field.start + field.size] = part
    return blocks


def views(kind: str, fields: Tensor) -> list[Tensor]:
    """Return a view of each field of `apart`'s result, uint8 [n, bytes of the field], in their order."""
    rows, count = gguf_fields.FIELDS[kind], fields.numel() // gguf_types.TYPES[kind].nbytes
    parts = torch.split(fields, [count * field.size for field in rows])
    return [part.view(count, field.size) for field, part in zip(rows, parts, strict=True)]


# Nothing else in the contents of a block can be invalid: any bits are valid codes. Scales (and minimums) are
# half-precision numbers, `GGMLType.halves`, and in two types an exponent of one byte (E8M0) or four one-byte floats
# (E4M3). They are read in place through strided views, so that a mapped file is not copied.
_CHUNK = 1 << 16  # blocks looked at together: what is copied of them stays below 1 MB
_E8M0_LARGEST = 253  # from here on 12 times the power of two is no float32; 255 stands for NaN
_E4M3_NAN = 0x7F  # without the sign, which NVFP4's scales do not have


def sound(kind: str, blocks: Tensor) -> bool:
    """Return whether all scales and minimums of `blocks`, uint8 [n, bytes per block] of type `kind`, are finite."""
    return all(_finite(kind, chunk) for chunk in torch.split(blocks, _CHUNK) if len(chunk))


def _finite(kind: str, blocks: Tensor) -> bool:
    if kind in OTHER_SCALES:
        return OTHER_SCALES[kind](blocks)
    return all(is_finite(blocks[:, at : at + 2].view(torch.float16)) for at in gguf_types.TYPES[kind].halves)


# What has no scale in half precision as it stands.
OTHER_SCALES: Mapping[str, Callable[[Tensor], bool]] = {
    "iq1_m": lambda blocks: is_finite(ggml_iq.iq1_m_scale(blocks)),
    "mxfp4": lambda blocks: bool(blocks[:, 0].max() < _E8M0_LARGEST),
    "nvfp4": lambda blocks: bool((blocks[:, :4] & _E4M3_NAN).max() < _E4M3_NAN),
}
