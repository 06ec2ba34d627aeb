"""The shipped models in the layouts of Stable Diffusion's and Flux's first authors: state dicts, written from the rules
of those layouts, not with the converters that read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

State = dict[str, Tensor]

_RESNET = (
    ("norm1.", "in_layers.0."), ("conv1.", "in_layers.2."), ("norm2.", "out_layers.0."), ("conv2.", "out_layers.3."),
    ("time_emb_proj.", "emb_layers.1."), ("conv_shortcut.", "skip_connection."),
)  # fmt: skip
_UNET_ENDS = {
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2",
}  # fmt: skip


def unet(state: State, config: dict[str, Any]) -> State:
    """A UNet2DConditionModel's state as CompVis' `model.diffusion_model`, without that prefix."""
    per = config["layers_per_block"] + 1
    attends = {name.rpartition(".attentions.")[0] for name in state if ".attentions." in name}
    return {_unet_name(name, per, attends): tensor for name, tensor in state.items()}


def _unet_name(name: str, per: int, attends: set[str]) -> str:
    module, _, leaf = name.rpartition(".")
    if module in _UNET_ENDS:
        return f"{_UNET_ENDS[module]}.{leaf}"
    side, *words = name.split(".")
    if side == "mid_block":
        kind, at, *rest = words
        place = f"middle_block.{1 if kind == 'attentions' else 2 * int(at)}"
        return f"{place}.{_resnet('.'.join(rest)) if kind == 'resnets' else '.'.join(rest)}"
    block, kind, at, *rest = words
    tail = ".".join(rest)
    if side == "down_blocks":
        first = 1 + int(block) * per
        if kind == "downsamplers":
            return f"input_blocks.{first + per - 1}.0.op.{rest[-1]}"
        place = f"input_blocks.{first + int(at)}"
    else:
        first = int(block) * per
        if kind == "upsamplers":
            return f"output_blocks.{first + per - 1}.{2 if f'up_blocks.{block}' in attends else 1}.conv.{rest[-1]}"
        place = f"output_blocks.{first + int(at)}"
    return f"{place}.0.{_resnet(tail)}" if kind == "resnets" else f"{place}.1.{tail}"


def _resnet(tail: str) -> str:
    for ours, theirs in _RESNET:
        if tail.startswith(ours):
            return theirs + tail.removeprefix(ours)
    raise KeyError(tail)


def vae(state: State, config: dict[str, Any]) -> State:
    """An AutoencoderKL's state as CompVis' `first_stage_model`, without that prefix."""
    blocks = len(config["block_out_channels"])
    return dict(_vae_row(name, tensor, blocks) for name, tensor in state.items())


def _vae_row(name: str, tensor: Tensor, blocks: int) -> tuple[str, Tensor]:
    side, *words = name.split(".")
    tail = ".".join(words).replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
    if words[0] == "mid_block":
        kind, at, *rest = words[1:]
        if kind == "resnets":
            return f"{side}.mid.block_{int(at) + 1}.{'.'.join(rest).replace('conv_shortcut', 'nin_shortcut')}", tensor
        names = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out": "proj_out"}
        leaf = rest[-1]
        # Attention is made of 1x1 convolutions there.
        shaped = tensor[:, :, None, None] if leaf == "weight" and rest[0] != "group_norm" else tensor
        return f"{side}.mid.attn_1.{names[rest[0]]}.{leaf}", shaped
    if words[0] in ("down_blocks", "up_blocks"):
        _, block, kind, at, *rest = words
        end = ".".join(rest).replace("conv_shortcut", "nin_shortcut")
        short = "down" if words[0] == "down_blocks" else "up"
        number = int(block) if short == "down" else blocks - 1 - int(block)
        if kind == "resnets":
            return f"{side}.{short}.{number}.block.{at}.{end}", tensor
        return f"{side}.{short}.{number}.{short}sample.{end}", tensor
    return f"{side}.{tail}", tensor


_OPENCLIP = (
    ("layer_norm1", "ln_1"), ("layer_norm2", "ln_2"), ("mlp.fc1", "mlp.c_fc"), ("mlp.fc2", "mlp.c_proj"),
    ("self_attn.out_proj", "attn.out_proj"),
)  # fmt: skip


def openclip(state: State) -> State:
    """A CLIP text model's state as OpenCLIP names it; the projection lies the other way round there."""
    take = {name.removeprefix("text_model."): tensor for name, tensor in state.items()}
    made = {
        "positional_embedding": take.pop("embeddings.position_embedding.weight"),
        "token_embedding.weight": take.pop("embeddings.token_embedding.weight"),
        "text_projection": take.pop("text_projection.weight").T,
    }
    made |= {f"ln_final.{leaf}": take.pop(f"final_layer_norm.{leaf}") for leaf in ("weight", "bias")}
    for i in range(len({name.split(".")[2] for name in take})):
        ours, theirs = f"encoder.layers.{i}", f"transformer.resblocks.{i}"
        for leaf in ("weight", "bias"):
            fused = [take.pop(f"{ours}.self_attn.{part}_proj.{leaf}") for part in "qkv"]
            made[f"{theirs}.attn.in_proj_{leaf}"] = torch.cat(fused)
            made |= {f"{theirs}.{b}.{leaf}": take.pop(f"{ours}.{a}.{leaf}").clone() for a, b in _OPENCLIP}
    assert not take, sorted(take)
    return made


