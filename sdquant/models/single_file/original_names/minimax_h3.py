"""MiniMax-H3, as its single files name it: q, k and v one after the other, as in no file of several parts."""

from __future__ import annotations

from collections.abc import Iterator

from .rows import OutputTensor, Rows, Shapes, count, of_rows

_MINIMAX: Rows = (
    ("video_patch_proj.*", "proj_in.*"),
    ("audio_patch_proj.*", "audio_proj_in.*"),
    ("condition_proj.*", "context_embedder.*"),
    ("time_embedder.proj_in.*", "time_embedder.linear_1.*"),
    ("time_embedder.proj_out.*", "time_embedder.linear_2.*"),
    ("token_refiner.final_norm.*", "token_refiner.final_norm.*"),
    ("final_layer.norm.*", "norm_out.norm.*"),
    ("final_layer.adaln_proj.linear.*", "norm_out.linear.*"),
    ("final_layer.video_out.*", "proj_out.*"),
    ("final_layer.audio_out.*", "audio_proj_out.*"),
)
_BLOCK: Rows = (
    ("norm1.*", "norm1.*"),
    ("attn.qkv_proj.*", "attn.to_q.*", "attn.to_k.*", "attn.to_v.*"),
    ("attn.q_norm.*", "attn.norm_q.*"),
    ("attn.k_norm.*", "attn.norm_k.*"),
    ("attn.out_proj.*", "attn.to_out.0.*"),
    ("norm2.*", "norm2.*"),
    ("~mlp.fc1.*", "ff.net.0.proj.*"),  # the gate comes first there, and last here
    ("mlp.fc2.*", "ff.net.2.*"),
    ("adaln_proj.linear.*", "adaln_proj.linear.*"),
)


def minimax_h3(shapes: Shapes) -> Iterator[OutputTensor]:
    yield from of_rows(shapes, _MINIMAX, "", "")
    for i in range(count(shapes, "token_refiner.refiner_blocks.")):
        yield from of_rows(shapes, _BLOCK, f"token_refiner.blocks.{i}.", f"token_refiner.refiner_blocks.{i}.")
    for i in range(count(shapes, "transformer_blocks.")):
        yield from of_rows(shapes, _BLOCK, f"blocks.{i}.", f"transformer_blocks.{i}.")
