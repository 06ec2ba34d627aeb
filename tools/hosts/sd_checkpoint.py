"""The shipped model digits-sd as one file with the names of the original Stable Diffusion, which most web UIs read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

HEADS, GROUPS = 4, 8  # of its attention, and of its group norms: no tensor of the file shows them
SCALE = 1.2954240777914652  # of its latents
_LEVELS, _VAE_LEVELS = 2, 3  # one residual block each, and in the decoder two
_RESIDUAL = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "norm2": "out_layers.0", "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1", "conv_shortcut": "skip_connection",
}  # fmt: skip
_UNET = {
    "conv_in": "input_blocks.0.0", "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "conv_norm_out": "out.0", "conv_out": "out.2", "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.0": "middle_block.0", "mid_block.resnets.1": "middle_block.2",
}  # fmt: skip
for _level in range(_LEVELS):
    _down, _up = 1 + 2 * _level, 2 * _level
    _UNET |= {
        f"down_blocks.{_level}.resnets.0": f"input_blocks.{_down}.0",
        f"down_blocks.{_level}.attentions.0": f"input_blocks.{_down}.1",
        f"down_blocks.{_level}.downsamplers.0.conv": f"input_blocks.{_down + 1}.0.op",
        f"up_blocks.{_level}.upsamplers.0.conv": f"output_blocks.{_up + 1}.2.conv",
    }
    _UNET |= {f"up_blocks.{_level}.resnets.{block}": f"output_blocks.{_up + block}.0" for block in (0, 1)}
    _UNET |= {f"up_blocks.{_level}.attentions.{block}": f"output_blocks.{_up + block}.1" for block in (0, 1)}


def write(path: Path) -> None:
    """Write the checkpoint, in bfloat16 as it is shipped."""
    from safetensors.torch import save_file

    save_file(tensors(), path)


def tensors() -> dict[str, Tensor]:
    """The checkpoint's tensors."""
    found = {f"model.diffusion_model.{_unet_name(key)}": value for key, value in _of("unet")}
    found |= {f"cond_stage_model.transformer.{_text_name(key)}": value for key, value in _of("text_encoder")}
    vae = {_vae_name(key): value for key, value in _of("vae")}
    for part in ("encoder", "decoder"):  # which has no attention: one that adds nothing
        like = vae[f"{part}.mid.block_1.conv2.bias"]
        size = like.shape[0]
        vae |= {f"{part}.mid.attn_1.norm.{leaf}": like.new_zeros(size) for leaf in ("weight", "bias")}
        for layer in ("q", "k", "v", "proj_out"):
            vae[f"{part}.mid.attn_1.{layer}.weight"] = like.new_zeros(size, size, 1, 1)
            vae[f"{part}.mid.attn_1.{layer}.bias"] = like.new_zeros(size)
    return found | {f"first_stage_model.{key}": value for key, value in vae.items()}


def latents(base: type) -> type:
    """Return a web UI's class of latents, with the scale of digits-sd."""

    def made(self: Any) -> None:
        base.__init__(self)  # type: ignore[misc]
        self.scale_factor = SCALE

    return type("Latents", (base,), {"__init__": made})


def _of(part: str) -> Iterator[tuple[str, Tensor]]:
    from safetensors.torch import load_file

    from sdquant import demo

    (file,) = (Path(demo.path("digits-sd")) / part).glob("*.safetensors")
    yield from load_file(file).items()


def _unet_name(key: str) -> str:
    theirs = next(name for name in _UNET if key.startswith(f"{name}."))
    rest = key.removeprefix(theirs)
    if ".resnets." in theirs:
        leaf = rest.split(".")[1]
        rest = rest.replace(leaf, _RESIDUAL[leaf])
    return _UNET[theirs] + rest


def _text_name(key: str) -> str:
    return key if key.startswith("text_model.") else f"text_model.{key}"


def _vae_name(key: str) -> str:
    key = re.sub(r"up_blocks\.(\d)", lambda found: f"up.{_VAE_LEVELS - 1 - int(found[1])}", key)
    key = re.sub(r"mid_block\.resnets\.(\d)", lambda found: f"mid.block_{int(found[1]) + 1}", key)
    for theirs, ours in (
        ("down_blocks.", "down."), (".resnets.", ".block."), ("downsamplers.0", "downsample"),
        ("upsamplers.0", "upsample"), ("conv_norm_out", "norm_out"), ("conv_shortcut", "nin_shortcut"),
    ):  # fmt: skip
        key = key.replace(theirs, ours)
    return key