def clip(state: State) -> State:
    """A CLIP text model's state as checkpoints and lone files have it: behind `text_model.`, but for the projection.
    Versions of transformers differ in that."""
    bare = {name.removeprefix("text_model."): tensor for name, tensor in state.items()}
    return {name if name.startswith("text_projection") else f"text_model.{name}": t for name, t in bare.items()}


def bfl(state: State) -> State:
    """A FluxTransformer2DModel's state as Black Forest Labs name it."""
    made: State = {}
    take = dict(state)

    def move(ours: str, theirs: str) -> None:
        for leaf in ("weight", "bias"):
            if f"{ours}.{leaf}" in take:
                made[f"{theirs}.{leaf}"] = take.pop(f"{ours}.{leaf}")

    def fuse(ours: list[str], theirs: str) -> None:
        for leaf in ("weight", "bias"):
            made[f"{theirs}.{leaf}"] = torch.cat([take.pop(f"{name}.{leaf}") for name in ours])

    for ours, theirs in (("timestep_embedder", "time_in"), ("text_embedder", "vector_in"),
                         ("guidance_embedder", "guidance_in")):  # fmt: skip
        for number, layer in (("1", "in_layer"), ("2", "out_layer")):
            move(f"time_text_embed.{ours}.linear_{number}", f"{theirs}.{layer}")
    move("context_embedder", "txt_in")
    move("x_embedder", "img_in")
    move("proj_out", "final_layer.linear")
    for leaf in ("weight", "bias"):  # shift before scale there
        scale, shift = take.pop(f"norm_out.linear.{leaf}").chunk(2)
        made[f"final_layer.adaLN_modulation.1.{leaf}"] = torch.cat([shift, scale])
    for i in range(_count(state, "transformer_blocks.")):
        a, b = f"transformer_blocks.{i}", f"double_blocks.{i}"
        for stream, norm, ff, out, to, query, key in (
            ("img", "norm1", "ff", "to_out.0", "to_{}", "norm_q", "norm_k"),
            ("txt", "norm1_context", "ff_context", "to_add_out", "add_{}_proj", "norm_added_q", "norm_added_k"),
        ):
            move(f"{a}.{norm}.linear", f"{b}.{stream}_mod.lin")
            fuse([f"{a}.attn.{to.format(part)}" for part in "qkv"], f"{b}.{stream}_attn.qkv")
            move(f"{a}.attn.{out}", f"{b}.{stream}_attn.proj")
            move(f"{a}.{ff}.net.0.proj", f"{b}.{stream}_mlp.0")
            move(f"{a}.{ff}.net.2", f"{b}.{stream}_mlp.2")
            made[f"{b}.{stream}_attn.norm.query_norm.scale"] = take.pop(f"{a}.attn.{query}.weight")
            made[f"{b}.{stream}_attn.norm.key_norm.scale"] = take.pop(f"{a}.attn.{key}.weight")
    for i in range(_count(state, "single_transformer_blocks.")):
        a, b = f"single_transformer_blocks.{i}", f"single_blocks.{i}"
        move(f"{a}.norm.linear", f"{b}.modulation.lin")
        fuse([f"{a}.attn.to_q", f"{a}.attn.to_k", f"{a}.attn.to_v", f"{a}.proj_mlp"], f"{b}.linear1")
        move(f"{a}.proj_out", f"{b}.linear2")
        made[f"{b}.norm.query_norm.scale"] = take.pop(f"{a}.attn.norm_q.weight")
        made[f"{b}.norm.key_norm.scale"] = take.pop(f"{a}.attn.norm_k.weight")
    assert not take, sorted(take)
    return made


