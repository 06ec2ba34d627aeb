"""GGUF files with the conventions of other tools, written here with gguf-py, arrive tensor by tensor as they were
written: every one decoded, under the layout's own names, and compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sdquant
from sdquant.errors import BadFileError
from sdquant.models.pipelines import main_part, weight_bytes, weight_parts
from sdquant.nn.weights import plain, quantized

from . import layouts
from .test_load_modes import images

if TYPE_CHECKING:
    from .layouts import State

SDCPP = None  # `general.architecture` of stable-diffusion.cpp: it writes no metadata at all


@dataclass(frozen=True)
class Row:
    """How a tensor is written: type, shape as stored, shape beside it."""

    kind: str
    stored: tuple[int, ...]
    orig_shape: tuple[int, ...] | None = None


Rule = Callable[[str, Tensor], Row]
Layout = Callable[["State"], "State"]


def city96(name: str, tensor: Tensor) -> Row:
    """What convert.py and llama-quantize make of a UNet in bf16: folded convolutions, norms in F32."""
    shape = tuple(tensor.shape)
    if tensor.ndim < 2:
        return Row("F32", shape)
    if tensor.numel() >= 512 and tensor.numel() % 256 == 0 and shape[-1] % 256:
        kind = "Q4_0" if "attn" in name else "Q5_1" if "in_layers" in name else "Q8_0"
        return Row(kind, (tensor.numel() // 256, 256), orig_shape=shape)
    return Row("Q8_0" if shape[-1] % 32 == 0 else "BF16", shape)


def sdcpp(name: str, tensor: Tensor) -> Row:
    """stable-diffusion.cpp: the rows that blocks divide, all else in half precision; linear projections of SDXL and
    1x1 convolutions may have any number of dimensions of 1."""
    shape = tuple(tensor.shape)
    if tensor.ndim == 2 and shape[-1] % 32 == 0 and ("proj_in" not in name and "proj_out" not in name):
        return Row("Q8_0", shape)
    if tensor.ndim == 2 and "proj" in name:
        return Row("F16", (*shape, 1, 1))
    return Row("F16" if tensor.ndim > 1 else "F32", shape)


def dropped_ones(name: str, tensor: Tensor) -> Row:
    """1x1 convolutions as matrices, quantized or not; ggml's own loss of leading dimensions of 1."""
    shape = tuple(n for n in tensor.shape if n != 1) or (1,)
    return Row("Q8_0" if tensor.ndim > 1 and shape[-1] % 32 == 0 else "BF16", shape)


def mixed(name: str, tensor: Tensor) -> Row:
    """Files in the wild: blocks where they fit, everything else in bf16, norms and biases and parameters too."""
    shape = tuple(tensor.shape)
    return Row("Q4_0" if tensor.ndim == 2 and shape[-1] % 32 == 0 else "BF16", shape)


