"""Sizes of transformers that draw images, by family: see `sized_configs`. Each tensor by its authors' name, and by
that of diffusers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from .tensor_sizes import (
    HEAD,
    IMAGE,
    LAST,
    LAST_BIAS,
    TEXT,
    Row,
    Shapes,
    blocks,
    columns,
    either,
    factor,
    has_ending,
    heads,
    if_has,
    is_there,
    majority,
    ratio,
    rows,
    shape,
    widest,
)

_GUIDANCE = (
    "guidance_in.in_layer.weight", "guidance_in.out_layer.weight",
    "time_guidance_embed.guidance_embedder.linear_1.weight", "time_guidance_embed.guidance_embedder.linear_2.weight",
    "time_text_embed.guidance_embedder.linear_1.weight", "time_text_embed.guidance_embedder.linear_2.weight",
)  # fmt: skip
_FLUX_BLOCKS = {
    "num_layers": blocks("double_blocks.", "transformer_blocks."),
    "num_single_layers": blocks("single_blocks.", "single_transformer_blocks."),
}
_FLUX_WIDTH = majority(  # what has as many columns as the model is wide, in each block
    "img_mlp.0.weight", "txt_mlp.0.weight", "img_attn.qkv.weight", "txt_attn.qkv.weight", "linear1.weight",
    "ff.net.0.proj.weight", "ff.linear_in.weight", "attn.to_q.weight", "attn.to_k.weight", "attn.to_v.weight",
    "attn.to_qkv_mlp_proj.weight", at=1,
)  # fmt: skip
_SD3_WIDTH = majority("attn.qkv.weight", "attn.to_q.weight", at=1)
_SECOND = re.compile(r"(?:joint_blocks|transformer_blocks)\.(\d+)\.(?:x_block\.)?attn2\.")
_PLAIN_WIDTH = majority("attn1.to_q.weight", "attn1.to_k.weight", "attn1.to_v.weight", at=1)
_GLU_WIDTH = majority("feed_forward.linear_1.weight", "feed_forward.w1.weight", at=1)
_AURA_WIDTH = majority("attn.to_q.weight", "attn.to_k.weight", "attn.w1q.weight", "attn.w1k.weight", at=1)
_SANA_WIDTH = majority("attn1.to_q.weight", "attn1.to_k.weight", "attn.qkv.weight", at=1)
_SANA_CROSS = majority("attn2.to_q.weight", "cross_attn.q_linear.weight")
_Z_WIDTH = rows("x_embedder.bias", "all_x_embedder.2-1.bias", "x_embedder.weight", "all_x_embedder.2-1.weight")


def _has_qk_norm(shapes: Shapes) -> bool:
    return any(name.endswith((".ln_q.weight", ".norm_q.weight")) for name in shapes)


def _sd3_head(shapes: Shapes) -> int:
    return int(HEAD(shapes)) if _has_qk_norm(shapes) else 64


def _two_attentions(shapes: Shapes) -> list[int]:
    """Return the blocks of an SD3 that attend twice."""
    return sorted({int(match[1]) for name in shapes if (match := _SECOND.match(name))})


def _z_channels(shapes: Shapes) -> int:
    there = [name for name in ("x_embedder.weight", "all_x_embedder.2-1.weight") if name in shapes]
    last = ("final_layer.linear.weight", "all_final_layer.2-1.linear.weight")
    return int((columns(*there) if there else rows(*last))(shapes)) // 4


def _z_axes(shapes: Shapes) -> list[int]:
    side = int(HEAD(shapes)) // 8 * 3
    return [int(HEAD(shapes)) - 2 * side, side, side]


def _hidream_captions(shapes: Shapes) -> list[int]:
    """Return the widths of HiDream's T5 and Llama: each block has a projection of Llama's, and the last one is T5's."""
    last = blocks("double_stream_blocks.")(shapes) + blocks("single_stream_blocks.")(shapes)
    llama = majority("linear.weight", at=1, within=tuple(f"caption_projection.{at}." for at in range(last)))
    return [either(columns(f"caption_projection.{last}.linear.weight"), llama)(shapes), llama(shapes)]


