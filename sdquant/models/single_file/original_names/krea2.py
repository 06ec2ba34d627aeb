"""Krea 2, as Krea name it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from .rows import OutputTensor, Rows, Shapes, count, of_blocks, of_rows

_KREA2: Rows = (
    ("first.*", "img_in.*"),
    ("tmlp.0.*", "time_embed.linear_1.*"),
    ("tmlp.2.*", "time_embed.linear_2.*"),
    ("tproj.1.*", "time_mod_proj.*"),
    ("txtmlp.0.scale", "txt_in.norm.weight"),
    ("txtmlp.1.*", "txt_in.linear_1.*"),
    ("txtmlp.3.*", "txt_in.linear_2.*"),
    ("txtfusion.projector.*", "text_fusion.projector.*"),
    ("last.linear.*", "final_layer.linear.*"),
    ("last.norm.scale", "final_layer.norm.weight"),
    ("last.modulation.lin", "final_layer.scale_shift_table"),
)
_BLOCK: Rows = (
    *((f"attn.w{part}.*", f"attn.to_{part}.*") for part in "qkv"),
    ("attn.wo.*", "attn.to_out.0.*"),
    ("attn.gate.*", "attn.to_gate.*"),
    ("attn.qknorm.qnorm.scale", "attn.norm_q.weight"),
    ("attn.qknorm.knorm.scale", "attn.norm_k.weight"),
    *((f"mlp.{part}.*", f"ff.{part}.*") for part in ("gate", "up", "down")),
    ("prenorm.scale", "norm1.weight"),
    ("postnorm.scale", "norm2.weight"),
)
_MODULATION: Rows = (("mod.lin", "scale_shift_table"),)


def krea2(shapes: Shapes) -> Iterator[OutputTensor]:
    yield from of_rows(shapes, _KREA2, "", "")
    for name in ("layerwise_blocks", "refiner_blocks"):
        yield from of_blocks(shapes, _BLOCK, f"txtfusion.{name}", f"text_fusion.{name}")
    for i in range(count(shapes, "transformer_blocks.")):
        there, here = f"blocks.{i}.", f"transformer_blocks.{i}."
        yield from of_rows(shapes, _BLOCK, there, here)
        for row in of_rows(shapes, _MODULATION, there, here):  # six vectors in a table here, and in a row there
            yield replace(row, shape=(prod(shapes[row.sources[0]]),))
