"""FLUX.2, as Black Forest Labs name it."""

from __future__ import annotations

from collections.abc import Iterator

from .flux import ATTENTION
from .rows import OutputTensor, Rows, Shapes, of_blocks, of_rows

_FLUX2: Rows = (
    ("img_in.*", "x_embedder.*"),
    ("txt_in.*", "context_embedder.*"),
    ("time_in.in_layer.*", "time_guidance_embed.timestep_embedder.linear_1.*"),
    ("time_in.out_layer.*", "time_guidance_embed.timestep_embedder.linear_2.*"),
    ("guidance_in.in_layer.*", "time_guidance_embed.guidance_embedder.linear_1.*"),
    ("guidance_in.out_layer.*", "time_guidance_embed.guidance_embedder.linear_2.*"),
    ("double_stream_modulation_img.lin.*", "double_stream_modulation_img.linear.*"),
    ("double_stream_modulation_txt.lin.*", "double_stream_modulation_txt.linear.*"),
    ("single_stream_modulation.lin.*", "single_stream_modulation.linear.*"),
    ("final_layer.linear.*", "proj_out.*"),
    ("~final_layer.adaLN_modulation.1.*", "norm_out.linear.*"),
)
_DOUBLE: Rows = (
    *ATTENTION,
    ("img_mlp.0.*", "ff.linear_in.*"),
    ("img_mlp.2.*", "ff.linear_out.*"),
    ("txt_mlp.0.*", "ff_context.linear_in.*"),
    ("txt_mlp.2.*", "ff_context.linear_out.*"),
)
_SINGLE: Rows = (
    ("linear1.*", "attn.to_qkv_mlp_proj.*"),
    ("linear2.*", "attn.to_out.*"),
    ("norm.query_norm.scale", "attn.norm_q.weight"),
    ("norm.key_norm.scale", "attn.norm_k.weight"),
)


def flux2(shapes: Shapes) -> Iterator[OutputTensor]:
    yield from of_rows(shapes, _FLUX2, "", "")
    yield from of_blocks(shapes, _DOUBLE, "double_blocks", "transformer_blocks")
    yield from of_blocks(shapes, _SINGLE, "single_blocks", "single_transformer_blocks")
