"""Configs that have all shapes of a transformer right, from the shapes of some of its tensors, a row for each family.

They are for `models.lone_files`, which builds a model without weights of them and holds the other tensors against it.
Each tensor has two names, its authors' and diffusers'. What no shape depends on is left out.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import known_configs

Shapes = Mapping[str, tuple[int, ...]]
Size = Callable[[Shapes], Any]
_ERRORS = (KeyError, IndexError, StopIteration, ValueError, ZeroDivisionError)
_NOTHING = object()
_MOST_LACKING = 3  # sizes that nothing tells, such as those of weights whose shape is not recorded


def sized(family: str | None, shapes: Shapes) -> dict[str, Any]:
    """Return a config that has all shapes of such a model right, perhaps nothing else; {} if its sizes are not known.

    Args:
        shapes: by name, without a prefix. Those of quantized weights are of the float weight.
    """
    config = {key: _found(size, shapes) for key, size in _ROWS.get(family, {}).items()}
    lacking = [key for key, size in config.items() if size is _NOTHING]
    if config:  # without the tensor that tells a size, that tensor is missing, and the others have theirs
        return {**config, **dict.fromkeys(lacking, 1)} if len(lacking) <= _MOST_LACKING else {}
    try:
        return known_configs.known(family, shapes)
    except _ERRORS:
        return {}


def _found(size: Any, shapes: Shapes) -> Any:
    try:
        return size(shapes) if callable(size) else size
    except _ERRORS:
        return _NOTHING


def _shape(shapes: Shapes, names: tuple[str, ...]) -> tuple[int, ...]:
    return next(shapes[name] for name in names if name in shapes)


def _rows(*names: str, over: int = 1) -> Size:
    return lambda shapes: _shape(shapes, names)[0] // over


def _columns(*names: str, over: int = 1) -> Size:
    return lambda shapes: _shape(shapes, names)[1] // over


def _widest(*names: str) -> Size:
    """The most columns of tensors that have the same number, of which one may be damaged."""
    return lambda shapes: max(shapes[name][1] for name in names if len(shapes.get(name, ())) > 1)


def _most(*endings: str, at: int = 0, over: int = 1) -> Size:
    """The size of a dimension that most of the tensors have whose names end so, one in each block."""
    return lambda shapes: Counter(
        shape[at] for name, shape in shapes.items() if name.endswith(endings) and len(shape) > at
    ).most_common(1)[0][0] // over  # fmt: skip


def _ratio(one: Size, other: Size) -> Size:
    return lambda shapes: one(shapes) // other(shapes)


def _blocks(*prefixes: str) -> Size:
    """The number of blocks of a list."""
    return lambda shapes: max(
        len({name.removeprefix(prefix).partition(".")[0] for name in shapes if name.startswith(prefix)})
        for prefix in prefixes
    )


def _has(*names: str) -> Size:
    return lambda shapes: any(name in shapes for name in names)


_HEAD = _most(
    "query_norm.scale", "key_norm.scale", "norm_q.weight", "norm_k.weight", "norm_added_q.weight",
    "norm_added_k.weight", "q_norm.weight", "k_norm.weight", "ln_q.weight", "ln_k.weight",
)  # fmt: skip
_IMAGE = ("img_in.weight", "x_embedder.weight")
_TEXT = ("txt_in.weight", "context_embedder.weight")
_LAST = ("final_layer.linear.weight", "proj_out.weight")
_GUIDANCE = (
    "guidance_in.in_layer.weight", "guidance_in.out_layer.weight",
    "time_guidance_embed.guidance_embedder.linear_1.weight", "time_guidance_embed.guidance_embedder.linear_2.weight",
    "time_text_embed.guidance_embedder.linear_1.weight", "time_text_embed.guidance_embedder.linear_2.weight",
)  # fmt: skip
_FLUX_BLOCKS = {
    "num_layers": _blocks("double_blocks.", "transformer_blocks."),
    "num_single_layers": _blocks("single_blocks.", "single_transformer_blocks."),
}
_FLUX_WIDTH = _most(  # what has as many columns as the model is wide, in each block
    "img_mlp.0.weight", "txt_mlp.0.weight", "img_attn.qkv.weight", "txt_attn.qkv.weight", "linear1.weight",
    "ff.net.0.proj.weight", "ff.linear_in.weight", "attn.to_q.weight", "attn.to_k.weight", "attn.to_v.weight",
    "attn.to_qkv_mlp_proj.weight", at=1,
)  # fmt: skip
_SD3_WIDTH = _most("attn.qkv.weight", "attn.to_q.weight", at=1)
_SECOND = re.compile(r"(?:joint_blocks|transformer_blocks)\.(\d+)\.(?:x_block\.)?attn2\.")
_WAN_WIDTH = _rows("patch_embedding.bias", "patch_embedding.weight")
_SEES = _has("img_emb.proj.1.weight", "img_emb.proj.3.weight")
_Z_WIDTH = _rows("x_embedder.bias", "all_x_embedder.2-1.bias", "x_embedder.weight", "all_x_embedder.2-1.weight")


def _head(shapes: Shapes, usual: int) -> int:
    """The size of a head of a model whose tensors do not show it, if it has several."""
    return usual if _WAN_WIDTH(shapes) % usual == 0 else int(_WAN_WIDTH(shapes))


def _has_qk_norm(shapes: Shapes) -> bool:
    return any(name.endswith((".ln_q.weight", ".norm_q.weight")) for name in shapes)


def _sd3_head(shapes: Shapes) -> int:
    return int(_HEAD(shapes)) if _has_qk_norm(shapes) else 64


def _two_attentions(shapes: Shapes) -> list[int]:
    """The blocks of an SD3 that attend twice."""
    return sorted({int(match[1]) for name in shapes if (match := _SECOND.match(name))})


def _z_channels(shapes: Shapes) -> int:
    there = [name for name in ("x_embedder.weight", "all_x_embedder.2-1.weight") if name in shapes]
    last = ("final_layer.linear.weight", "all_final_layer.2-1.linear.weight")
    return int((_columns(*there) if there else _rows(*last))(shapes)) // 4


def _z_axes(shapes: Shapes) -> list[int]:
    most = int(_HEAD(shapes)) // 8 * 3
    return [int(_HEAD(shapes)) - 2 * most, most, most]


_ROWS: Mapping[str | None, Mapping[str, Any]] = {
    "chroma": {
        "_class_name": "ChromaTransformer2DModel",
        **_FLUX_BLOCKS,
        "in_channels": _columns(*_IMAGE),
        "out_channels": _rows(*_LAST),
        "joint_attention_dim": _columns(*_TEXT),
        "attention_head_dim": _HEAD,
        "num_attention_heads": _ratio(_FLUX_WIDTH, _HEAD),
        "approximator_num_channels": _columns("distilled_guidance_layer.in_proj.weight"),
        "approximator_hidden_dim": _rows(
            "distilled_guidance_layer.in_proj.bias", "distilled_guidance_layer.in_proj.weight"
        ),
        "approximator_layers": _blocks("distilled_guidance_layer.layers."),
    },
    "flux": {
        "_class_name": "FluxTransformer2DModel",
        **_FLUX_BLOCKS,
        "in_channels": _columns(*_IMAGE),
        "out_channels": _rows(*_LAST, "final_layer.linear.bias", "proj_out.bias"),
        "joint_attention_dim": _columns(*_TEXT),
        "pooled_projection_dim": _columns(
            "vector_in.in_layer.weight", "time_text_embed.text_embedder.linear_1.weight"
        ),
        "attention_head_dim": _HEAD,
        "num_attention_heads": _ratio(_FLUX_WIDTH, _HEAD),
        "guidance_embeds": _has(*_GUIDANCE),
    },
    "flux2": {
        "_class_name": "Flux2Transformer2DModel",
        **_FLUX_BLOCKS,
        "in_channels": _columns(*_IMAGE),
        "out_channels": _rows(*_LAST),
        "joint_attention_dim": _columns(*_TEXT),
        "attention_head_dim": _HEAD,
        "num_attention_heads": _ratio(_FLUX_WIDTH, _HEAD),
        "timestep_guidance_channels": _widest(
            "time_in.in_layer.weight", "guidance_in.in_layer.weight",
            "time_guidance_embed.timestep_embedder.linear_1.weight",
            "time_guidance_embed.guidance_embedder.linear_1.weight",
        ),
        "guidance_embeds": _has(*_GUIDANCE),
        "mlp_ratio": lambda shapes: (
            _most("img_mlp.0.weight", "ff.linear_in.weight", over=2)(shapes) / _FLUX_WIDTH(shapes)
        ),
    },
    "qwen-image": {
        "_class_name": "QwenImageTransformer2DModel",
        "num_layers": _blocks("transformer_blocks."),
        "in_channels": _columns("img_in.weight"),
        "out_channels": _rows("proj_out.bias", "proj_out.weight", over=4),
        "joint_attention_dim": _columns("txt_in.weight"),
        "attention_head_dim": _HEAD,
        "num_attention_heads": _ratio(_most("img_mod.1.weight", at=1), _HEAD),
        "use_additional_t_cond": _has("time_text_embed.addition_t_embedding.weight"),
    },
    "sd3": {
        "_class_name": "SD3Transformer2DModel",
        "num_layers": _blocks("joint_blocks.", "transformer_blocks."),
        "in_channels": _columns("x_embedder.proj.weight", "pos_embed.proj.weight"),
        "out_channels": _rows(*_LAST, over=4),
        "joint_attention_dim": _columns("context_embedder.weight"),
        "caption_projection_dim": _SD3_WIDTH,
        "pooled_projection_dim": _columns(
            "y_embedder.mlp.0.weight", "time_text_embed.text_embedder.linear_1.weight"
        ),
        "attention_head_dim": _sd3_head,
        "num_attention_heads": _ratio(_SD3_WIDTH, _sd3_head),
        "qk_norm": lambda shapes: "rms_norm" if _has_qk_norm(shapes) else None,
        "pos_embed_max_size": lambda shapes: math.isqrt(_shape(shapes, ("pos_embed", "pos_embed.pos_embed"))[1]),
        "dual_attention_layers": _two_attentions,
    },
    "wan": {
        "_class_name": "WanTransformer3DModel",
        "num_layers": _blocks("blocks."),
        "in_channels": _columns("patch_embedding.weight"),
        "out_channels": _rows("head.head.bias", "head.head.weight", over=4),
        "text_dim": _columns("text_embedding.0.weight"),
        "freq_dim": _columns("time_embedding.0.weight"),
        "ffn_dim": _most("ffn.0.bias", "ffn.0.weight"),
        "attention_head_dim": lambda shapes: _head(shapes, 128),
        "num_attention_heads": lambda shapes: _WAN_WIDTH(shapes) // _head(shapes, 128),
        "image_dim": lambda shapes: _rows("img_emb.proj.0.weight", "img_emb.proj.0.bias")(shapes)
        if _SEES(shapes) else None,
        "added_kv_proj_dim": lambda shapes: _WAN_WIDTH(shapes) if _SEES(shapes) else None,
        "pos_embed_seq_len": lambda shapes: shapes.get("img_emb.emb_pos", (None, None))[1],
    },
    "z-image": {
        "_class_name": "ZImageTransformer2DModel",
        "n_layers": _blocks("layers."),
        "n_refiner_layers": _blocks("noise_refiner."),
        "dim": _Z_WIDTH,
        "in_channels": _z_channels,
        "cap_feat_dim": lambda shapes: shapes.get("cap_embedder.0.weight", shapes["cap_embedder.1.weight"][1:])[0],
        "n_heads": _ratio(_Z_WIDTH, _HEAD),
        "n_kv_heads": _ratio(_Z_WIDTH, _HEAD),
        "axes_dims": _z_axes,
    },
}  # fmt: skip

_LATENTS, _WORDS, _POOLED = (*_IMAGE, "x_embedder.proj.weight", "pos_embed.proj.weight"), _TEXT, (
    "vector_in.in_layer.weight", "time_text_embed.text_embedder.linear_1.weight", "y_embedder.mlp.0.weight"
)  # fmt: skip
# The channels that published models of a family, of these widths (rows of what embeds the latents), take as input: a
# tensor's names, and its columns. FLUX.1: dev, schnell, Kontext; Canny and Depth; Fill. FLUX.2: dev; klein 4B, 9B.
_PUBLISHED: Mapping[str | None, tuple[frozenset[int], tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]]] = {
    "flux": (frozenset({3072}), ((_LATENTS, (64, 128, 384)), (_WORDS, (4096,)), (_POOLED, (768,)))),
    "chroma": (frozenset({3072}), ((_LATENTS, (64,)), (_WORDS, (4096,)))),
    "flux2": (frozenset({6144, 3072, 4096}), ((_LATENTS, (128,)), (_WORDS, (15360, 7680, 12288)))),
    "qwen-image": (frozenset({3072}), ((_LATENTS, (64,)), (_WORDS, (3584,)))),
    "sd3": (frozenset({1536, 2432}), ((_LATENTS, (16,)), (_WORDS, (4096,)), (_POOLED, (2048,)))),
    "z-image": (frozenset({3840}), ((_LATENTS, (64,)), (("cap_embedder.1.weight",), (2560,)))),
}
# What comes out is latents, and what goes in these alone (False) or with others beside them (True).
_WHOLE: Mapping[str | None, bool] = {"flux": True, "chroma": False, "flux2": False}


def strange_widths(family: str | None, shapes: Shapes) -> Iterator[tuple[str, str]]:
    """Yield the name of each embedder of an input that has other columns than any model of the family is known to have,
    and which those have. Nothing else in a file shows how many it should be.

    Args:
        shapes: see `sized`.
    """
    sizes, inputs = _PUBLISHED.get(family, (frozenset(), ()))
    image = next((name for name in _LATENTS if name in shapes), None)
    last = next((shapes[name] for name in _LAST if name in shapes), (0,))[0]
    if image is None or len(shapes[image]) < 2:
        return
    if shapes[image][0] in sizes:
        for names, known in inputs:
            name = next((one for one in names if len(shapes.get(one, ())) > 1), None)
            if name is not None and shapes[name][1] not in known:
                yield name, " or ".join(map(str, known))
    elif family in _WHOLE and last and (shapes[image][1] % last if _WHOLE[family] else shapes[image][1] != last):
        yield image, f"{'a multiple of ' * _WHOLE[family]}the {last} that its last layer gives"
