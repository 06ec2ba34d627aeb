"""The VAEs of LTX-Video and LTX-2, as Lightricks name them. Without the "vae." that they have in a checkpoint.

All that follows one another is one list there: the layers of a block, what changes the size, what changes the width.
diffusers has blocks with these inside, which the versions have in other numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from .rows import OutputTensor, Rules, Shapes, count, renamed

_STATISTICS: Rules = (
    ("^latents_mean", "per_channel_statistics.mean-of-means"),
    ("^latents_std", "per_channel_statistics.std-of-means"),
)
_WORDS: Rules = (
    ("resnets", "res_blocks"),
    ("^decoder.time_embedder", "decoder.last_time_embedder"),
    ("^decoder.scale_shift_table", "decoder.last_scale_shift_table"),
)
# Layers that change the width, which LTX-2 does not have.
_CHANGES: Rules = (("conv_shortcut.conv", "conv_shortcut"), ("norm3", "norm3.norm"))


def ltx_vae(shapes: Shapes) -> Iterator[OutputTensor]:
    yield from _in_lists(shapes, _CHANGES)


def ltx2_vae(shapes: Shapes) -> Iterator[OutputTensor]:
    yield from _in_lists(shapes, ())


def ltx2_audio_vae(shapes: Shapes) -> Iterator[OutputTensor]:
    yield from renamed(shapes, _STATISTICS)


def _in_lists(shapes: Shapes, rules: Rules) -> Iterator[OutputTensor]:
    places = _places(shapes)
    for row in renamed(shapes, (*_STATISTICS, *rules)):
        begin = next((ours for ours in places if row.name.startswith(f"{ours}.")), None)
        name = row.name if begin is None else places[begin] + row.name.removeprefix(begin)
        yield from (OutputTensor(one.name, row.sources) for one in renamed({name: ()}, _WORDS))


def _places(shapes: Shapes) -> dict[str, str]:
    """Map each part of a block to its position in the authors' list; longer names come before their blocks'."""
    parts: list[tuple[str, str]] = []
    at = 0
    for i in range(count(shapes, "encoder.down_blocks.")):
        block = f"encoder.down_blocks.{i}"
        for part in ("", ".downsamplers.0", ".conv_out"):
            if any(name.startswith(f"{block}{part}.") for name in shapes):
                parts.append((f"{block}{part}", f"encoder.down_blocks.{at}"))
                at += 1
    parts.append(("encoder.mid_block", f"encoder.down_blocks.{at}"))
    parts.append(("decoder.mid_block", "decoder.up_blocks.0"))
    at = 1
    for i in range(count(shapes, "decoder.up_blocks.")):
        block = f"decoder.up_blocks.{i}"
        for part in (".conv_in", ".upsamplers.0", ""):
            if any(name.startswith(f"{block}{part}.") for name in shapes):
                parts.append((f"{block}{part}", f"decoder.up_blocks.{at}"))
                at += 1
    return dict(sorted(parts, key=lambda part: -len(part[0])))
