"""The metadata for which ComfyUI's own loader refuses a file with weights that it does not read.

It takes codes in a shape of floats for floats, and leaves out what it has no name for: noise, without an error. So the
file says in ComfyUI's own metadata (`convert_old_quants` of `comfy/utils.py`, 0.33.0) what sdquant, which goes by what
its own metadata says, does not look at:

* where ComfyUI has the same names: its layers are in a format that ComfyUI does not have. `_load_quantized_module` of
  `comfy/ops.py` looks it up, and shows the name of the format as its error.
* where ComfyUI gives diffusers' names new ones (`convert_diffusers_mmdit` of `comfy/model_detection.py`), what is said
  of layers is lost, and so are the scales that its own formats have. There are layers in an inner model, which then is
  the only one that `unet_prefix_from_state_dict` looks at: "Could not detect model type of", with the file's name.
* in a text encoder: `load_clip` of `comfy/sd.py` knows each kind by a tensor `weight`, and takes all others for a
  CLIP-L without weights. So a sentence is there in place of the table of layers, without which it loads none:
  "'str' object has no attribute 'items'".

Versions that know no quantized layers (0.3.64) look at neither.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from ..backends import COMFY_METADATA, COMFY_REFUSED, FLOAT8_MARKER

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import PackedSpec

_WEIGHT = ".weight"
# The tensors by which ComfyUI knows a model under diffusers' names, whose every name it changes (0.33.0).
_RENAMED = (
    {"conv_in.weight"},  # UNets
    {"x_embedder.weight"},  # Flux, and what is built like it
    {"joint_transformer_blocks.0.attn.add_k_proj.weight"},  # AuraFlow
    {"noise_refiner.0.attention.norm_k.weight"},  # Z-Image
    {"adaln_single.emb.timestep_embedder.linear_1.bias", "pos_embed.proj.bias"},  # PixArt
    {"transformer_blocks.0.attn.add_q_proj.weight", "pos_embed.proj.weight"},  # Stable Diffusion 3
)
_INNER = "model.diffusion_model."
# What transformers 5 calls a part of CLIP, which ComfyUI knows by names with `text_model.` alone.
_UNKNOWN = "embeddings.token_embedding.weight"
_LEAST = 6  # of an inner model's tensors, for ComfyUI to take it for one
_VERSION = {"format_version": "1.0"}


def refusal(
    rows: Mapping[str, PackedSpec], floats: Collection[str], keys: Collection[str], *, is_text_encoder: bool = False
) -> dict[str, str]:
    """Return the metadata, {} for a file that ComfyUI reads.

    Args:
        rows: the quantized weights, by name. floats: names of the other tensors. keys: of all tensors in the file.
    """
    names = {*rows, *floats}
    if not rows:
        return {}
    is_read = all(_is_read(name, spec, keys) for name, spec in rows.items())
    if is_text_encoder and (_UNKNOWN in names or not is_read):
        return {COMFY_METADATA: json.dumps({**_VERSION, "layers": COMFY_REFUSED})}
    if any(known <= names for known in _RENAMED):
        layers = [f"{_INNER}{COMFY_REFUSED}, {number}" for number in range(_LEAST)]
    elif is_read:
        return {}
    else:  # floats too: ComfyUI passes over a layer that has no tensor `weight`, only parts of it
        layers = sorted(name.removesuffix(_WEIGHT) for name in names if name.endswith(_WEIGHT))
    formats = {layer: {"format": COMFY_REFUSED} for layer in layers}
    return {COMFY_METADATA: json.dumps({**_VERSION, "layers": formats})}


def is_silent(rows: Mapping[str, PackedSpec], tensors: Mapping[str, Tensor]) -> bool:
    """Return whether ComfyUI would load a file by its tensors alone, and take codes for weights.

    Text encoders of some kinds are loaded without a look at what is said of their layers.
    """
    shapes = {name: tuple(tensors[name].shape) for name in rows if name in tensors}
    is_loaded = all(shapes.get(name, spec.shape) == spec.shape for name, spec in rows.items())
    return is_loaded and not all(_is_read(name, spec, tensors) for name, spec in rows.items())


def _is_read(name: str, spec: PackedSpec, keys: Collection[str]) -> bool:
    """Return whether ComfyUI reads a weight: of a linear layer whose format the file has in a tensor beside it."""
    return len(spec.shape) == 2 and name.removesuffix("weight") + FLOAT8_MARKER in keys
