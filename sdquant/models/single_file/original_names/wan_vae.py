"""The VAEs of Wan 2.1 and 2.2, as Alibaba name them."""

from __future__ import annotations

from collections.abc import Iterator

from .rows import OutputTensor, Rows, Shapes, count, of_rows

_ENDS: Rows = (
    ("conv1.*", "quant_conv.*"),
    ("conv2.*", "post_quant_conv.*"),
    *(
        (f"{side}.{theirs}", f"{side}.{ours}")
        for side in ("encoder", "decoder")
        for theirs, ours in (
            ("conv1.*", "conv_in.*"),
            ("middle.1.norm.gamma", "mid_block.attentions.0.norm.gamma"),
            ("middle.1.to_qkv.*", "mid_block.attentions.0.to_qkv.*"),
            ("middle.1.proj.*", "mid_block.attentions.0.proj.*"),
            ("head.0.gamma", "norm_out.gamma"),
            ("head.2.*", "conv_out.*"),
        )
    ),
)
_RESNET: Rows = (
    ("residual.0.gamma", "norm1.gamma"),
    ("residual.2.*", "conv1.*"),
    ("residual.3.gamma", "norm2.gamma"),
    ("residual.6.*", "conv2.*"),
    ("shortcut.*", "conv_shortcut.*"),
)
_RESAMPLE: Rows = (("resample.1.*", "resample.1.*"), ("time_conv.*", "time_conv.*"))


def wan_vae(shapes: Shapes) -> Iterator[OutputTensor]:
    yield from of_rows(shapes, _ENDS, "", "")
    for side in ("encoder", "decoder"):
        for i in range(2):  # the attention is between them
            yield from of_rows(shapes, _RESNET, f"{side}.middle.{2 * i}.", f"{side}.mid_block.resnets.{i}.")
    blocks = _blocks_2_2 if "encoder.down_blocks.0.resnets.0.conv1.weight" in shapes else _blocks_2_1
    for theirs, ours in blocks(shapes):
        yield from of_rows(shapes, _RESNET + _RESAMPLE, f"{theirs}.", f"{ours}.")


def _blocks_2_1(shapes: Shapes) -> Iterator[tuple[str, str]]:
    """Yield (original, diffusers') prefixes of layers: one list on either side, but blocks in diffusers' decoder."""
    for i in range(count(shapes, "encoder.down_blocks.")):
        yield f"encoder.downsamples.{i}", f"encoder.down_blocks.{i}"
    at = 0
    for i in range(count(shapes, "decoder.up_blocks.")):
        for resnet in range(count(shapes, f"decoder.up_blocks.{i}.resnets.")):
            yield f"decoder.upsamples.{at}", f"decoder.up_blocks.{i}.resnets.{resnet}"
            at += 1
        yield f"decoder.upsamples.{at}", f"decoder.up_blocks.{i}.upsamplers.0"
        at += 1


def _blocks_2_2(shapes: Shapes) -> Iterator[tuple[str, str]]:
    """Yield (original, diffusers') prefixes of layers: a list of blocks on either side, each a list of layers."""
    for side, word, theirs in (("encoder", "down", "downsamples"), ("decoder", "up", "upsamples")):
        for i in range(count(shapes, f"{side}.{word}_blocks.")):
            block = f"{side}.{word}_blocks.{i}."
            resnets = count(shapes, f"{block}resnets.")
            for resnet in range(resnets):
                yield f"{side}.{theirs}.{i}.{theirs}.{resnet}", f"{block}resnets.{resnet}"
            yield f"{side}.{theirs}.{i}.{theirs}.{resnets}", f"{block}{word}sampler"
