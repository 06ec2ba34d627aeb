"""Choose the converter of an original layout: diffusers' for the class, or, where that fails or there is none, our own
table of the original names (`original_names`), applied backwards. And the prefixes of components that are not the main
model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import UnsupportedFileError
from ...formats import model_families
from . import original_names

if TYPE_CHECKING:
    from ...formats import Checkpoint

Convert = Callable[[dict[str, Any]], Mapping[str, Any]]
Config = Mapping[str, Any]


@dataclass(frozen=True)
class CheckpointPart:
    """A component that a file may contain besides its main model, or alone.

    Attributes:
        prefixes: possible prefixes of its names. marker: a tensor that it always has.
    """

    prefixes: tuple[str, ...]
    marker: str


_VAE = ("first_stage_model.", "vae.")
PARTS: Mapping[str, CheckpointPart] = {
    "AutoencoderKLWan": CheckpointPart((*_VAE, ""), "decoder.middle.0.residual.0.gamma"),
    "AutoencoderKLLTXVideo": CheckpointPart(("vae.", ""), "encoder.down_blocks.0.res_blocks.0.conv1.conv.weight"),
    "AutoencoderKLLTX2Video": CheckpointPart(("vae.", ""), "encoder.down_blocks.0.res_blocks.0.conv1.conv.weight"),
    "AutoencoderKLLTX2Audio": CheckpointPart(("audio_vae.", ""), "decoder.up.0.block.0.conv1.conv.weight"),
    "AutoencoderDC": CheckpointPart((*model_families.PREFIXES, *_VAE, ""), "decoder.project_in.main.conv.weight"),
    "ControlNetModel": CheckpointPart(
        (*model_families.PREFIXES, model_families.CONTROL, ""), "input_hint_block.0.weight"
    ),
    "ZImageControlNetModel": CheckpointPart(
        (*model_families.PREFIXES, model_families.CONTROL, ""), "control_all_x_embedder.2-1.weight"
    ),
    "MotionAdapter": CheckpointPart(("",), "down_blocks.0.motion_modules.0.temporal_transformer.norm.weight"),
    "SparseControlNetModel": CheckpointPart(("",), "controlnet_down_blocks.0.weight"),
}
# Converters that know a model by names with a prefix only. What has it and what has not is the same to them after that.
WANTED: Mapping[str, str] = {
    "UNet2DConditionModel": "model.diffusion_model.",
    "AutoencoderKLLTXVideo": "vae.",
}
# With tables of the frames' places, which diffusers' converter drops.
TABLES = ("MotionAdapter", "SparseControlNetModel")


def prefix_of(kind: str, names: Collection[str]) -> str | None:
    """Return the prefix of the names of a class of PARTS in a file; None if the file has no such component."""
    part = PARTS[kind]
    return next((prefix for prefix in part.prefixes if prefix + part.marker in names), None)


def _wan(names: Collection[str], config: Config) -> bool:
    """diffusers' converter lacks learned positions of the first and last frame, and SkyReels V2's frame rate."""
    return config.get("pos_embed_seq_len") is not None or bool(config.get("inject_sample_info"))


def _ltx_vae(names: Collection[str], config: Config) -> bool:
    """diffusers' converter tells 0.9.5 from the others by its width."""
    types = config.get("downsample_type") or ("conv",)
    return types[0] != "conv" and list(config.get("block_out_channels", ()))[-1:] != [2048]


def _hunyuan_video(names: Collection[str], config: Config) -> bool:
    """diffusers' converter splits fused layers at the published width."""
    return bool(config.get("num_attention_heads", 24) * config.get("attention_head_dim", 128) != 3072)


# Where diffusers' converter does not serve, by class: whether it is so for a file's names and a model's config.
_OURS: Mapping[str, Callable[[Collection[str], Config], bool]] = {
    "WanTransformer3DModel": _wan,
    "WanVACETransformer3DModel": _wan,
    "SkyReelsV2Transformer3DModel": _wan,
    "ChronoEditTransformer3DModel": _wan,
    "WanAnimateTransformer3DModel": _wan,
    # The VAE of Wan 2.2: its lists of blocks are taken for those of 2.1, and blocks overwrite each other.
    "AutoencoderKLWan": lambda names, config: bool(config.get("is_residual")),
    # LTX-2.3, of which some names are left as they are.
    "LTX2VideoTransformer3DModel": lambda names, config: bool(
        config.get("cross_attn_mod") or config.get("audio_cross_attn_mod")
    ),
    "AutoencoderKLLTXVideo": _ltx_vae,
    "HunyuanVideoTransformer3DModel": _hunyuan_video,
    "MochiTransformer3DModel": lambda names, config: config.get("num_layers", 48) != 48,
    # Version 1.0 is looked for in a dict that was emptied before, and taken for 2.
    "CosmosTransformer3DModel": lambda names, config: any("blocks.block0." in name for name in names),
}


def refuse_class(src: Checkpoint, kind: str) -> None:
    """Raise UnsupportedFileError for a file that looks like a known layout but has another one.

    MiniMax-H3 has q, k and v concatenated in its single files and interleaved by head in its shards, with the same
    names and shapes; and there are files with a table in place of layers.
    """
    if kind != "MiniMaxH3Transformer3DModel":
        return
    if len(src.files) > 1:
        why = "in its authors' sharded files q, k and v alternate from head to head, which the tensors do not show"
    elif any(name.endswith("adaln_t_table") for name in src.names):
        why = "it is a pruned model, with a table (adaln_t_table) in place of its time_embedder"
    else:
        return
    raise UnsupportedFileError(
        f"Cannot load {src.path} as a {kind}", why, "Use the whole model in one file, or as a diffusers folder"
    )


def ours(kind: str, names: Collection[str], owner: Checkpoint, theirs: bool) -> Convert | None:
    """Return our converter from the original names (without a prefix) to diffusers'; None if there is none, or if
    diffusers' works.

    Args:
        theirs: whether diffusers has a converter for the class.
    """
    fails = _OURS.get(kind)
    if theirs and (fails is None or not fails(names, owner.config)):
        return None
    if not original_names.known(kind):
        return None
    from .. import components

    model = components.empty(owner.library, kind, owner.config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
    return lambda state: backwards(kind, shapes, state)


def backwards(kind: str, shapes: Mapping[str, tuple[int, ...]], state: dict[str, Any]) -> dict[str, Any]:
    """Convert a state dict with original names to diffusers'. Tensors without a row keep their names.

    Args:
        shapes: of the model's tensors, by diffusers' names.

    Raises:
        KeyError: a tensor is missing. ValueError: there are no rows for the model. RuntimeError: a shape differs.
    """
    import torch

    rows = original_names.written(kind, shapes)
    if rows is None:
        raise ValueError(f"the original tensor names of this {kind} are unknown")
    result = dict(state)
    for row in rows:
        tensor = result.pop(row.name)
        if row.swapped:
            tensor = torch.cat(tensor.chunk(2)[::-1])
        if row.shape is not None:
            tensor = tensor.reshape(shapes[row.sources[0]])
        if len(row.sources) == 1:
            result[row.sources[0]] = tensor
        else:
            result |= zip(row.sources, tensor.split([shapes[source][0] for source in row.sources]), strict=True)
    return result
