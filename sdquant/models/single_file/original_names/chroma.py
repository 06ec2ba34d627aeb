"""Chroma, as Lodestone Rock names it: FLUX.1 whose modulations come from one layer for the whole model."""

from __future__ import annotations

from collections.abc import Iterator

from .flux import BLOCKS
from .rows import OutputTensor, Rows, Shapes, of_blocks, of_rows

_CHROMA: Rows = (
    ("img_in.*", "x_embedder.*"),
    ("txt_in.*", "context_embedder.*"),
    ("distilled_guidance_layer.in_proj.*", "distilled_guidance_layer.in_proj.*"),
    ("distilled_guidance_layer.out_proj.*", "distilled_guidance_layer.out_proj.*"),
    ("final_layer.linear.*", "proj_out.*"),
)
_GUIDANCE = "distilled_guidance_layer.layers"
_LAYER: Rows = (("in_layer.*", "linear_1.*"), ("out_layer.*", "linear_2.*"))
_NORMS = "distilled_guidance_layer.norms"


def chroma(shapes: Shapes) -> Iterator[OutputTensor]:
    yield from of_rows(shapes, _CHROMA, "", "")
    yield from of_blocks(shapes, _LAYER, _GUIDANCE, _GUIDANCE)
    yield from of_blocks(shapes, (("scale", "weight"),), _NORMS, _NORMS)
    for rows, theirs, ours in BLOCKS:
        yield from of_blocks(shapes, rows, theirs, ours)
