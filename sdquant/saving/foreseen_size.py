"""Bytes of the weights in a file that is still to be written: from headers alone, by the rows of its writer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import LONE, gguf_types, registry
from ..models import RoundingLoss, detect
from ..planning import make_request
from . import comfy_mix, export_gguf, export_single_file, original_layout

if TYPE_CHECKING:
    from ..formats import Given

_ALIGNMENT = 32  # bytes, of GGUF's tensors


def gguf_bytes(path: str | Path, quant: str, *, single: bool, config: Given | None = None) -> int:
    """Return the bytes that `export_gguf.quantize_file` writes of tensors.

    Args:
        single: one file, and not a folder. config: see `load_model`.
    """
    options = make_request(Path(path), quant=quant)
    sources = original_layout.chosen(detect(path, config=config), options.components, single=single)
    total = 0
    for src in map(original_layout.as_floats, sources.values()):
        named = original_layout.names(src, single)
        for _, shape, kind, _ in export_gguf.gguf_rows(src, named, registry.parse(quant), (), {}, RoundingLoss()):
            nbytes = gguf_types.TYPES[kind].size(math.prod(shape))
            total += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return total


def file_bytes(path: str | Path, quant: str, *, config: Given | None = None) -> int:
    """Return the bytes that `export_single_file.quantize_file` writes of tensors."""
    options = make_request(Path(path), quant=quant)
    sources = original_layout.chosen(detect(path, config=config), options.components, single=True)
    ((component, src),) = sources.items()
    spec = registry.parse(quant).of_component("" if component == LONE else component)
    rows = export_single_file.rows_of(export_single_file.floats_of(src), spec, ())
    return sum(part.nbytes for row in rows for part in row.made.values())


def fewest_mix_bytes(path: str | Path, *, gguf: bool, config: Given | None = None) -> int:
    """Return the bytes of the smallest file with a format for each layer: of GGUF's types, or of ComfyUI's formats."""
    return export_gguf.smallest_gguf_mix(path, config) if gguf else comfy_mix.smallest_comfy_mix(path, config)
