"""Names of a model's first authors for its tensors in diffusers: what files for other tools must have. No torch.

Rows for the models whose layers are fused or renamed there; `{i}` stands for the number of a block, `*` for weight and
bias. Written from the authors' layouts; `diffusers` has only the way back, against which the writer holds the result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Written:
    """A tensor to be written: rows of several tensors, one after the other.

    Attributes:
        name: in the file. sources: where its rows come from. swapped: the two halves of the rows change places.
    """

    name: str
    sources: tuple[str, ...]
    swapped: bool = False


def written(class_name: str | None, shapes: Shapes) -> list[Written] | None:
    """A component's tensors under its authors' names, in the order of `shapes`; None if these are not known."""
    make = _MODELS.get(class_name or "")
    rows = list(make(shapes)) if make is not None else []
    place = {name: at for at, name in enumerate(shapes)}
    used = [source for row in rows for source in row.sources]
    if sorted(used) != sorted(place) or len({row.name for row in rows}) != len(rows):
        return None
    return sorted(rows, key=lambda row: place[row.sources[0]])


def shape_of(row: Written, shapes: Shapes) -> tuple[int, ...]:
    """The shape of the tensor that is written."""
    first = shapes[row.sources[0]]
    if len(row.sources) == 1:
        return first
    return (sum(shapes[source][0] for source in row.sources), *first[1:])


# (the authors' name, diffusers' names), rows of modules or of whole tensors. "~" before a name: halves are swapped,
# because diffusers has scale before shift and the authors have shift before scale.
_Rows = tuple[tuple[str, ...], ...]
_FLUX: _Rows = (
    ("img_in.*", "x_embedder.*"),
    ("txt_in.*", "context_embedder.*"),
    ("time_in.in_layer.*", "time_text_embed.timestep_embedder.linear_1.*"),
    ("time_in.out_layer.*", "time_text_embed.timestep_embedder.linear_2.*"),
    ("vector_in.in_layer.*", "time_text_embed.text_embedder.linear_1.*"),
    ("vector_in.out_layer.*", "time_text_embed.text_embedder.linear_2.*"),
    ("guidance_in.in_layer.*", "time_text_embed.guidance_embedder.linear_1.*"),
    ("guidance_in.out_layer.*", "time_text_embed.guidance_embedder.linear_2.*"),
    ("final_layer.linear.*", "proj_out.*"),
    ("~final_layer.adaLN_modulation.1.*", "norm_out.linear.*"),
)
_FLUX_DOUBLE: _Rows = (
    ("img_mod.lin.*", "norm1.linear.*"),
    ("txt_mod.lin.*", "norm1_context.linear.*"),
    ("img_attn.qkv.*", "attn.to_q.*", "attn.to_k.*", "attn.to_v.*"),
    ("txt_attn.qkv.*", "attn.add_q_proj.*", "attn.add_k_proj.*", "attn.add_v_proj.*"),
    ("img_attn.norm.query_norm.scale", "attn.norm_q.weight"),
    ("img_attn.norm.key_norm.scale", "attn.norm_k.weight"),
    ("txt_attn.norm.query_norm.scale", "attn.norm_added_q.weight"),
    ("txt_attn.norm.key_norm.scale", "attn.norm_added_k.weight"),
    ("img_attn.proj.*", "attn.to_out.0.*"),
    ("txt_attn.proj.*", "attn.to_add_out.*"),
    ("img_mlp.0.*", "ff.net.0.proj.*"),
    ("img_mlp.2.*", "ff.net.2.*"),
    ("txt_mlp.0.*", "ff_context.net.0.proj.*"),
    ("txt_mlp.2.*", "ff_context.net.2.*"),
)
_FLUX_SINGLE: _Rows = (
    ("modulation.lin.*", "norm.linear.*"),
    ("linear1.*", "attn.to_q.*", "attn.to_k.*", "attn.to_v.*", "proj_mlp.*"),
    ("linear2.*", "proj_out.*"),
    ("norm.query_norm.scale", "attn.norm_q.weight"),
    ("norm.key_norm.scale", "attn.norm_k.weight"),
)
_SD3: _Rows = (
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
_SD3_BLOCK: _Rows = (
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


def _flux(shapes: Shapes) -> Iterator[Written]:
    yield from _of_rows(shapes, _FLUX, "", "")
    for i in range(_count(shapes, "transformer_blocks.")):
        yield from _of_rows(shapes, _FLUX_DOUBLE, f"double_blocks.{i}.", f"transformer_blocks.{i}.")
    for i in range(_count(shapes, "single_transformer_blocks.")):
        yield from _of_rows(shapes, _FLUX_SINGLE, f"single_blocks.{i}.", f"single_transformer_blocks.{i}.")


def _sd3(shapes: Shapes) -> Iterator[Written]:
    yield from _of_rows(shapes, _SD3, "", "")
    blocks = _count(shapes, "transformer_blocks.")
    for i in range(blocks):
        for row in _of_rows(shapes, _SD3_BLOCK, f"joint_blocks.{i}.", f"transformer_blocks.{i}."):
            # The text's stream ends at the last block, in a norm like the final layer's.
            ends = i == blocks - 1 and ".context_block.adaLN_modulation." in row.name
            yield Written(row.name, row.sources, swapped=ends)


def _of_rows(shapes: Shapes, rows: _Rows, theirs: str, ours: str) -> Iterator[Written]:
    """What the rows say of the tensors that are there, behind a block's prefix in either layout."""
    for name, *sources in rows:
        for leaf in ("weight", "bias") if name.endswith("*") else ("",):
            found = tuple(ours + source.replace("*", leaf) for source in sources)
            if all(source in shapes for source in found):
                yield Written(theirs + name.lstrip("~").replace("*", leaf), found, swapped=name.startswith("~"))


