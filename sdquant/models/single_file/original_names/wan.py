"""Wan 2.1 and 2.2, and what was made of them, as Alibaba name them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .rows import OutputTensor, Rows, Shapes, count, of_rows

_WAN: Rows = (
    ("patch_embedding.*", "patch_embedding.*"),
    ("text_embedding.0.*", "condition_embedder.text_embedder.linear_1.*"),
    ("text_embedding.2.*", "condition_embedder.text_embedder.linear_2.*"),
    ("time_embedding.0.*", "condition_embedder.time_embedder.linear_1.*"),
    ("time_embedding.2.*", "condition_embedder.time_embedder.linear_2.*"),
    ("time_projection.1.*", "condition_embedder.time_proj.*"),
    ("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed"),
    ("img_emb.proj.0.*", "condition_embedder.image_embedder.norm1.*"),
    ("img_emb.proj.1.*", "condition_embedder.image_embedder.ff.net.0.proj.*"),
    ("img_emb.proj.3.*", "condition_embedder.image_embedder.ff.net.2.*"),
    ("img_emb.proj.4.*", "condition_embedder.image_embedder.norm2.*"),
    ("head.modulation", "scale_shift_table"),
    ("head.head.*", "proj_out.*"),
    # SkyReels V2, which is told the number of frames in a second.
    ("fps_embedding.*", "fps_embedding.*"),
    ("fps_projection.0.*", "fps_projection.net.0.proj.*"),
    ("fps_projection.2.*", "fps_projection.net.2.*"),
    ("vace_patch_embedding.*", "vace_patch_embedding.*"),
    ("pose_patch_embedding.*", "pose_patch_embedding.*"),
)
_ATTENTION: Rows = (
    ("q.*", "to_q.*"), ("k.*", "to_k.*"), ("v.*", "to_v.*"), ("o.*", "to_out.0.*"),
    ("norm_q.*", "norm_q.*"), ("norm_k.*", "norm_k.*"),
    ("k_img.*", "add_k_proj.*"), ("v_img.*", "add_v_proj.*"), ("norm_k_img.*", "norm_added_k.*"),
)  # fmt: skip
_BLOCK: Rows = (
    ("modulation", "scale_shift_table"),
    ("norm3.*", "norm2.*"),
    ("ffn.0.*", "ffn.net.0.proj.*"),
    ("ffn.2.*", "ffn.net.2.*"),
    ("before_proj.*", "proj_in.*"),  # of VACE's blocks, as the next
    ("after_proj.*", "proj_out.*"),
)
_FACE: Rows = (
    ("face_encoder.padding_tokens", "face_encoder.padding_tokens"),
    ("face_encoder.conv1_local.conv.*", "face_encoder.conv1_local.*"),
    ("face_encoder.conv2.conv.*", "face_encoder.conv2.*"),
    ("face_encoder.conv3.conv.*", "face_encoder.conv3.*"),
    ("face_encoder.out_proj.*", "face_encoder.out_proj.*"),
)
_FACE_BLOCK: Rows = (
    ("linear1_q.*", "to_q.*"),
    ("linear1_kv.*", "to_k.*", "to_v.*"),
    ("linear2.*", "to_out.*"),
    ("q_norm.*", "norm_q.*"),
    ("k_norm.*", "norm_k.*"),
)
_MOTION = "motion_encoder.enc.net_app.convs."
_MOTION_BLOCK: Rows = (
    ("conv1.0.weight", "conv1.weight"),
    ("conv1.1.bias", "conv1.act_fn.bias"),
    ("conv2.1.weight", "conv2.weight"),
    ("conv2.2.bias", "conv2.act_fn.bias"),
    ("skip.1.weight", "conv_skip.weight"),
)


def wan(shapes: Shapes) -> Iterator[OutputTensor]:
    """Yield the names of Wan, VACE, SkyReels V2 and ChronoEdit."""
    yield from of_rows(shapes, _WAN, "", "")
    for blocks in ("blocks.", "vace_blocks."):
        for i in range(count(shapes, blocks)):
            block = f"{blocks}{i}."
            yield from of_rows(shapes, _BLOCK, block, block)
            yield from of_rows(shapes, _ATTENTION, f"{block}self_attn.", f"{block}attn1.")
            yield from of_rows(shapes, _ATTENTION, f"{block}cross_attn.", f"{block}attn2.")


def wan_animate(shapes: Shapes) -> Iterator[OutputTensor]:
    yield from wan(shapes)
    yield from of_rows(shapes, _FACE, "", "")
    for i in range(count(shapes, "face_adapter.")):
        yield from of_rows(shapes, _FACE_BLOCK, f"face_adapter.fuser_blocks.{i}.", f"face_adapter.{i}.")
    for row in _motion(shapes):
        # Biases of images have two more dimensions there.
        first = shapes[row.sources[0]]
        image = row.name.startswith(_MOTION) and row.name.endswith(".bias")
        yield OutputTensor(row.name, row.sources, shape=(1, math.prod(first), 1, 1) if image else None)


def _motion(shapes: Shapes) -> Iterator[OutputTensor]:
    blocks = count(shapes, "motion_encoder.res_blocks.")
    rows: Rows = (
        ("motion_encoder.dec.direction.weight", "motion_encoder.motion_synthesis_weight"),
        (f"{_MOTION}0.0.weight", "motion_encoder.conv_in.weight"),
        (f"{_MOTION}0.1.bias", "motion_encoder.conv_in.act_fn.bias"),
        (f"{_MOTION}{blocks + 1}.weight", "motion_encoder.conv_out.weight"),
    )
    yield from of_rows(shapes, rows, "", "")
    for i in range(blocks):
        yield from of_rows(shapes, _MOTION_BLOCK, f"{_MOTION}{i + 1}.", f"motion_encoder.res_blocks.{i}.")
    for name in shapes:
        if name.startswith("motion_encoder.motion_network."):
            yield OutputTensor(name.replace("motion_network", "enc.fc"), (name,))


def wan_animate_2(shapes: Shapes) -> Iterator[OutputTensor]:
    """Yield the names of Wan Animate 2, whose blocks are in modules of their own; the rest is named as in diffusers."""
    for name in shapes:
        top, number, *path = name.split(".")
        if top != "blocks":
            yield OutputTensor(name, (name,))
        elif path[0] not in ("self_attn", "cross_attn"):
            yield OutputTensor(".".join((top, number, "block", *path)), (name,))
    for i in range(count(shapes, "blocks.")):
        for attention in ("self_attn.", "cross_attn."):
            yield from of_rows(shapes, _ATTENTION, f"blocks.{i}.block.{attention}", f"blocks.{i}.{attention}")
