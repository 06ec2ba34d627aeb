"""The deep compression autoencoder of Sana (DC-AE), as MIT name it: its linear layers are convolutions of one pixel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from .rows import OutputTensor, Rows, Shapes, of_rows, shape_of

_ENDS: Rows = (
    ("encoder.project_in.conv.*", "encoder.conv_in.*"),
    ("encoder.project_in.conv.conv.*", "encoder.conv_in.conv.*"),
    ("encoder.project_out.main.op_list.0.conv.*", "encoder.conv_out.*"),
    ("decoder.project_in.main.conv.*", "decoder.conv_in.*"),
    ("decoder.project_out.op_list.0.*", "decoder.norm_out.*"),
    ("decoder.project_out.op_list.2.conv.*", "decoder.conv_out.*"),
    ("decoder.project_out.op_list.2.conv.conv.*", "decoder.conv_out.conv.*"),
)
_LAYER: Rows = (
    ("main.conv.conv.*", "conv.*"),  # down or up
    ("main.conv1.conv.*", "conv1.*"),
    ("main.conv2.conv.*", "conv2.*"),
    ("main.conv2.norm.*", "norm.*"),
    ("context_module.main.aggreg.0.0.*", "attn.to_qkv_multiscale.0.proj_in.*"),
    ("context_module.main.aggreg.0.1.*", "attn.to_qkv_multiscale.0.proj_out.*"),
    ("context_module.main.proj.norm.*", "attn.norm_out.*"),
    ("local_module.main.inverted_conv.conv.*", "conv_out.conv_inverted.*"),
    ("local_module.main.depth_conv.conv.*", "conv_out.conv_depth.*"),
    ("local_module.main.point_conv.conv.*", "conv_out.conv_point.*"),
    ("local_module.main.point_conv.norm.*", "conv_out.norm.*"),
)
_LINEAR: Rows = (
    ("context_module.main.qkv.conv.*", "attn.to_q.*", "attn.to_k.*", "attn.to_v.*"),
    ("context_module.main.proj.conv.*", "attn.to_out.*"),
)
_PLACE = re.compile(r"((en|de)coder)\.(?:down|up)_blocks\.(\d+)\.(\d+)\.")


def dc_ae(shapes: Shapes) -> Iterator[OutputTensor]:
    yield from of_rows(shapes, _ENDS, "", "")
    places = dict.fromkeys(match.groups() for name in shapes if (match := _PLACE.match(name)))
    for side, short, block, layer in places:
        theirs = f"{side}.stages.{block}.op_list.{layer}."
        ours = f"{side}.{'down' if short == 'en' else 'up'}_blocks.{block}.{layer}."
        yield from of_rows(shapes, _LAYER, theirs, ours)
        for row in of_rows(shapes, _LINEAR, theirs, ours):
            yield replace(row, shape=(*shape_of(row, shapes), 1, 1))
