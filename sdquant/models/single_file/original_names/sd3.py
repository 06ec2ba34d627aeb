"""Stable Diffusion 3 and 3.5, as Stability AI name it."""

from __future__ import annotations

from collections.abc import Iterator

from .rows import OutputTensor, Rows, Shapes, count, of_rows

_SD3: Rows = (
    ("pos_embed", "pos_embed.pos_embed"),
    ("x_embedder.proj.*", "pos_embed.proj.*"),
    ("context_embedder.*", "context_embedder.*"),
    ("t_embedder.mlp.0.*", "time_text_embed.timestep_embedder.linear_1.*"),
    ("t_embedder.mlp.2.*", "time_text_embed.timestep_embedder.linear_2.*"),
    ("y_embedder.mlp.0.*", "time_text_embed.text_embedder.linear_1.*"),
    ("y_embedder.mlp.2.*", "time_text_embed.text_embedder.linear_2.*"),
    ("final_layer.linear.*", "proj_out.*"),
    ("~final_layer.adaLN_modulation.1.*", "norm_out.linear.*"),
)
_SD3_BLOCK: Rows = (
    ("x_block.adaLN_modulation.1.*", "norm1.linear.*"),
    ("x_block.attn.qkv.*", "attn.to_q.*", "attn.to_k.*", "attn.to_v.*"),
    ("x_block.attn.ln_q.weight", "attn.norm_q.weight"),
    ("x_block.attn.ln_k.weight", "attn.norm_k.weight"),
    ("x_block.attn.proj.*", "attn.to_out.0.*"),
    ("x_block.attn2.qkv.*", "attn2.to_q.*", "attn2.to_k.*", "attn2.to_v.*"),
    ("x_block.attn2.ln_q.weight", "attn2.norm_q.weight"),
    ("x_block.attn2.ln_k.weight", "attn2.norm_k.weight"),
    ("x_block.attn2.proj.*", "attn2.to_out.0.*"),
    ("x_block.mlp.fc1.*", "ff.net.0.proj.*"),
    ("x_block.mlp.fc2.*", "ff.net.2.*"),
    ("context_block.adaLN_modulation.1.*", "norm1_context.linear.*"),
    ("context_block.attn.qkv.*", "attn.add_q_proj.*", "attn.add_k_proj.*", "attn.add_v_proj.*"),
    ("context_block.attn.ln_q.weight", "attn.norm_added_q.weight"),
    ("context_block.attn.ln_k.weight", "attn.norm_added_k.weight"),
    ("context_block.attn.proj.*", "attn.to_add_out.*"),
    ("context_block.mlp.fc1.*", "ff_context.net.0.proj.*"),
    ("context_block.mlp.fc2.*", "ff_context.net.2.*"),
)


def sd3(shapes: Shapes) -> Iterator[OutputTensor]:
    yield from of_rows(shapes, _SD3, "", "")
    blocks = count(shapes, "transformer_blocks.")
    for i in range(blocks):
        for row in of_rows(shapes, _SD3_BLOCK, f"joint_blocks.{i}.", f"transformer_blocks.{i}."):
            # The text's stream ends at the last block, in a norm like the final layer's.
            ends = i == blocks - 1 and ".context_block.adaLN_modulation." in row.name
            yield OutputTensor(row.name, row.sources, swapped=ends)