def _kv_heads(shapes: Shapes) -> int:
    """Return the heads of the keys of a Lumina 2; its authors have queries, keys and values in one tensor."""
    if has_ending("attn.to_k.weight")(shapes):
        return int(ratio(majority("attn.to_k.weight"), HEAD)(shapes))
    return int(majority("attention.qkv.weight")(shapes) - _GLU_WIDTH(shapes)) // 2 // int(HEAD(shapes))


IMAGES: Mapping[str | None, Row] = {
    "chroma": {
        "_class_name": "ChromaTransformer2DModel",
        **_FLUX_BLOCKS,
        "in_channels": columns(*IMAGE),
        "out_channels": rows(*LAST),
        "joint_attention_dim": columns(*TEXT),
        "attention_head_dim": HEAD,
        "num_attention_heads": ratio(_FLUX_WIDTH, HEAD),
        "approximator_num_channels": columns("distilled_guidance_layer.in_proj.weight"),
        "approximator_hidden_dim": rows(
            "distilled_guidance_layer.in_proj.bias", "distilled_guidance_layer.in_proj.weight"
        ),
        "approximator_layers": blocks("distilled_guidance_layer.layers."),
    },
    "flux": {
        "_class_name": "FluxTransformer2DModel",
        **_FLUX_BLOCKS,
        "in_channels": columns(*IMAGE),
        "out_channels": rows(*LAST, "final_layer.linear.bias", "proj_out.bias"),
        "joint_attention_dim": columns(*TEXT),
        "pooled_projection_dim": columns(
            "vector_in.in_layer.weight", "time_text_embed.text_embedder.linear_1.weight"
        ),
        "attention_head_dim": HEAD,
        "num_attention_heads": ratio(_FLUX_WIDTH, HEAD),
        "guidance_embeds": is_there(*_GUIDANCE),
    },
    "flux2": {
        "_class_name": "Flux2Transformer2DModel",
        **_FLUX_BLOCKS,
        "in_channels": columns(*IMAGE),
        "out_channels": rows(*LAST),
        "joint_attention_dim": columns(*TEXT),
        "attention_head_dim": HEAD,
        "num_attention_heads": ratio(_FLUX_WIDTH, HEAD),
        "timestep_guidance_channels": widest(
            "time_in.in_layer.weight", "guidance_in.in_layer.weight",
            "time_guidance_embed.timestep_embedder.linear_1.weight",
            "time_guidance_embed.guidance_embedder.linear_1.weight",
        ),
        "guidance_embeds": is_there(*_GUIDANCE),
        "mlp_ratio": lambda shapes: (
            majority("img_mlp.0.weight", "ff.linear_in.weight", over=2)(shapes) / _FLUX_WIDTH(shapes)
        ),
    },
    "qwen-image": {
        "_class_name": "QwenImageTransformer2DModel",
        "num_layers": blocks("transformer_blocks."),
        "in_channels": columns("img_in.weight"),
        "out_channels": rows("proj_out.bias", "proj_out.weight", over=4),
        "joint_attention_dim": columns("txt_in.weight"),
        "attention_head_dim": HEAD,
        "num_attention_heads": ratio(majority("img_mod.1.weight", at=1), HEAD),
        "use_additional_t_cond": is_there("time_text_embed.addition_t_embedding.weight"),
    },
    "sd3": {
        "_class_name": "SD3Transformer2DModel",
        "num_layers": blocks("joint_blocks.", "transformer_blocks."),
        "in_channels": columns("x_embedder.proj.weight", "pos_embed.proj.weight"),
        "out_channels": rows(*LAST, over=4),
        "joint_attention_dim": columns("context_embedder.weight"),
        "caption_projection_dim": _SD3_WIDTH,
        "pooled_projection_dim": columns(
            "y_embedder.mlp.0.weight", "time_text_embed.text_embedder.linear_1.weight"
        ),
        "attention_head_dim": _sd3_head,
        "num_attention_heads": ratio(_SD3_WIDTH, _sd3_head),
        "qk_norm": lambda shapes: "rms_norm" if _has_qk_norm(shapes) else None,
        "pos_embed_max_size": lambda shapes: math.isqrt(shape(shapes, ("pos_embed", "pos_embed.pos_embed"))[1]),
        "dual_attention_layers": _two_attentions,
    },
    "auraflow": {
        "_class_name": "AuraFlowTransformer2DModel",
        "num_mmdit_layers": blocks("joint_transformer_blocks.", "double_layers."),
        "num_single_dit_layers": blocks("single_transformer_blocks.", "single_layers."),
        "in_channels": columns("pos_embed.proj.weight", "init_x_linear.weight", over=4),
        "out_channels": columns("pos_embed.proj.weight", "init_x_linear.weight", over=4),
        "joint_attention_dim": columns("context_embedder.weight", "cond_seq_linear.weight"),
        "caption_projection_dim": _AURA_WIDTH,
        "pos_embed_max_size": lambda shapes: shape(shapes, ("pos_embed.pos_embed", "positional_encoding"))[1],
        **heads(_AURA_WIDTH, 256),
    },
    "cogview": {
        "_class_name": "CogView4Transformer2DModel",  # CogView 3 Plus has the same shapes
        "num_layers": blocks("transformer_blocks."),
        "in_channels": columns("patch_embed.proj.weight", over=4),
        "out_channels": rows("proj_out.bias", "proj_out.weight", over=4),
        "text_embed_dim": columns("patch_embed.text_proj.weight"),
        "time_embed_dim": majority("norm1.linear.weight", at=1),
        "condition_dim": columns("time_condition_embed.condition_embedder.linear_1.weight", over=6),
        **heads(_PLAIN_WIDTH, 40),
    },
    "hidream": {
        "_class_name": "HiDreamImageTransformer2DModel",
        "patch_size": 2,
        "num_layers": blocks("double_stream_blocks."),
        "num_single_layers": blocks("single_stream_blocks."),
        "in_channels": columns("x_embedder.proj.weight", over=4),
        "out_channels": rows("final_layer.linear.bias", "final_layer.linear.weight", over=4),
        "text_emb_dim": columns("p_embedder.pooled_embedder.linear_1.weight"),
        "num_routed_experts": majority("ff_i.gate.weight"),
        "caption_channels": _hidream_captions,
        **heads(_PLAIN_WIDTH, 128),
    },
    "hunyuan-image": {
        "_class_name": "HunyuanImageTransformer2DModel",
        **_FLUX_BLOCKS,
        "num_refiner_layers": blocks("context_embedder.token_refiner.refiner_blocks."),
        "in_channels": columns("x_embedder.proj.weight"),
        "out_channels": rows("proj_out.bias", "proj_out.weight"),
        "text_embed_dim": columns("context_embedder.proj_in.weight"),
        "text_embed_2_dim": if_has(
            columns("context_embedder_2.linear_1.weight"), "context_embedder_2.linear_1.weight",
            "context_embedder_2.linear_2.weight",
        ),
        "attention_head_dim": HEAD,
        "num_attention_heads": ratio(_FLUX_WIDTH, HEAD),
        "guidance_embeds": is_there(
            "time_guidance_embed.guidance_embedder.linear_1.weight",
            "time_guidance_embed.guidance_embedder.linear_2.weight",
        ),
        "use_meanflow": is_there(
            "time_guidance_embed.timestep_embedder_r.linear_1.weight",
            "time_guidance_embed.timestep_embedder_r.linear_2.weight",
        ),
    },
    "lumina2": {
        "_class_name": "Lumina2Transformer2DModel",
        "num_layers": blocks("layers."),
        "num_refiner_layers": blocks("noise_refiner."),
        "hidden_size": _GLU_WIDTH,
        "num_attention_heads": ratio(_GLU_WIDTH, HEAD),
        "num_kv_heads": _kv_heads,
        "in_channels": columns("x_embedder.weight", over=4),
        "out_channels": rows(
            "norm_out.linear_2.bias", "final_layer.linear.bias", "norm_out.linear_2.weight",
            "final_layer.linear.weight", over=4,
        ),
        "cap_feat_dim": either(
            rows("time_caption_embed.caption_embedder.0.weight", "cap_embedder.0.weight"),
            columns("time_caption_embed.caption_embedder.1.weight", "cap_embedder.1.weight"),
        ),
        "multiple_of": 1,
        "ffn_dim_multiplier": lambda shapes: (
            factor(majority("feed_forward.linear_1.weight", "feed_forward.w1.weight"), _GLU_WIDTH)(shapes) / 4
        ),
    },
    "pixart": {
        "_class_name": "PixArtTransformer2DModel",
        "num_layers": blocks("transformer_blocks."),
        "num_attention_heads": lambda shapes: 16 if _PLAIN_WIDTH(shapes) % 16 == 0 else 1,
        "attention_head_dim": lambda shapes: _PLAIN_WIDTH(shapes) // (16 if _PLAIN_WIDTH(shapes) % 16 == 0 else 1),
        "in_channels": columns("pos_embed.proj.weight"),
        "out_channels": rows("proj_out.bias", "proj_out.weight", over=4),
        "cross_attention_dim": majority("attn2.to_k.weight", "attn2.to_v.weight", at=1),
        "caption_channels": if_has(
            columns("caption_projection.linear_1.weight"), "caption_projection.linear_1.weight",
            "caption_projection.linear_2.weight",
        ),
        "use_additional_conditions": is_there(
            "adaln_single.emb.resolution_embedder.linear_1.weight",
            "adaln_single.emb.aspect_ratio_embedder.linear_1.weight",
        ),
    },
    "sana": {
        "_class_name": "SanaTransformer2DModel",
        "num_layers": blocks("transformer_blocks.", "blocks."),
        "in_channels": columns("patch_embed.proj.weight", "x_embedder.proj.weight"),
        "out_channels": rows(*LAST_BIAS),
        "num_cross_attention_heads": 1,
        "cross_attention_head_dim": _SANA_CROSS,
        "cross_attention_dim": majority("attn2.to_k.weight", "attn2.to_v.weight", "cross_attn.kv_linear.weight", at=1),
        "caption_channels": columns("caption_projection.linear_1.weight", "y_embedder.y_proj.fc1.weight"),
        "mlp_ratio": factor(majority("conv_point.weight", "point_conv.conv.weight", at=1), _SANA_WIDTH),
        "qk_norm": lambda shapes: (
            "rms_norm_across_heads" if has_ending("norm_q.weight", "q_norm.weight")(shapes) else None
        ),
        "guidance_embeds": is_there(
            "time_embed.guidance_embedder.linear_1.weight", "time_embed.guidance_embedder.linear_2.weight",
            "cfg_embedder.mlp.0.weight", "cfg_embedder.mlp.2.weight",
        ),
        **heads(_SANA_WIDTH, 32),
    },
    "z-image": {
        "_class_name": "ZImageTransformer2DModel",
        "n_layers": blocks("layers."),
        "n_refiner_layers": blocks("noise_refiner."),
        "dim": _Z_WIDTH,
        "in_channels": _z_channels,
        "cap_feat_dim": lambda shapes: shapes.get("cap_embedder.0.weight", shapes["cap_embedder.1.weight"][1:])[0],
        "n_heads": ratio(_Z_WIDTH, HEAD),
        "n_kv_heads": ratio(_Z_WIDTH, HEAD),
        "axes_dims": _z_axes,
    },
}  # fmt: skip
