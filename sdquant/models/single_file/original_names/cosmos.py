"""Cosmos, as NVIDIA name it: 1.0, and from Predict2 on."""

from __future__ import annotations

from collections.abc import Iterator

from .rows import OutputTensor, Rows, Rules, Shapes, count, of_rows, renamed

_COSMOS_1: Rows = (
    ("x_embedder.proj.1.*", "patch_embed.proj.*"),
    ("extra_pos_embedder.pos_emb_t", "learnable_pos_embed.pos_emb_t"),
    ("extra_pos_embedder.pos_emb_h", "learnable_pos_embed.pos_emb_h"),
    ("extra_pos_embedder.pos_emb_w", "learnable_pos_embed.pos_emb_w"),
    ("t_embedder.1.linear_1.*", "time_embed.t_embedder.linear_1.*"),
    ("t_embedder.1.linear_2.*", "time_embed.t_embedder.linear_2.*"),
    ("affline_norm.*", "time_embed.norm.*"),  # so spelled there
    ("final_layer.adaLN_modulation.1.*", "norm_out.linear_1.*"),
    ("final_layer.adaLN_modulation.2.*", "norm_out.linear_2.*"),
    ("final_layer.linear.*", "proj_out.*"),
)
_COSMOS_1_BLOCK: Rows = (
    *(
        (f"{i}.{theirs}.*", f"{ours}.*")
        for i in range(3)
        for theirs, ours in (
            ("adaLN_modulation.1", f"norm{i + 1}.linear_1"),
            ("adaLN_modulation.2", f"norm{i + 1}.linear_2"),
        )
    ),
    *(
        (f"{i}.block.attn.{theirs}.*", f"attn{i + 1}.{ours}.*")
        for i in range(2)
        for theirs, ours in (
            ("to_q.0", "to_q"),
            ("to_q.1", "norm_q"),
            ("to_k.0", "to_k"),
            ("to_k.1", "norm_k"),
            ("to_v.0", "to_v"),
            ("to_out.0", "to_out.0"),
        )
    ),
    ("2.block.layer1.*", "ff.net.0.proj.*"),
    ("2.block.layer2.*", "ff.net.2.*"),
)
_COSMOS_2: Rules = (
    ("^patch_embed.proj", "x_embedder.proj.1"),
    ("^time_embed.t_embedder", "t_embedder.1"),
    ("^time_embed.norm", "t_embedding_norm"),
    ("^norm_out.linear_1", "final_layer.adaln_modulation.1"),
    ("^norm_out.linear_2", "final_layer.adaln_modulation.2"),
    ("^proj_out", "final_layer.linear"),
    ("^transformer_blocks", "blocks"),
    ("norm1.linear_1", "adaln_modulation_self_attn.1"),
    ("norm1.linear_2", "adaln_modulation_self_attn.2"),
    ("norm2.linear_1", "adaln_modulation_cross_attn.1"),
    ("norm2.linear_2", "adaln_modulation_cross_attn.2"),
    ("norm3.linear_1", "adaln_modulation_mlp.1"),
    ("norm3.linear_2", "adaln_modulation_mlp.2"),
    ("attn1", "self_attn"),
    ("attn2", "cross_attn"),
    ("to_q", "q_proj"),
    ("to_k", "k_proj"),
    ("to_v", "v_proj"),
    ("to_out.0", "output_proj"),
    ("norm_q", "q_norm"),
    ("norm_k", "k_norm"),
    ("ff.net.0.proj", "mlp.layer1"),
    ("ff.net.2", "mlp.layer2"),
)


def cosmos(shapes: Shapes) -> Iterator[OutputTensor]:
    """Yield the names of Cosmos; 1.0 is detected by its learned positions, which later versions lack."""
    if not any(name.startswith("learnable_pos_embed.") for name in shapes):
        yield from renamed(shapes, _COSMOS_2)
        return
    yield from of_rows(shapes, _COSMOS_1, "", "")
    for i in range(count(shapes, "transformer_blocks.")):
        yield from of_rows(shapes, _COSMOS_1_BLOCK, f"blocks.block{i}.blocks.", f"transformer_blocks.{i}.")
