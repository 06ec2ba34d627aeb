"""FLUX.1, as Black Forest Labs name it."""

from __future__ import annotations

from collections.abc import Iterator

from .rows import OutputTensor, Rows, Shapes, of_blocks, of_rows

_FLUX: Rows = (
    ("img_in.*", "x_embedder.*"),
    ("txt_in.*", "context_embedder.*"),
    ("time_in.in_layer.*", "time_text_embed.timestep_embedder.linear_1.*"),
    ("time_in.out_layer.*", "time_text_embed.timestep_embedder.linear_2.*"),
    ("vector_in.in_layer.*", "time_text_embed.text_embedder.linear_1.*"),
    ("vector_in.out_layer.*", "time_text_embed.text_embedder.linear_2.*"),
    ("guidance_in.in_layer.*", "time_text_embed.guidance_embedder.linear_1.*"),
    ("guidance_in.out_layer.*", "time_text_embed.guidance_embedder.linear_2.*"),
    ("final_layer.linear.*", "proj_out.*"),
    ("~final_layer.adaLN_modulation.1.*", "norm_out.linear.*"),
)
ATTENTION: Rows = (
    ("img_attn.qkv.*", "attn.to_q.*", "attn.to_k.*", "attn.to_v.*"),
    ("txt_attn.qkv.*", "attn.add_q_proj.*", "attn.add_k_proj.*", "attn.add_v_proj.*"),
    ("img_attn.norm.query_norm.scale", "attn.norm_q.weight"),
    ("img_attn.norm.key_norm.scale", "attn.norm_k.weight"),
    ("txt_attn.norm.query_norm.scale", "attn.norm_added_q.weight"),
    ("txt_attn.norm.key_norm.scale", "attn.norm_added_k.weight"),
    ("img_attn.proj.*", "attn.to_out.0.*"),
    ("txt_attn.proj.*", "attn.to_add_out.*"),
)
_FLUX_DOUBLE: Rows = (
    ("img_mod.lin.*", "norm1.linear.*"),
    ("txt_mod.lin.*", "norm1_context.linear.*"),
    *ATTENTION,
    ("img_mlp.0.*", "ff.net.0.proj.*"),
    ("img_mlp.2.*", "ff.net.2.*"),
    ("txt_mlp.0.*", "ff_context.net.0.proj.*"),
    ("txt_mlp.2.*", "ff_context.net.2.*"),
)
_FLUX_SINGLE: Rows = (
    ("modulation.lin.*", "norm.linear.*"),
    ("linear1.*", "attn.to_q.*", "attn.to_k.*", "attn.to_v.*", "proj_mlp.*"),
    ("linear2.*", "proj_out.*"),
    ("norm.query_norm.scale", "attn.norm_q.weight"),
    ("norm.key_norm.scale", "attn.norm_k.weight"),
)


# Rows, and what the list of blocks is called there and here.
BLOCKS: tuple[tuple[Rows, str, str], ...] = (
    (_FLUX_DOUBLE, "double_blocks", "transformer_blocks"),
    (_FLUX_SINGLE, "single_blocks", "single_transformer_blocks"),
)


def flux(shapes: Shapes) -> Iterator[OutputTensor]:
    yield from of_rows(shapes, _FLUX, "", "")
    for rows, theirs, ours in BLOCKS:
        yield from of_blocks(shapes, rows, theirs, ours)
