"""Configs of well-known models, for files that have none: constants by family, sizes from the tensors' shapes.

The values are those of the config.json files that the models were published with (Stable Diffusion 1.5, 2.1 and XL
base) and of FluxTransformer2DModel's defaults. Only what a weight's shape depends on, and what changes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]

_SD = {"_class_name": "UNet2DConditionModel", "sample_size": 64, "out_channels": 4, "layers_per_block": 2}
_CROSS, _PLAIN = ("CrossAttnDownBlock2D", "CrossAttnUpBlock2D"), ("DownBlock2D", "UpBlock2D")


def _sd1(shapes: Shapes) -> dict[str, Any]:
    return {**_SD, "cross_attention_dim": 768, "attention_head_dim": 8, "block_out_channels": [320, 640, 1280, 1280]}


def _sd2(shapes: Shapes) -> dict[str, Any]:
    return {
        **_SD,
        "cross_attention_dim": 1024,
        "attention_head_dim": [5, 10, 20, 20],
        "block_out_channels": [320, 640, 1280, 1280],
        "use_linear_projection": True,
    }


def _sdxl(shapes: Shapes) -> dict[str, Any]:
    return {
        **_SD,
        "sample_size": 128,
        "cross_attention_dim": 2048,
        "attention_head_dim": [5, 10, 20],
        "block_out_channels": [320, 640, 1280],
        "down_block_types": [_PLAIN[0], _CROSS[0], _CROSS[0]],
        "up_block_types": [_CROSS[1], _CROSS[1], _PLAIN[1]],
        "transformer_layers_per_block": [1, 2, 10],
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": shapes["label_emb.0.0.weight"][1],
    }


def _flux(shapes: Shapes) -> dict[str, Any]:
    head = shapes["double_blocks.0.img_attn.norm.query_norm.scale"][0]
    return {
        "_class_name": "FluxTransformer2DModel",
        "patch_size": 1,
        "in_channels": shapes["img_in.weight"][1],
        "out_channels": shapes["final_layer.linear.weight"][0],
        "num_layers": _count(shapes, "double_blocks."),
        "num_single_layers": _count(shapes, "single_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": shapes["img_in.weight"][0] // head,
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "pooled_projection_dim": shapes["vector_in.in_layer.weight"][1],
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
    }


_FAMILIES: Mapping[str, Callable[[Shapes], dict[str, Any]]] = {"sd1": _sd1, "sd2": _sd2, "sdxl": _sdxl, "flux": _flux}
# What a lone file must look like for the row to be true of it: a tensor and its first dimensions.
_SURE: Mapping[str, tuple[str, int]] = {
    "sd1": ("input_blocks.0.0.weight", 320),
    "sd2": ("input_blocks.0.0.weight", 320),
    "sdxl": ("input_blocks.0.0.weight", 320),
    "flux": ("double_blocks.0.img_attn.norm.query_norm.scale", 128),  # a head, whose rotary axes are 16, 56 and 56
}


def known(family: str | None, shapes: Shapes) -> dict[str, Any]:
    """Return the config of a UNet or transformer in its original layout; {} if the model is not known here.

    Args:
        shapes: by name, without a prefix. Those of quantized weights are of the float weight.
    """
    if family is None or family not in _FAMILIES:
        return {}
    name, size = _SURE[family]
    if name not in shapes or shapes[name][0] != size:
        return {}
    config = _FAMILIES[family](shapes)
    if family != "flux":
        config["in_channels"] = shapes["input_blocks.0.0.weight"][1]
    return config


def _count(shapes: Shapes, prefix: str) -> int:
    return len({name.split(".")[1] for name in shapes if name.startswith(prefix)})
