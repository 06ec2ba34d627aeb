"""HunyuanVideo, as Tencent name it."""

from __future__ import annotations

from collections.abc import Iterator

from .rows import OutputTensor, Rows, Shapes, count, of_rows

_HUNYUAN: Rows = (
    ("img_in.proj.*", "x_embedder.proj.*"),
    ("txt_in.input_embedder.*", "context_embedder.proj_in.*"),
    ("txt_in.t_embedder.mlp.0.*", "context_embedder.time_text_embed.timestep_embedder.linear_1.*"),
    ("txt_in.t_embedder.mlp.2.*", "context_embedder.time_text_embed.timestep_embedder.linear_2.*"),
    ("txt_in.c_embedder.linear_1.*", "context_embedder.time_text_embed.text_embedder.linear_1.*"),
    ("txt_in.c_embedder.linear_2.*", "context_embedder.time_text_embed.text_embedder.linear_2.*"),
    ("time_in.mlp.0.*", "time_text_embed.timestep_embedder.linear_1.*"),
    ("time_in.mlp.2.*", "time_text_embed.timestep_embedder.linear_2.*"),
    ("guidance_in.mlp.0.*", "time_text_embed.guidance_embedder.linear_1.*"),
    ("guidance_in.mlp.2.*", "time_text_embed.guidance_embedder.linear_2.*"),
    ("vector_in.in_layer.*", "time_text_embed.text_embedder.linear_1.*"),
    ("vector_in.out_layer.*", "time_text_embed.text_embedder.linear_2.*"),
    ("final_layer.linear.*", "proj_out.*"),
    ("~final_layer.adaLN_modulation.1.*", "norm_out.linear.*"),
)
_REFINER: Rows = (
    ("norm1.*", "norm1.*"),
    ("self_attn_qkv.*", "attn.to_q.*", "attn.to_k.*", "attn.to_v.*"),
    ("self_attn_proj.*", "attn.to_out.0.*"),
    ("norm2.*", "norm2.*"),
    ("mlp.fc1.*", "ff.net.0.proj.*"),
    ("mlp.fc2.*", "ff.net.2.*"),
    ("adaLN_modulation.1.*", "norm_out.linear.*"),
)
_DOUBLE: Rows = (
    ("img_mod.linear.*", "norm1.linear.*"),
    ("img_attn_qkv.*", "attn.to_q.*", "attn.to_k.*", "attn.to_v.*"),
    ("img_attn_q_norm.*", "attn.norm_q.*"),
    ("img_attn_k_norm.*", "attn.norm_k.*"),
    ("img_attn_proj.*", "attn.to_out.0.*"),
    ("img_mlp.fc1.*", "ff.net.0.proj.*"),
    ("img_mlp.fc2.*", "ff.net.2.*"),
    ("txt_mod.linear.*", "norm1_context.linear.*"),
    ("txt_attn_qkv.*", "attn.add_q_proj.*", "attn.add_k_proj.*", "attn.add_v_proj.*"),
    ("txt_attn_q_norm.*", "attn.norm_added_q.*"),
    ("txt_attn_k_norm.*", "attn.norm_added_k.*"),
    ("txt_attn_proj.*", "attn.to_add_out.*"),
    ("txt_mlp.fc1.*", "ff_context.net.0.proj.*"),
    ("txt_mlp.fc2.*", "ff_context.net.2.*"),
)
_SINGLE: Rows = (
    ("modulation.linear.*", "norm.linear.*"),
    ("linear1.*", "attn.to_q.*", "attn.to_k.*", "attn.to_v.*", "proj_mlp.*"),
    ("linear2.*", "proj_out.*"),
    ("q_norm.*", "attn.norm_q.*"),
    ("k_norm.*", "attn.norm_k.*"),
)
_REFINERS = ("txt_in.individual_token_refiner.blocks.", "context_embedder.token_refiner.refiner_blocks.")


def hunyuan_video(shapes: Shapes) -> Iterator[OutputTensor]:
    yield from of_rows(shapes, _HUNYUAN, "", "")
    for i in range(count(shapes, _REFINERS[1])):
        yield from of_rows(shapes, _REFINER, f"{_REFINERS[0]}{i}.", f"{_REFINERS[1]}{i}.")
    for i in range(count(shapes, "transformer_blocks.")):
        yield from of_rows(shapes, _DOUBLE, f"double_blocks.{i}.", f"transformer_blocks.{i}.")
    for i in range(count(shapes, "single_transformer_blocks.")):
        yield from of_rows(shapes, _SINGLE, f"single_blocks.{i}.", f"single_transformer_blocks.{i}.")
