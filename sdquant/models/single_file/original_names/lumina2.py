"""Lumina-Image 2.0, as Alpha-VLLM name it."""

from __future__ import annotations

from collections.abc import Iterator

from .rows import OutputTensor, Rows, Shapes, of_blocks, of_rows

_LUMINA2: Rows = (
    ("x_embedder.*", "x_embedder.*"),
    ("t_embedder.mlp.0.*", "time_caption_embed.timestep_embedder.linear_1.*"),
    ("t_embedder.mlp.2.*", "time_caption_embed.timestep_embedder.linear_2.*"),
    ("cap_embedder.0.*", "time_caption_embed.caption_embedder.0.*"),
    ("cap_embedder.1.*", "time_caption_embed.caption_embedder.1.*"),
    ("final_layer.adaLN_modulation.1.*", "norm_out.linear_1.*"),
    ("final_layer.linear.*", "norm_out.linear_2.*"),
)
_PLAIN: Rows = (
    ("attention.qkv.*", "attn.to_q.*", "attn.to_k.*", "attn.to_v.*"),
    ("attention.out.*", "attn.to_out.0.*"),
    ("attention.q_norm.*", "attn.norm_q.*"),
    ("attention.k_norm.*", "attn.norm_k.*"),
    *((f"feed_forward.w{i}.*", f"feed_forward.linear_{i}.*") for i in (1, 2, 3)),
    ("attention_norm2.*", "norm2.*"),
    ("ffn_norm1.*", "ffn_norm1.*"),
    ("ffn_norm2.*", "ffn_norm2.*"),
)
_MODULATED: Rows = (*_PLAIN, ("adaLN_modulation.1.*", "norm1.linear.*"), ("attention_norm1.*", "norm1.norm.*"))


def lumina2(shapes: Shapes) -> Iterator[OutputTensor]:
    yield from of_rows(shapes, _LUMINA2, "", "")
    for name in ("noise_refiner", "layers"):
        yield from of_blocks(shapes, _MODULATED, name, name)
    yield from of_blocks(shapes, (*_PLAIN, ("attention_norm1.*", "norm1.*")), "context_refiner", "context_refiner")
