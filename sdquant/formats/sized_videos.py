"""Sizes of transformers that draw videos, by family: see `sized_configs`. Each tensor by its authors' name, and by
that of diffusers."""

from __future__ import annotations

from collections.abc import Mapping

from .tensor_sizes import (
    HEAD,
    LAST_BIAS,
    Row,
    Shapes,
    Size,
    blocks,
    columns,
    factor,
    has_ending,
    head,
    heads,
    if_has,
    is_there,
    majority,
    ratio,
    rows,
)

_WAN_WIDTH = rows("patch_embedding.bias", "patch_embedding.weight")
_WAN_EYES = "condition_embedder.image_embedder."
_SEES = is_there(
    "img_emb.proj.1.weight", "img_emb.proj.3.weight", f"{_WAN_EYES}ff.net.0.proj.weight", f"{_WAN_EYES}ff.net.2.weight"
)
_WIDTH = majority("attn1.to_q.weight", "attn1.to_k.weight", "attn1.to_v.weight", at=1, within=("transformer_blocks.",))
_AUDIO_WIDTH = majority("audio_attn1.to_q.weight", "audio_attn1.to_k.weight", "audio_attn1.to_v.weight", at=1)
_LTX_WIDTH = majority(".attn1.to_q.weight", ".attn1.to_k.weight", ".attn1.to_v.weight", at=1)
_HUNYUAN_WIDTH = majority(
    "attn.to_q.weight", "attn.to_k.weight", "img_attn_qkv.weight", "txt_attn_qkv.weight", "linear1.weight", at=1
)
_MOCHI_WIDTH = majority("attn1.to_q.weight", "attn1.to_k.weight", "attn.qkv_x.weight", at=1)
_COSMOS_WIDTH = majority(
    "attn1.to_q.weight",
    "attn1.to_k.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "attn.to_q.0.weight",
    at=1,
)
_CROSS = "crossattn_proj.0.weight", "crossattn_proj.0.bias"


def _ltx2_heads(part: str, width: Size, common: int) -> dict[str, Size]:
    """Return the rows of the heads of LTX-2's videos, or of its audio: gates have a row for each head."""
    gates = majority(f".{part}attn1.to_gate_logits.weight")

    def number(shapes: Shapes) -> int:
        gated = has_ending(f".{part}attn1.to_gate_logits.weight")(shapes)
        return int(gates(shapes) if gated else ratio(width, head(width, common))(shapes))

    return {f"{part}num_attention_heads": number, f"{part}attention_head_dim": ratio(width, number)}


def _pos_frames(shapes: Shapes) -> int | None:
    """Return the places of an image's embeddings that Wan's first and last frames have."""
    own = shapes.get("img_emb.emb_pos", shapes.get(f"{_WAN_EYES}pos_embed"))
    return None if own is None else own[1]


def _cosmos_text(shapes: Shapes) -> int:
    """Return the width of what Cosmos' second attention sees, which in Cosmos 1's files is only told by its place."""
    first = [name for name in shapes if name.startswith("blocks.block")]
    ending = ".blocks.1.block.attn.to_{}.0.weight" if first else ""
    own = (ending.format("k"), ending.format("v")) if first else (
        "attn2.to_k.weight", "attn2.to_v.weight", "cross_attn.k_proj.weight", "cross_attn.v_proj.weight"
    )  # fmt: skip
    return int(majority(*own, at=1)(shapes))


def _cosmos_places(shapes: Shapes) -> tuple[int, int, int]:
    """Return the frames, rows and columns that a Cosmos 1 has places for; a patch is two rows and two columns."""
    sides = [
        shapes.get(f"learnable_pos_embed.pos_emb_{side}", shapes.get(f"extra_pos_embedder.pos_emb_{side}", (1,)))[0]
        for side in "thw"
    ]
    return sides[0], 2 * sides[1], 2 * sides[2]


_OFFSETS = ("ofs_embedding.linear_1.weight", "ofs_embedding.linear_2.weight")  # each as many rows as columns


def _cogvideo_patch(shapes: Shapes) -> int | None:
    """Return the frames of a patch: CogVideoX 1.5 has a matrix for it, 1.0 a convolution of one frame and its bias."""
    weight = shapes.get("patch_embed.proj.weight")
    is_matrix = "patch_embed.proj.bias" not in shapes if weight is None else len(weight) == 2
    return 2 if is_matrix else None


