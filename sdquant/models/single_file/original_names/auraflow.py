"""AuraFlow, as fal names it."""

from __future__ import annotations

from collections.abc import Iterator

from .rows import OutputTensor, Rows, Shapes, of_blocks, of_rows

_AURA: Rows = (
    ("register_tokens", "register_tokens"),
    ("positional_encoding", "pos_embed.pos_embed"),
    ("init_x_linear.*", "pos_embed.proj.*"),
    ("t_embedder.mlp.0.*", "time_step_proj.linear_1.*"),
    ("t_embedder.mlp.2.*", "time_step_proj.linear_2.*"),
    ("cond_seq_linear.*", "context_embedder.*"),
    ("~modF.1.*", "norm_out.linear.*"),
    ("final_linear.*", "proj_out.*"),
)
_MLP = (("c_fc1", "linear_1"), ("c_fc2", "linear_2"), ("c_proj", "out_projection"))
_DOUBLE: Rows = (
    *((f"attn.w2{part}.*", f"attn.to_{part}.*") for part in "qkv"),
    *((f"attn.w1{part}.*", f"attn.add_{part}_proj.*") for part in "qkv"),
    ("attn.w2o.*", "attn.to_out.0.*"),
    ("attn.w1o.*", "attn.to_add_out.*"),
    ("modX.1.*", "norm1.linear.*"),
    ("modC.1.*", "norm1_context.linear.*"),
    *((f"mlpX.{theirs}.*", f"ff.{ours}.*") for theirs, ours in _MLP),
    *((f"mlpC.{theirs}.*", f"ff_context.{ours}.*") for theirs, ours in _MLP),
)
_SINGLE: Rows = (
    *((f"attn.w1{part}.*", f"attn.to_{part}.*") for part in "qkv"),
    ("attn.w1o.*", "attn.to_out.0.*"),
    ("modCX.1.*", "norm1.linear.*"),
    *((f"mlp.{theirs}.*", f"ff.{ours}.*") for theirs, ours in _MLP),
)


def auraflow(shapes: Shapes) -> Iterator[OutputTensor]:
    yield from of_rows(shapes, _AURA, "", "")
    yield from of_blocks(shapes, _DOUBLE, "double_layers", "joint_transformer_blocks")
    yield from of_blocks(shapes, _SINGLE, "single_layers", "single_transformer_blocks")