def sd3(state: State) -> State:
    """An SD3Transformer2DModel's state as Stability's `joint_blocks`, of version 3 or 3.5."""
    made: State = {}
    take = dict(state)

    def move(ours: str, theirs: str) -> None:
        for leaf in ("weight", "bias"):
            made[f"{theirs}.{leaf}"] = take.pop(f"{ours}.{leaf}")

    def fuse(ours: str, theirs: str) -> None:
        for leaf in ("weight", "bias"):
            made[f"{theirs}.{leaf}"] = torch.cat([take.pop(f"{ours.format(part)}.{leaf}") for part in "qkv"])

    def norms(ours: str, theirs: str) -> None:  # which version 3 has not
        for part in "qk":
            if f"{ours.format(part)}.weight" in take:
                made[f"{theirs}.ln_{part}.weight"] = take.pop(f"{ours.format(part)}.weight")

    def swap(ours: str, theirs: str) -> None:
        for leaf in ("weight", "bias"):  # shift before scale there
            scale, shift = take.pop(f"{ours}.{leaf}").chunk(2)
            made[f"{theirs}.{leaf}"] = torch.cat([shift, scale])

    made["pos_embed"] = take.pop("pos_embed.pos_embed")
    move("pos_embed.proj", "x_embedder.proj")
    move("context_embedder", "context_embedder")
    move("proj_out", "final_layer.linear")
    swap("norm_out.linear", "final_layer.adaLN_modulation.1")
    for ours, theirs in (("timestep_embedder", "t_embedder"), ("text_embedder", "y_embedder")):
        move(f"time_text_embed.{ours}.linear_1", f"{theirs}.mlp.0")
        move(f"time_text_embed.{ours}.linear_2", f"{theirs}.mlp.2")
    blocks = _count(state, "transformer_blocks.")
    for i in range(blocks):
        a, b, last = f"transformer_blocks.{i}", f"joint_blocks.{i}", i == blocks - 1
        if f"{a}.attn2.to_q.weight" in take:  # the image attends to itself a second time
            fuse(f"{a}.attn2.to_{{}}", f"{b}.x_block.attn2.qkv")
            norms(f"{a}.attn2.norm_{{}}", f"{b}.x_block.attn2")
            move(f"{a}.attn2.to_out.0", f"{b}.x_block.attn2.proj")
        for block, to, each, norm, out, ff in (
            ("x_block", "to_{}", "norm_{}", "norm1", "to_out.0", "ff"),
            ("context_block", "add_{}_proj", "norm_added_{}", "norm1_context", "to_add_out", "ff_context"),
        ):
            fuse(f"{a}.attn.{to}", f"{b}.{block}.attn.qkv")
            norms(f"{a}.attn.{each}", f"{b}.{block}.attn")
            if block == "context_block" and last:  # which ends there
                swap(f"{a}.{norm}.linear", f"{b}.{block}.adaLN_modulation.1")
                continue
            move(f"{a}.{norm}.linear", f"{b}.{block}.adaLN_modulation.1")
            move(f"{a}.attn.{out}", f"{b}.{block}.attn.proj")
            move(f"{a}.{ff}.net.0.proj", f"{b}.{block}.mlp.fc1")
            move(f"{a}.{ff}.net.2", f"{b}.{block}.mlp.fc2")
    assert not take, sorted(take)
    return made


def _count(state: State, prefix: str) -> int:
    return len({name.split(".")[1] for name in state if name.startswith(prefix)})


def sdxl_checkpoint(folder: Path) -> State:
    """A Stable Diffusion XL pipeline's folder as Stability's one file."""
    return {
        **prefixed(unet(weights(folder / "unet"), config(folder / "unet")), "model.diffusion_model."),
        **prefixed(vae(weights(folder / "vae"), config(folder / "vae")), "first_stage_model."),
        **prefixed(clip(weights(folder / "text_encoder")), "conditioner.embedders.0.transformer."),
        **prefixed(openclip(weights(folder / "text_encoder_2")), "conditioner.embedders.1.model."),
    }


def sd3_checkpoint(folder: Path) -> State:
    """A Stable Diffusion 3 pipeline's folder as Stability's one file, with all text encoders that the folder has."""
    made = {
        **prefixed(sd3(weights(folder / "transformer")), "model.diffusion_model."),
        **prefixed(vae(weights(folder / "vae"), config(folder / "vae")), "first_stage_model."),
        **prefixed(clip(weights(folder / "text_encoder")), "text_encoders.clip_l.transformer."),
        **prefixed(clip(weights(folder / "text_encoder_2")), "text_encoders.clip_g.transformer."),
    }
    if (folder / "text_encoder_3").exists():
        made |= prefixed(weights(folder / "text_encoder_3"), "text_encoders.t5xxl.transformer.")
    return made


def prefixed(state: State, prefix: str) -> State:
    """The same behind a prefix."""
    return {prefix + name: tensor.contiguous() for name, tensor in state.items()}


def config(folder: Path) -> dict[str, Any]:
    """What the config.json in a component folder says."""
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


def weights(folder: Path) -> State:
    """The state dict in a component folder."""
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def checkpoint(folder: Path, path: Path) -> Path:
    """A pipeline of Stable Diffusion 1 as one checkpoint in its authors' layout, with what training leaves in such."""
    state = prefixed(unet(weights(folder / "unet"), config(folder / "unet")), "model.diffusion_model.")
    state |= prefixed(vae(weights(folder / "vae"), config(folder / "vae")), "first_stage_model.")
    text = {f"text_model.{name.removeprefix('text_model.')}": t for name, t in weights(folder / "text_encoder").items()}
    state |= prefixed(text, "cond_stage_model.transformer.")
    state["cond_stage_model.transformer.text_model.embeddings.position_ids"] = torch.arange(77)[None]
    state["alphas_cumprod"] = torch.ones(1000)
    save_file(state, path)
    return path