_WAN: Row = {
    "num_layers": blocks("blocks."),
    "in_channels": columns("patch_embedding.weight"),
    "out_channels": rows("head.head.bias", "proj_out.bias", "head.head.weight", "proj_out.weight", over=4),
    "text_dim": columns("text_embedding.0.weight", "condition_embedder.text_embedder.linear_1.weight"),
    "freq_dim": columns("time_embedding.0.weight", "condition_embedder.time_embedder.linear_1.weight"),
    "ffn_dim": majority("ffn.0.bias", "ffn.0.weight", "ffn.net.0.proj.bias", "ffn.net.0.proj.weight"),
    **heads(_WAN_WIDTH, 128),
    "image_dim": lambda shapes: rows(
        "img_emb.proj.0.weight", "img_emb.proj.0.bias", f"{_WAN_EYES}norm1.weight", f"{_WAN_EYES}norm1.bias"
    )(shapes) if _SEES(shapes) else None,
    "added_kv_proj_dim": lambda shapes: _WAN_WIDTH(shapes) if _SEES(shapes) else None,
    "pos_embed_seq_len": _pos_frames,
}  # fmt: skip


VIDEOS: Mapping[str | None, Row] = {
    "cogvideox": {
        "_class_name": "CogVideoXTransformer3DModel",
        "num_layers": blocks("transformer_blocks."),
        "patch_size_t": _cogvideo_patch,
        "patch_bias": lambda shapes: _cogvideo_patch(shapes) is None or is_there("patch_embed.proj.bias")(shapes),
        "in_channels": lambda shapes: shapes["patch_embed.proj.weight"][1] // (8 if _cogvideo_patch(shapes) else 1),
        "out_channels": lambda shapes: rows(*LAST_BIAS)(shapes) // (4 * (_cogvideo_patch(shapes) or 1)),
        "time_embed_dim": majority("norm1.linear.weight", "norm2.linear.weight", at=1),
        "text_embed_dim": columns("patch_embed.text_proj.weight"),
        "ofs_embed_dim": if_has(rows(*_OFFSETS), *_OFFSETS),
        "attention_head_dim": HEAD,
        "num_attention_heads": ratio(_WIDTH, HEAD),
    },
    "cosmos": {
        "_class_name": "CosmosTransformer3DModel",
        "num_layers": blocks("transformer_blocks.", "blocks."),
        "in_channels": lambda shapes: columns("patch_embed.proj.weight", "x_embedder.proj.1.weight")(shapes) // 4 - 1,
        "out_channels": rows(*LAST_BIAS, over=4),
        "attention_head_dim": HEAD,
        "num_attention_heads": ratio(_COSMOS_WIDTH, HEAD),
        "text_embed_dim": _cosmos_text,
        "adaln_lora_dim": majority(
            "norm1.linear_1.weight", "adaLN_modulation.1.weight", "adaln_modulation_self_attn.1.weight",
            within=("transformer_blocks.", "blocks."),
        ),
        "mlp_ratio": factor(majority("ff.net.0.proj.weight", "layer1.weight"), _COSMOS_WIDTH),
        "max_size": _cosmos_places,
        "extra_pos_embed_type": lambda shapes: "learnable" if has_ending("pos_emb_t", "pos_emb_h")(shapes) else None,
        "use_crossattn_projection": is_there(*_CROSS),
        "crossattn_proj_in_channels": if_has(columns(_CROSS[0]), *_CROSS),
        "encoder_hidden_states_channels": if_has(rows(*_CROSS), *_CROSS),
    },
    "hunyuan-video": {
        "_class_name": "HunyuanVideoTransformer3DModel",
        "num_layers": blocks("double_blocks.", "transformer_blocks."),
        "num_single_layers": blocks("single_blocks.", "single_transformer_blocks."),
        "num_refiner_layers": blocks(
            "context_embedder.token_refiner.refiner_blocks.", "txt_in.individual_token_refiner.blocks."
        ),
        "in_channels": columns("x_embedder.proj.weight", "img_in.proj.weight"),
        "out_channels": rows(*LAST_BIAS, over=4),
        "text_embed_dim": columns("context_embedder.proj_in.weight", "txt_in.input_embedder.weight"),
        "pooled_projection_dim": columns(
            "time_text_embed.text_embedder.linear_1.weight", "vector_in.in_layer.weight"
        ),
        "attention_head_dim": HEAD,
        "num_attention_heads": ratio(_HUNYUAN_WIDTH, HEAD),
        "guidance_embeds": is_there(
            "time_text_embed.guidance_embedder.linear_1.weight", "time_text_embed.guidance_embedder.linear_2.weight",
            "guidance_in.mlp.0.weight", "guidance_in.mlp.2.weight",
        ),
    },
    "hunyuan-video-1.5": {
        "_class_name": "HunyuanVideo15Transformer3DModel",
        "num_layers": blocks("transformer_blocks."),
        "num_refiner_layers": blocks("context_embedder.token_refiner.refiner_blocks."),
        "in_channels": columns("x_embedder.proj.weight"),
        "out_channels": rows(*LAST_BIAS),
        "text_embed_dim": columns("context_embedder.proj_in.weight"),
        "text_embed_2_dim": columns("context_embedder_2.linear_1.weight"),
        "image_embed_dim": rows("image_embedder.norm_in.weight", "image_embedder.linear_1.weight"),
        "attention_head_dim": HEAD,
        "num_attention_heads": ratio(_HUNYUAN_WIDTH, HEAD),
        "use_meanflow": is_there(
            "time_embed.timestep_embedder_r.linear_1.weight", "time_embed.timestep_embedder_r.linear_2.weight"
        ),
    },
    "ltx-video": {
        "_class_name": "LTXVideoTransformer3DModel",
        "num_layers": blocks("transformer_blocks."),
        "in_channels": columns("proj_in.weight", "patchify_proj.weight"),
        "out_channels": rows("proj_out.bias", "proj_out.weight"),
        "caption_channels": columns("caption_projection.linear_1.weight"),
        "cross_attention_dim": majority("attn2.to_k.weight", "attn2.to_v.weight", at=1),
        **heads(_LTX_WIDTH, 64),
    },
    "ltx2": {
        "_class_name": "LTX2VideoTransformer3DModel",
        "num_layers": blocks("transformer_blocks."),
        "in_channels": columns("proj_in.weight", "patchify_proj.weight"),
        "out_channels": rows("proj_out.bias", "proj_out.weight"),
        "audio_in_channels": columns("audio_proj_in.weight", "audio_patchify_proj.weight"),
        "audio_out_channels": rows("audio_proj_out.bias", "audio_proj_out.weight"),
        "use_prompt_embeddings": is_there("caption_projection.linear_1.weight", "caption_projection.linear_2.weight"),
        "caption_channels": if_has(
            columns("caption_projection.linear_1.weight", "audio_caption_projection.linear_1.weight"),
            "caption_projection.linear_1.weight", "caption_projection.linear_2.weight",
        ),
        "cross_attention_dim": majority(".attn2.to_k.weight", ".attn2.to_v.weight", at=1),
        "audio_cross_attention_dim": majority("audio_attn2.to_k.weight", "audio_attn2.to_v.weight", at=1),
        "gated_attn": has_ending(".attn1.to_gate_logits.weight"),
        "audio_gated_attn": has_ending(".audio_attn1.to_gate_logits.weight"),
        "cross_attn_mod": lambda shapes: majority(".scale_shift_table")(shapes) == 9,
        "audio_cross_attn_mod": lambda shapes: majority(".audio_scale_shift_table")(shapes) == 9,
        "use_prompt_adaln_single": is_there(
            "prompt_adaln.linear.weight", "prompt_adaln_single.linear.weight", "prompt_adaln.linear.bias",
            "prompt_adaln_single.linear.bias",
        ),
        "ff_bias": has_ending(".ff.net.2.bias"),
        "audio_ff_bias": has_ending(".audio_ff.net.2.bias"),
        **_ltx2_heads("", _LTX_WIDTH, 128),
        **_ltx2_heads("audio_", _AUDIO_WIDTH, 64),
    },
    "mochi": {
        "_class_name": "MochiTransformer3DModel",
        "num_layers": blocks("transformer_blocks.", "blocks."),
        "in_channels": columns("patch_embed.proj.weight", "x_embedder.proj.weight"),
        "out_channels": rows(*LAST_BIAS, over=4),
        "pooled_projection_dim": majority(
            "attn1.add_k_proj.weight", "attn1.add_q_proj.weight", "attn.qkv_y.weight", at=1
        ),
        "text_embed_dim": columns("time_embed.caption_proj.weight", "t5_yproj.weight"),
        "time_embed_dim": columns("time_embed.timestep_embedder.linear_1.weight", "t_embedder.mlp.0.weight"),
        "attention_head_dim": HEAD,
        "num_attention_heads": ratio(_MOCHI_WIDTH, HEAD),
    },
    "sana-video": {
        "_class_name": "SanaVideoTransformer3DModel",
        "num_layers": blocks("transformer_blocks."),
        "in_channels": columns("patch_embedding.weight"),
        "out_channels": rows(*LAST_BIAS, over=4),
        "num_cross_attention_heads": 1,
        "cross_attention_head_dim": majority("attn2.to_q.weight"),
        "cross_attention_dim": majority("attn2.to_k.weight", "attn2.to_v.weight", at=1),
        "caption_channels": columns("caption_projection.linear_1.weight"),
        "mlp_ratio": factor(majority("conv_point.weight", at=1), _WIDTH),
        "guidance_embeds": is_there(
            "time_embed.guidance_embedder.linear_1.weight", "time_embed.guidance_embedder.linear_2.weight"
        ),
        **heads(_WIDTH, 112),
    },
    "wan": {**_WAN, "_class_name": "WanTransformer3DModel"},
    "wan-vace": {
        **_WAN,
        "_class_name": "WanVACETransformer3DModel",
        "vace_layers": lambda shapes: list(range(blocks("vace_blocks.")(shapes))),
        "vace_in_channels": columns("vace_patch_embedding.weight"),
    },
}  # fmt: skip
