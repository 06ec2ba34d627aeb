"""A strict reader of single safetensors files by ComfyUI's and Forge's rules, on their own libraries: comfy-kitchen and
bitsandbytes. What it says no to would fail there, or come out wrong without a word. Written from what ComfyUI's
`convert_old_quants` and `_load_quantized_module` and Forge's `Linear` for NF4 do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
from comfy_kitchen.tensor import (
    AsymW4A8Int8Layout,
    TensorCoreConvRotW4A4Layout,
    TensorCoreFP8Layout,
    TensorCoreMXFP8Layout,
    TensorCoreNVFP4Layout,
    TensorCoreSVDQuantW4A4Layout,
    TensorWiseINT8Layout,
)
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

BNB = ".weight.quant_state.bitsandbytes__"
# What tells ComfyUI the sizes of a model: their shapes have to be the weights' own.
MEASURED = (
    "img_in.weight", "txt_in.weight", "vector_in.in_layer.weight", "final_layer.linear.weight",
    "input_blocks.0.0.weight", "label_emb.0.0.weight", "transformer_blocks.0.attn2.to_k.weight", "out.2.weight",
)  # fmt: skip
FORMATS = (
    "float8_e4m3fn", "float8_e5m2", "int8_tensorwise", "nvfp4", "mxfp8", "convrot_w4a4", "asym_w4a8_int8",
    "svdquant_w4a4",
)  # fmt: skip
INNER = "model.diffusion_model."
KNOWN = ("weight", "bias", "scale")  # the last words of tensors that a model has


class Refused(Exception):
    """ComfyUI or Forge would not load the file, or would load it wrongly."""


def read(path: Path) -> tuple[dict[str, Tensor], set[str]]:
    """All tensors as floats, by name, and the names of those that were quantized.

    Raises:
        Refused: with the rule that is broken.
    """
    state = _declared(load_file(path), path)
    if any("bitsandbytes__" in key for key in state):
        floats, packed = _forge(state)
    else:
        floats, packed = _comfy(_converted(state))
    strange = [key for key in floats if key.rpartition(".")[2] not in KNOWN]
    if strange:
        raise Refused(f"{strange[0]} is left over")
    hidden = [key for key in packed if key.endswith(MEASURED)]
    if hidden and any("bitsandbytes__" in key for key in state):
        raise Refused(f"{hidden[0]} does not show the model's size")
    return floats, packed


def _declared(state: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The tensors, with what the metadata says of layers as tensors."""
    with safe_open(path, "pt") as file:
        text = (file.metadata() or {}).get("_quantization_metadata", '{"layers": {}}')
    for layer, conf in json.loads(text)["layers"].items():
        state[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(conf).encode()), dtype=torch.uint8)
    if sum(key.startswith(INNER) for key in state) > 5:  # the only ones that ComfyUI looks at
        state = {key.removeprefix(INNER): one for key, one in state.items() if key.startswith(INNER)}
    if not any(key.endswith(".weight") for key in state):
        raise Refused(f"Could not detect model type of: {path}")
    return state


def _forge(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], set[str]]:
    floats = dict(state)
    packed = set()
    for key in state:
        module, mark, _ = key.partition(BNB)
        if not mark:
            continue
        name = f"{module}.weight"
        stats = {part.removeprefix(f"{name}."): floats.pop(part) for part in state if part.startswith(f"{name}.")}
        if set(stats) != {"absmax", "quant_map", key.removeprefix(f"{name}.")}:
            raise Refused(f"{name} has {sorted(stats)}")  # Forge has no doubly quantized scales
        weight: Any = bitsandbytes.nn.Params4bit.from_prequantized(floats.pop(name), stats, device="cpu")
        if weight.quant_state.blocksize != 64:
            raise Refused(f"{name} has blocks of {weight.quant_state.blocksize}")
        # bitsandbytes' functions for a CPU (0.50) take wrong scales where a row is not whole blocks: one block a row.
        shape, weight.quant_state.shape = weight.quant_state.shape, torch.Size((weight.quant_state.absmax.numel(), 64))
        floats[name] = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state).reshape(shape)
        packed.add(name)
    return floats, packed


