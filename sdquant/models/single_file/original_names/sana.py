"""Sana 1.0, 1.5 and Sprint, as NVIDIA name it, without two tensors that drawing does not need: a table of positions,
and the caption of nothing, for which diffusers encodes an empty text."""

from __future__ import annotations

from collections.abc import Iterator

from .rows import OutputTensor, Rows, Shapes, of_blocks, of_rows

_SANA: Rows = (
    ("x_embedder.proj.*", "patch_embed.proj.*"),
    ("t_embedder.mlp.0.*", "time_embed.emb.timestep_embedder.linear_1.*"),
    ("t_embedder.mlp.2.*", "time_embed.emb.timestep_embedder.linear_2.*"),
    ("t_embedder.mlp.0.*", "time_embed.timestep_embedder.linear_1.*"),  # Sprint, from here on
    ("t_embedder.mlp.2.*", "time_embed.timestep_embedder.linear_2.*"),
    ("cfg_embedder.mlp.0.*", "time_embed.guidance_embedder.linear_1.*"),
    ("cfg_embedder.mlp.2.*", "time_embed.guidance_embedder.linear_2.*"),
    ("t_block.1.*", "time_embed.linear.*"),  # all
    ("y_embedder.y_proj.fc1.*", "caption_projection.linear_1.*"),
    ("y_embedder.y_proj.fc2.*", "caption_projection.linear_2.*"),
    ("attention_y_norm.*", "caption_norm.*"),
    ("final_layer.linear.*", "proj_out.*"),
    ("final_layer.scale_shift_table", "scale_shift_table"),
)
_BLOCK: Rows = (
    ("scale_shift_table", "scale_shift_table"),
    ("attn.qkv.*", "attn1.to_q.*", "attn1.to_k.*", "attn1.to_v.*"),
    ("attn.proj.*", "attn1.to_out.0.*"),
    ("attn.q_norm.*", "attn1.norm_q.*"),
    ("attn.k_norm.*", "attn1.norm_k.*"),
    ("cross_attn.q_linear.*", "attn2.to_q.*"),
    ("cross_attn.kv_linear.*", "attn2.to_k.*", "attn2.to_v.*"),
    ("cross_attn.proj.*", "attn2.to_out.0.*"),
    ("cross_attn.q_norm.*", "attn2.norm_q.*"),
    ("cross_attn.k_norm.*", "attn2.norm_k.*"),
    ("mlp.inverted_conv.conv.*", "ff.conv_inverted.*"),
    ("mlp.depth_conv.conv.*", "ff.conv_depth.*"),
    ("mlp.point_conv.conv.*", "ff.conv_point.*"),
)


def sana(shapes: Shapes) -> Iterator[OutputTensor]:
    yield from of_rows(shapes, _SANA, "", "")
    yield from of_blocks(shapes, _BLOCK, "blocks", "transformer_blocks")
