"""Mochi 1, as Genmo name it."""

from __future__ import annotations

from collections.abc import Iterator

from .rows import OutputTensor, Rows, Shapes, count, of_rows

_MOCHI: Rows = (
    ("pos_frequencies", "pos_frequencies"),
    ("x_embedder.proj.*", "patch_embed.proj.*"),
    ("t_embedder.mlp.0.*", "time_embed.timestep_embedder.linear_1.*"),
    ("t_embedder.mlp.2.*", "time_embed.timestep_embedder.linear_2.*"),
    ("t5_y_embedder.to_kv.*", "time_embed.pooler.to_kv.*"),
    ("t5_y_embedder.to_q.*", "time_embed.pooler.to_q.*"),
    ("t5_y_embedder.to_out.*", "time_embed.pooler.to_out.*"),
    ("t5_yproj.*", "time_embed.caption_proj.*"),
    ("~final_layer.mod.*", "norm_out.linear.*"),
    ("final_layer.linear.*", "proj_out.*"),
)
_BLOCK: Rows = (
    ("mod_x.*", "norm1.linear.*"),
    ("mod_y.*", "norm1_context.linear.*"),
    ("mod_y.*", "norm1_context.linear_1.*"),  # in the last block, where the text's stream ends
    ("attn.qkv_x.*", "attn1.to_q.*", "attn1.to_k.*", "attn1.to_v.*"),
    ("attn.q_norm_x.*", "attn1.norm_q.*"),
    ("attn.k_norm_x.*", "attn1.norm_k.*"),
    ("attn.proj_x.*", "attn1.to_out.0.*"),
    ("attn.qkv_y.*", "attn1.add_q_proj.*", "attn1.add_k_proj.*", "attn1.add_v_proj.*"),
    ("attn.q_norm_y.*", "attn1.norm_added_q.*"),
    ("attn.k_norm_y.*", "attn1.norm_added_k.*"),
    ("attn.proj_y.*", "attn1.to_add_out.*"),
    # The gate comes first there, and last here.
    ("~mlp_x.w1.*", "ff.net.0.proj.*"),
    ("mlp_x.w2.*", "ff.net.2.*"),
    ("~mlp_y.w1.*", "ff_context.net.0.proj.*"),
    ("mlp_y.w2.*", "ff_context.net.2.*"),
)


def mochi(shapes: Shapes) -> Iterator[OutputTensor]:
    yield from of_rows(shapes, _MOCHI, "", "")
    for i in range(count(shapes, "transformer_blocks.")):
        yield from of_rows(shapes, _BLOCK, f"blocks.{i}.", f"transformer_blocks.{i}.")