def _converted(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The older spelling of scaled float8 in the newer one."""
    marker = state.pop("scaled_fp8", None)
    if marker is None:
        return state
    made: dict[str, Tensor] = {}
    for key, tensor in state.items():
        module, mark, rest = key.rpartition(".scale_weight")
        if mark and not rest:
            conf = {"format": "float8_e4m3fn", "full_precision_matrix_mult": marker.numel() == 2}
            made[f"{module}.comfy_quant"] = torch.tensor(list(json.dumps(conf).encode()), dtype=torch.uint8)
            made[f"{module}.weight_scale"] = tensor
        else:
            made[key] = tensor
    return made


def _comfy(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], set[str]]:
    floats = dict(state)
    packed = set()
    for key in [key for key in state if key.endswith(".comfy_quant")]:
        module = key.removesuffix(".comfy_quant")
        conf = json.loads(bytes(floats.pop(key).tolist()))
        if f"{module}.weight" not in floats:
            continue  # with a warning; a layer without a weight fails when it runs
        codes = floats.pop(f"{module}.weight")
        if conf["format"] not in FORMATS:
            raise Refused(f"KeyError: {conf['format']!r}")  # of its table of formats
        if conf["format"] in ("convrot_w4a4", "asym_w4a8_int8"):
            floats[f"{module}.weight"] = _rotated(module, conf, codes, floats)
            packed.add(f"{module}.weight")
            continue
        if conf["format"] == "svdquant_w4a4":
            floats[f"{module}.weight"] = _svdquant(module, conf, codes, floats)
            packed.add(f"{module}.weight")
            continue
        scale = floats.pop(f"{module}.weight_scale")
        if codes.ndim != 2:
            raise Refused(f"{module} is no linear layer")
        if conf["format"] in ("nvfp4", "mxfp8"):
            second = floats.pop(f"{module}.weight_scale_2", None)
            floats[f"{module}.weight"] = _blocks(module, conf["format"], codes, scale, second)
            packed.add(f"{module}.weight")
            continue
        layout: Any
        options: dict[str, Any] = {}
        if conf["format"] == "float8_e4m3fn":
            if scale.numel() != 1 or codes.dtype != torch.float8_e4m3fn or not conf.get("full_precision_matrix_mult"):
                raise Refused(f"{module}: float8 with a scale for all, {scale.shape} {codes.dtype}")
            layout = TensorCoreFP8Layout
        elif conf["format"] == "int8_tensorwise":
            turned = {key: conf[key] for key in ("convrot", "convrot_groupsize") if key in conf}
            fits = scale.shape == (len(codes), 1) or (scale.shape == () and not turned)
            if scale.dtype != torch.float32 or not fits or codes.dtype != torch.int8:
                raise Refused(f"{module}: int8 with a float32 scale for each row, {scale.shape} {scale.dtype}")
            layout, options = TensorWiseINT8Layout, turned
        else:
            raise Refused(f"{module} is in {conf}")
        params = layout.Params(scale=scale, orig_dtype=torch.float32, orig_shape=tuple(codes.shape), **options)
        floats[f"{module}.weight"] = layout.dequantize(codes, params)
        packed.add(f"{module}.weight")
    return floats, packed


def _rotated(module: str, conf: dict[str, Any], codes: Tensor, floats: dict[str, Tensor]) -> Tensor:
    """A rotated weight of 4 or 6 bits, whose tensors are taken out of `floats`; the library checks their shapes."""
    group, shape = conf["convrot_groupsize"], (len(codes), codes.shape[1] * 2)
    values: dict[str, Any] = {"orig_dtype": torch.float32, "orig_shape": shape, "convrot_groupsize": group}
    if conf["format"] == "convrot_w4a4":
        four = TensorCoreConvRotW4A4Layout.Params(scale=floats.pop(f"{module}.weight_scale"), **values)
        if codes.dtype != torch.int8 or four.scale.shape != shape[:1] or shape[1] % 64:
            raise Refused(f"{module}: {codes.dtype} {shape}, {four.scale.shape}")
        return TensorCoreConvRotW4A4Layout.dequantize(codes, four)
    names = {"scale": "s_rel", "s_channel": "s_channel", "codebook": "codebook"}
    parts = {part: floats.pop(f"{module}.weight_{name}", None) for part, name in names.items()}
    if parts["scale"] is not None:  # which tells 6 bits from 4
        values["orig_shape"] = (len(codes), parts["scale"].shape[1] * conf["group_size"])
    eight = AsymW4A8Int8Layout.Params(group_size=conf["group_size"], **parts, **values)
    return AsymW4A8Int8Layout.dequantize(codes, eight)


def _svdquant(module: str, conf: dict[str, Any], codes: Tensor, floats: dict[str, Tensor]) -> Tensor:
    """A weight with a branch, whose tensors are taken out of `floats`. The library computes it with a unit matrix."""
    names = {"scale": "weight_scale", **{name: name for name in ("proj_down", "proj_up", "smooth_factor")}}
    parts = {part: floats.pop(f"{module}.{name}") for part, name in names.items()}
    shape = (len(codes), codes.shape[1] * 2)
    sizes = [shape[1] // 64, shape[0]], [shape[1], 32], [shape[0], 32], [shape[1]]
    is_16_bits = {tensor.itemsize for tensor in parts.values()} == {2}
    # Unless a file says so, ComfyUI takes the activations of some layers for shifted.
    if conf.get("act_unsigned") is not False or "layout" in conf or codes.dtype != torch.int8 or not is_16_bits:
        raise Refused(f"{module} is in {conf}, {codes.dtype}")
    if [list(tensor.shape) for tensor in parts.values()] != list(sizes) or shape[1] % 64:
        raise Refused(f"{module}: {shape}, {[list(tensor.shape) for tensor in parts.values()]}")
    wide: dict[str, Any] = {part: tensor.float() for part, tensor in parts.items()}
    params = TensorCoreSVDQuantW4A4Layout.Params(orig_dtype=torch.float32, orig_shape=shape, **wide)
    return TensorCoreSVDQuantW4A4Layout.dequantize(codes, params)


def _blocks(module: str, kind: str, codes: Tensor, scale: Tensor, second: Tensor | None) -> Tensor:
    """A weight with scales of blocks, as ComfyUI hands it to its library; the model knows the size without padding."""
    each = 16 if kind == "nvfp4" else 32
    width = codes.shape[1] * (2 if kind == "nvfp4" else 1)
    if len(codes) % each or width % each or scale.shape != (-(-len(codes) // 128) * 128, -(-width // each // 4) * 4):
        raise Refused(f"{module}: {kind} is padded, and so are its scales: {codes.shape}, {scale.shape}")
    shape = (len(codes), width)
    if kind == "nvfp4":
        if codes.dtype != torch.uint8 or scale.dtype != torch.float8_e4m3fn or second is None or second.shape != ():
            raise Refused(f"{module}: {codes.dtype} {scale.dtype} and one number")
        four = TensorCoreNVFP4Layout.Params(scale=second, block_scale=scale, orig_dtype=torch.float32, orig_shape=shape)
        return TensorCoreNVFP4Layout.dequantize(codes, four)
    if codes.dtype != torch.float8_e4m3fn or scale.dtype != torch.uint8 or second is not None:  # `to` would change E8M0
        raise Refused(f"{module}: {codes.dtype} {scale.dtype}")
    eight = TensorCoreMXFP8Layout.Params(
        scale=scale.view(torch.float8_e8m0fnu), orig_dtype=torch.float32, orig_shape=shape
    )
    return TensorCoreMXFP8Layout.dequantize(codes, eight)
