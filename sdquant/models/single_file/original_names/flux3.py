"""FLUX.3, as Black Forest Labs name it."""

from __future__ import annotations

from collections.abc import Iterator

from .rows import OutputTensor, Rows, Shapes, of_blocks, of_rows

_MODES = ("image", "image_cond")
_FLUX3: Rows = (
    *((f"emb_in.{mode}.*", f"x_embedders.{mode}.*") for mode in _MODES),
    ("txt_in.*", "context_embedder.*"),
    ("time_in.in_layer.*", "timestep_embedder.linear_1.*"),
    ("time_in.out_layer.*", "timestep_embedder.linear_2.*"),
    ("ref_time_in.in_layer.*", "target_timestep_embedder.linear_1.*"),
    ("ref_time_in.out_layer.*", "target_timestep_embedder.linear_2.*"),
    *(
        (f"{stream}_stream_modulations.{mode}.lin.*", f"{stream}_stream_modulations.{mode}.linear.*")
        for stream in ("early", "single")
        for mode in (*_MODES, "txt")
    ),
    ("final_layer.image.linear.*", "proj_out.*"),
    ("~final_layer.image.adaLN_modulation.1.*", "norm_out.linear.*"),
)
_BLOCK: Rows = (
    ("q_proj.*", "attn.to_q.*"),
    ("k_proj.*", "attn.to_k.*"),
    ("v_proj.*", "attn.to_v.*"),
    ("attn_out.*", "attn.to_out.0.*"),
    ("norm.query_norm.scale", "attn.norm_q.weight"),
    ("norm.key_norm.scale", "attn.norm_k.weight"),
    ("mlp_in.*", "ff.linear_in.*"),
    ("mlp_out.*", "ff.linear_out.*"),
)


def flux3(shapes: Shapes) -> Iterator[OutputTensor]:
    yield from of_rows(shapes, _FLUX3, "", "")
    for mode in _MODES:
        yield from of_blocks(shapes, _BLOCK, f"content_mode_blocks.{mode}", f"mode_blocks.{mode}")
    yield from of_blocks(shapes, _BLOCK, "txt_mode_blocks", "txt_mode_blocks")
    yield from of_blocks(shapes, _BLOCK, "single_blocks", "single_transformer_blocks")