def all_in_blocks(name: str, tensor: Tensor) -> Row:
    """Every tensor in blocks that can be, norms and parameters too; by flat rows where that needs it."""
    shape = tuple(tensor.shape)
    if shape[-1] % 32 == 0 and tensor.ndim <= 4:
        return Row("Q8_0", shape)
    if tensor.numel() % 32 == 0:
        return Row("Q5_0", (tensor.numel() // 32, 32), orig_shape=shape)
    return Row("F16", shape)


def five_dimensions(kind: str) -> Rule:
    """city96's fix_5d_tensors: Conv3d weights in five dimensions, all else without leading dimensions of 1."""

    def rule(name: str, tensor: Tensor) -> Row:
        if tensor.ndim == 5:
            return Row(kind, tuple(tensor.shape))
        return replace(mixed(name, tensor), stored=_without_leading_ones(tensor))

    return rule


def folded_five(name: str, tensor: Tensor) -> Row:
    """The same weight folded to rows and quantized, with its five dimensions beside it."""
    if tensor.ndim == 5:
        return Row("Q8_0", (tensor.numel() // 256, 256), orig_shape=tuple(tensor.shape))
    return replace(mixed(name, tensor), stored=_without_leading_ones(tensor))


def sdcpp_five(name: str, tensor: Tensor) -> Row:
    """stable-diffusion.cpp's Conv3d weights: the first two dimensions as one, for ggml has four."""
    if tensor.ndim == 5:
        return Row("F16", (tensor.shape[0] * tensor.shape[1], *tensor.shape[2:]))
    return mixed(name, tensor)


def _without_leading_ones(tensor: Tensor) -> tuple[int, ...]:
    first = next(at for at, n in enumerate(tensor.shape) if n > 1)
    return tuple(tensor.shape[first:])


def write(path: Path, state: State, rule: Rule, architecture: str | None, prefix: str = "") -> State:
    """Write with gguf-py; returns the float32 values that the file stands for, by name without the prefix."""
    writer = gguf.GGUFWriter(path, architecture or "")  # which writes none if it is empty
    floats = {}
    for name, tensor in state.items():
        row = rule(name, tensor)
        kind = gguf.GGMLQuantizationType[row.kind]
        raw = gguf.quants.quantize(tensor.float().reshape(row.stored).numpy(), kind)
        writer.add_tensor(prefix + name, raw, raw_dtype=kind)
        if row.orig_shape:
            writer.add_array(f"comfy.gguf.orig_shape.{prefix + name}", row.orig_shape)
        floats[name] = torch.from_numpy(np.array(gguf.quants.dequantize(raw, kind))).reshape(tensor.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return floats


def decoded(model: nn.Module) -> State:
    """Every weight of a loaded model in float32, under diffusers' names."""
    state = {name: tensor.float() for name, tensor in plain(model).items() if tensor.numel()}
    for name, packed in quantized(model):
        state[name] = packed.spec.scheme.codec.decode(packed, torch.float32)
    return state


def arrives(model: nn.Module, written: State, layout: Layout = dict) -> None:
    """What was loaded is what was written, in the layout's own names."""
    got = layout(decoded(model))
    assert got.keys() == written.keys()
    assert [name for name, tensor in written.items() if not torch.equal(got[name], tensor)] == []


# The shipped models, with base.

UNET_PREFIX = "model.diffusion_model."


@pytest.mark.parametrize(
    ("rule", "architecture", "prefix"),
    [
        (city96, "sd1", ""),
        (city96, "pig", ""),
        (sdcpp, SDCPP, UNET_PREFIX),
        (dropped_ones, SDCPP, ""),
        (mixed, "cow", "model."),
        (all_in_blocks, "flux", "diffusion_model."),
    ],
    ids=["city96", "pig", "stable-diffusion.cpp", "ones dropped", "bf16 norms", "blocks everywhere"],
)
def test_unet(rule: Rule, architecture: str | None, prefix: str, sd: Path, tmp_path: Path) -> None:
    def layout(state: State) -> State:
        return layouts.unet(state, layouts.config(sd / "unet"))

    file = tmp_path / "unet.gguf"
    floats = write(file, layout(layouts.weights(sd / "unet")), rule, architecture, prefix)
    assert (sdquant.detect(file).family, sdquant.detect(file).component) == ("sd", "unet")
    pipe = sdquant.load_model(file, base=sd, dtype="float32", progress=False)
    arrives(main_part(pipe), floats, layout)
    assert weight_bytes(pipe) == pipe.sdquant.plan.bytes
    assert np.isfinite(images(pipe, 1)).all()
    assert {part.dtype for part in weight_parts(pipe).values()} == {torch.float32}


@pytest.mark.parametrize(
    ("rule", "architecture", "prefix"),
    [
        (mixed, "flux", ""),
        (mixed, "lumina2", UNET_PREFIX),
        (mixed, "pig", "model."),
        (mixed, "cow", "net."),
        (mixed, SDCPP, UNET_PREFIX),
        (dropped_ones, "wan", "diffusion_model."),
    ],
    ids=["flux", "wrong name", "pig", "cow", "no name", "another wrong name"],
)
def test_flux(rule: Rule, architecture: str | None, prefix: str, flux: Path, tmp_path: Path) -> None:
    file = tmp_path / "flux.gguf"
    floats = write(file, layouts.bfl(layouts.weights(flux / "transformer")), rule, architecture, prefix)
    assert (sdquant.detect(file).family, sdquant.detect(file).component) == ("flux", "transformer")
    pipe = sdquant.load_model(file, base=flux, dtype="float32", progress=False)
    arrives(main_part(pipe), floats, layouts.bfl)
    assert weight_bytes(pipe) == pipe.sdquant.plan.bytes
    assert np.isfinite(images(pipe, 1)).all()


@pytest.mark.parametrize(("model", "part"), [("digits-sd", "unet"), ("digits-flux", "transformer")])
@pytest.mark.parametrize("prefix", ["", UNET_PREFIX])
def test_names_of_diffusers(prefix: str, model: str, part: str, tmp_path: Path) -> None:
    """As ngxson's converter and diffusers' own guide make them."""
    path, file = sdquant.demo.path(model), tmp_path / "model.gguf"
    floats = write(file, layouts.weights(path / part), mixed, "flux", prefix)
    pipe = sdquant.load_model(file, base=path, dtype="float32", progress=False)
    arrives(main_part(pipe), floats)
    assert weight_bytes(pipe) == pipe.sdquant.plan.bytes


# Small random models of other kinds, with their config beside the file.


def _wan(state: State) -> State:
    """A WanTransformer3DModel's state as Wan's authors name it."""
    names = {
        "condition_embedder.time_embedder.linear_1": "time_embedding.0",
        "condition_embedder.time_embedder.linear_2": "time_embedding.2",
        "condition_embedder.text_embedder.linear_1": "text_embedding.0",
        "condition_embedder.text_embedder.linear_2": "text_embedding.2",
        "condition_embedder.time_proj": "time_projection.1", "proj_out": "head.head",
    }  # fmt: skip
    inner = {
        "attn1": "self_attn", "attn2": "cross_attn", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o",
        "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2", "norm2": "norm3", "scale_shift_table": "modulation",
    }  # fmt: skip
    made = {}
    for name, tensor in state.items():
        module, _, leaf = name.rpartition(".")
        new = f"{names[module]}.{leaf}" if module in names else name
        if name.startswith("blocks."):
            for ours, theirs in inner.items():
                new = f".{new}.".replace(f".{ours}.", f".{theirs}.").strip(".")
        made["head.modulation" if name == "scale_shift_table" else new] = tensor
    return made


def _z_image(state: State) -> State:
    """A ZImageTransformer2DModel's state as Z-Image's authors name it: q, k and v fused."""
    made = {}
    for name, tensor in state.items():
        if ".to_k." in name or ".to_v." in name:
            continue
        if ".to_q." in name:
            tensor = torch.cat([state[name.replace(".to_q.", f".to_{part}.")] for part in "qkv"])
        for ours, theirs in (
            ("all_x_embedder.2-1.", "x_embedder."), ("all_final_layer.2-1.", "final_layer."), (".to_q.", ".qkv."),
            (".to_out.0.", ".out."), (".norm_q.", ".q_norm."), (".norm_k.", ".k_norm."),
        ):  # fmt: skip
            name = name.replace(ours, theirs)
        made[name] = tensor
    return made


@dataclass(frozen=True)
class Small:
    """A small model: its class and sizes, the layout of its files, and the layer classes that are to be quantized."""

    class_name: str
    config: dict[str, Any]
    layout: Layout = dict
    family: str | None = None


WAN = Small(
    "WanTransformer3DModel",
    {"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 16, "out_channels": 16,
     "text_dim": 64, "freq_dim": 64, "ffn_dim": 128, "num_layers": 2, "qk_norm": "rms_norm_across_heads",
     "cross_attn_norm": True, "rope_max_seq_len": 32},
    _wan,
    "wan",
)  # fmt: skip
Z_IMAGE = Small(
    "ZImageTransformer2DModel",
    {"dim": 64, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 64,
     "axes_dims": [8, 12, 12], "axes_lens": [32, 32, 32], "in_channels": 16},
    _z_image,
    "z-image",
)  # fmt: skip
AUDIO = Small(
    "StableAudioDiTModel",
    {"in_channels": 32, "out_channels": 32, "num_layers": 1, "attention_head_dim": 32, "num_attention_heads": 2,
     "num_key_value_attention_heads": 1, "cross_attention_dim": 64, "time_proj_dim": 64, "global_states_input_dim": 64,
     "cross_attention_input_dim": 64},
)  # fmt: skip
CLASSES = Small(
    "UNet2DConditionModel",
    {"block_out_channels": (32, 64), "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
     "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "norm_num_groups": 8, "cross_attention_dim": 64,
     "attention_head_dim": 4, "num_class_embeds": 10, "layers_per_block": 1},
    family="sd",
)  # fmt: skip


def _load(small: Small, rule: Rule, architecture: str | None, prefix: str, folder: Path) -> nn.Module:
    """Write a random model, load it, and compare all that arrives."""
    import diffusers

    torch.manual_seed(0)
    model = getattr(diffusers, small.class_name)(**small.config).requires_grad_(False)
    state = {name: torch.randn(t.shape) * 0.1 for name, t in model.state_dict().items()}
    model.save_config(folder)
    floats = write(folder / "model.gguf", small.layout(state), rule, architecture, prefix)
    assert sdquant.detect(folder / "model.gguf").family == small.family
    loaded: nn.Module = sdquant.load_model(folder / "model.gguf", dtype="float32", progress=False)
    assert type(loaded) is type(model)
    arrives(loaded, floats, small.layout)
    assert weight_bytes(loaded) == loaded.sdquant.plan.bytes  # type: ignore[union-attr]
    return loaded


def _kinds(model: nn.Module) -> set[str]:
    """The classes of the layers with a quantized weight."""
    return {type(model.get_submodule(name.rpartition(".")[0])).__name__ for name, _ in quantized(model)}


@pytest.mark.parametrize("prefix", ["", UNET_PREFIX, "model."])
@pytest.mark.parametrize(
    ("rule", "kinds"),
    [
        (five_dimensions("F32"), {"QuantizedLinear"}),
        (five_dimensions("BF16"), {"QuantizedLinear"}),
        (sdcpp_five, {"QuantizedLinear"}),
        (folded_five, {"QuantizedLinear", "QuantizedConv3d"}),
        (all_in_blocks, {"QuantizedLinear", "QuantizedConv3d"}),
    ],
    ids=["F32", "BF16", "stable-diffusion.cpp", "orig_shape", "blocks everywhere"],
)
def test_five_dimensions(rule: Rule, kinds: set[str], prefix: str, tmp_path: Path) -> None:
    model = _load(WAN, rule, "ltx2" if prefix else "wan", prefix, tmp_path)
    assert _kinds(model) == kinds
    inputs = {"hidden_states": torch.randn(1, 16, 2, 4, 4), "timestep": torch.tensor([5]),
              "encoder_hidden_states": torch.randn(1, 4, 64)}  # fmt: skip
    with torch.no_grad():
        assert torch.isfinite(model(**inputs).sample).all()
    (tmp_path / "config.json").unlink()
    assert sdquant.verify(tmp_path / "model.gguf").warnings == []


@pytest.mark.parametrize("rule", [mixed, five_dimensions("F32"), all_in_blocks], ids=["mixed", "dropped", "blocks"])
def test_z_image_as_lumina2(rule: Rule, tmp_path: Path) -> None:
    """Pad tokens come as [D] and as [1, D]."""
    assert _kinds(_load(Z_IMAGE, rule, "lumina2", "", tmp_path)) == {"QuantizedLinear"}


def test_every_kind_of_layer(tmp_path: Path) -> None:
    """In files whose norms, biases and bare parameters are in blocks too: these come as floats."""
    kinds = set()
    for small in (WAN, AUDIO, CLASSES):
        (tmp_path / small.class_name).mkdir()
        kinds |= _kinds(_load(small, all_in_blocks, SDCPP, "", tmp_path / small.class_name))
    names = {f"Quantized{kind}" for kind in ("Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding")}
    assert kinds == names


def test_another_shape_is_not_taken_for_dropped_ones(flux: Path, tmp_path: Path) -> None:
    """Dimensions of 1 may come and go; as many numbers in another order may not."""
    state = layouts.bfl(layouts.weights(flux / "transformer"))

    def turned(name: str, tensor: Tensor) -> Row:
        row = mixed(name, tensor)
        return replace(row, stored=row.stored[::-1]) if name == "txt_in.weight" else row

    assert math.prod(state["txt_in.weight"].shape[:1]) != state["txt_in.weight"].shape[1]
    write(tmp_path / "flux.gguf", state, turned, "flux")
    with pytest.raises(BadFileError, match=r"txt_in|context_embedder"):
        sdquant.load_model(tmp_path / "flux.gguf", base=flux, progress=False)
