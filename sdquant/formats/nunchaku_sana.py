"""SANA's layers in Nunchaku's files: which of their rows are which layer's in diffusers.

Its kernels take whole tiles of 128 inputs and outputs, so layers are padded. Keys and values lie in turns, by head, and
so do the halves of the gated feed-forward layer, channel by channel. Its runtime has no bias in some layers, and the
file perhaps one of zeros. Read off nunchaku's SanaModel.cpp, `EpilogueLiteLA` and `load_act_to_fpsum`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..core import TensorInfo

Picks = tuple[tuple[int, int, int, int], ...]  # see `backends._nunchaku_find.PICKS`
LAYER = re.compile(r"(transformer_blocks\.\d+\.)(attn|cross_attn|ff)\.(\w+)\.(weight|bias)")
DEPTH = "ff.depth_conv"  # a convolution over each channel, in floats, [channels, height, width, 1]
_TILE, _HEAD = 128, 32
_RATIO = 2.5  # of the class, where a config does not say it
_SIGN = ("transformer_blocks.0.attn.qkv_proj.weight", "transformer_blocks.0.ff.inverted_conv.weight")
_TABLE = "transformer_blocks.0.scale_shift_table"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A layer of diffusers' in one of the file's.

    Attributes:
        layer: its name in a block. picks: its rows. shape: of its weight. has_bias: whether it has one in diffusers.
    """

    layer: str
    picks: Picks
    shape: tuple[int, ...]
    has_bias: bool = True


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A layer of the file: its rows with padding, and what they are."""

    rows: int
    parts: tuple[Part, ...]


def layers(tensors: Mapping[str, TensorInfo], names: frozenset[str], config: Mapping[str, Any]) -> Mapping[str, Stored]:
    """Return the quantized layers of a block by their name in it; {} if the file is not of SANA.

    Args:
        names: of the tensors and quantized weights.
    """
    if not names.issuperset((*_SIGN, _TABLE)) or not tensors[_TABLE].shape:
        return {}
    ratio = config.get("mlp_ratio", _RATIO)
    width = tensors[_TABLE].shape[-1]
    hidden = int(ratio * width) if isinstance(ratio, int | float) and 0 < ratio < _TILE else 0
    padded = _whole(width, _TILE)
    whole, pairs = ((0, width, width, 1),), ((0, 1, 2, hidden), (1, 1, 2, hidden))
    # Of each head the keys, then the values.
    keys, values = ((at, _HEAD, 2 * _HEAD, width // _HEAD) for at in (padded, padded + _HEAD))
    square = (width, width)
    return {
        "attn.qkv_proj": Stored(rows=3 * padded, parts=(
            Part(layer="attn1.to_q", picks=whole, shape=square, has_bias=False),
            Part(layer="attn1.to_k", picks=(keys,), shape=square, has_bias=False),
            Part(layer="attn1.to_v", picks=(values,), shape=square, has_bias=False),
        )),
        "attn.out_proj": Stored(rows=padded, parts=(Part(layer="attn1.to_out.0", picks=whole, shape=square),)),
        "attn.pag_to_v": Stored(rows=padded, parts=()),  # the values once more, for perturbed attention
        "cross_attn.q_linear": Stored(rows=padded, parts=(Part(layer="attn2.to_q", picks=whole, shape=square),)),
        "cross_attn.out_proj": Stored(rows=padded, parts=(Part(layer="attn2.to_out.0", picks=whole, shape=square),)),
        "ff.inverted_conv": Stored(rows=_whole(2 * _whole(hidden, 64), _TILE), parts=(
            Part(layer="ff.conv_inverted", picks=pairs, shape=(2 * hidden, width, 1, 1)),
        )),
        "ff.point_conv": Stored(rows=padded, parts=(
            Part(layer="ff.conv_point", picks=whole, shape=(width, hidden, 1, 1), has_bias=False),
        )),
    }  # fmt: skip


def _whole(size: int, unit: int) -> int:
    return -(-size // unit) * unit
