"""Configs of well-known models, for files that have none: constants by family, sizes from the tensors' shapes.

The values are those of the config.json files that the models were published with (Stable Diffusion 1.5, 2.1 and XL
base) and of FluxTransformer2DModel's defaults. Only what a weight's shape depends on, and what changes the result.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from . import resaved_names

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


# What its authors call the tensors that tell its sizes, and what diffusers does.
_FLUX_NAMES: tuple[tuple[Any, ...], ...] = (
    (
        "img_in", "final_layer.linear.weight", "double_blocks", "single_blocks", ("query_norm.scale", "key_norm.scale"),
        "txt_in.weight", "vector_in.in_layer.weight", "guidance_in.in_layer.weight",
    ),
    (
        "x_embedder", "proj_out.weight", "transformer_blocks", "single_transformer_blocks",
        ("norm_q.weight", "norm_k.weight", "norm_added_q.weight", "norm_added_k.weight"),
        "context_embedder.weight", "time_text_embed.text_embedder.linear_1.weight",
        "time_text_embed.guidance_embedder.linear_1.weight",
    ),
)  # fmt: skip


def _flux(shapes: Shapes) -> dict[str, Any]:
    names = next(row for row in _FLUX_NAMES if f"{row[0]}.bias" in shapes)
    image, last, double, single, norms, text, pooled, guidance = names
    head = Counter(shape[0] for name, shape in shapes.items() if name.endswith(norms)).most_common(1)[0][0]
    return {
        "_class_name": "FluxTransformer2DModel",
        "patch_size": 1,
        "in_channels": _columns(shapes, f"{image}.weight"),
        "out_channels": shapes.get(last.replace("weight", "bias"), shapes.get(last, ()))[0],
        "num_layers": _count(shapes, f"{double}."),
        "num_single_layers": _count(shapes, f"{single}."),
        "attention_head_dim": head,
        "num_attention_heads": shapes[f"{image}.bias"][0] // head,
        "joint_attention_dim": _columns(shapes, text),
        "pooled_projection_dim": _columns(shapes, pooled),
        "guidance_embeds": guidance in shapes,
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
    shapes = resaved_names.published(shapes)
    name, size = _SURE[family]
    if name not in shapes or shapes[name][0] != size:
        return {}
    config = _FAMILIES[family](shapes)
    if family != "flux":
        config["in_channels"] = shapes["input_blocks.0.0.weight"][1]
    return config


def _columns(shapes: Shapes, name: str) -> int:
    """Return the number of columns of a matrix, also of one that lost its shape; 1 if it is not there."""
    shape, rows = shapes.get(name, (1, 1)), shapes.get(name.replace("weight", "bias"), (1,))[0]
    return shape[1] if len(shape) == 2 else max(1, math.prod(shape) // max(1, rows))


def _count(shapes: Shapes, prefix: str) -> int:
    return len({name.split(".")[1] for name in shapes if name.startswith(prefix)})