def _count(shapes: Shapes, prefix: str) -> int:
    """How many blocks: numbers run from 0 without a gap, or the names do not fit anyway."""
    return len({name.split(".")[1] for name in shapes if name.startswith(prefix)})


# Stable Diffusion's UNet: blocks of one list there, by kind and place here.
_UNET_ENDS = {
    "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
}  # fmt: skip
_RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0",
    "conv2": "out_layers.3", "conv_shortcut": "skip_connection",
}  # fmt: skip
_BLOCK = re.compile(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)\.(\w+)")
_MIDDLE = re.compile(r"mid_block\.(resnets|attentions)\.(\d+)\.(.+)\.(\w+)")


def _unet(shapes: Shapes) -> Iterator[Written]:
    resnets = {name.split(".")[3] for name in shapes if name.startswith("down_blocks.0.resnets.")}
    stride = len(resnets) + 1  # entries of the authors' list for each block: its layers, and one that changes the size
    attending = {name.split(".")[1] for name in shapes if re.match(r"up_blocks\.\d+\.attentions\.", name)}
    for name in shapes:
        found = _unet_name(name, stride, attending)
        if found is not None:
            yield Written(found, (name,))


def _unet_name(name: str, stride: int, attending: set[str]) -> str | None:
    module, _, leaf = name.rpartition(".")
    if module in _UNET_ENDS:
        return f"{_UNET_ENDS[module]}.{leaf}"
    if middle := _MIDDLE.fullmatch(name):
        kind, number, inner, leaf = middle.groups()
        if kind == "attentions":
            return f"middle_block.1.{inner}.{leaf}" if number == "0" else None
        return f"middle_block.{2 * int(number)}.{_RESNET[inner]}.{leaf}" if inner in _RESNET else None
    block = _BLOCK.fullmatch(name)
    if block is None:
        return None
    side, at, kind, number, inner, leaf = block.groups()
    begin = int(at) * stride + (side == "down")
    there = "input_blocks" if side == "down" else "output_blocks"
    if kind == "downsamplers":
        return f"{there}.{begin + stride - 1}.0.op.{leaf}" if inner == "conv" else None
    if kind == "upsamplers":
        return f"{there}.{begin + stride - 1}.{2 if at in attending else 1}.{inner}.{leaf}"
    if kind == "attentions":
        return f"{there}.{begin + int(number)}.1.{inner}.{leaf}"
    return f"{there}.{begin + int(number)}.0.{_RESNET[inner]}.{leaf}" if inner in _RESNET else None


_MODELS: Mapping[str, Callable[[Shapes], Iterator[Written]]] = {
    "FluxTransformer2DModel": _flux,
    "SD3Transformer2DModel": _sd3,
    "UNet2DConditionModel": _unet,
}
