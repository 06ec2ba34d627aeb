"""Layers as torchao writes them, by its formulas: parts, what the metadata says, and the weight as floats."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.quantizers.bfl.utils import dequantize_nvfp4, quantize_nvfp4
from safetensors.torch import load_file, save_file
from torch import Tensor

import sdquant
from sdquant.kernels.block_floats import tiled

Layer = tuple[dict[str, Tensor], dict[str, Any], Tensor]
WEIGHTS = "diffusion_pytorch_model.safetensors"


def dtype(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


def _integers(weight: Tensor, rows: int, columns: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and floats of blocks."""
    blocks = weight.view(len(weight) // rows, rows, -1, columns)
    scale = blocks.abs().amax((1, 3), keepdim=True) / most
    codes = (blocks / scale).round()
    return codes.view(weight.shape).to(torch.int8), scale.flatten(1), (codes * scale).view(weight.shape)


def _int8(whole: bool) -> Callable[[Tensor], Layer]:
    def make(weight: Tensor) -> Layer:
        block = [len(weight) if whole else 1, weight.shape[1]]
        codes, scale, floats = _integers(weight, block[0], block[1], 127)
        parts = {"qdata": codes, "scale": scale, "zero_point": torch.zeros_like(scale, dtype=torch.int8)}
        said = {"act_quant_kwargs": None, "reduce_range": False, "block_size": block, "dtype": dtype("bfloat16")}
        return parts, {"_type": "Int8Tensor", "_data": said}, floats

    return make


def _fp8(whole: bool) -> Callable[[Tensor], Layer]:
    def make(weight: Tensor) -> Layer:
        scale = weight.abs().amax(None if whole else 1, keepdim=not whole).reshape(-1, 1) / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        said = {"block_size": [len(weight) if whole else 1, weight.shape[1]], "mm_config": None}
        said |= {"act_quant_kwargs": {"_type": "QuantizeTensorToFloat8Kwargs", "_data": {}}, "dtype": dtype("bfloat16")}
        return {"qdata": codes, "scale": scale}, {"_type": "Float8Tensor", "_data": said}, codes.float() * scale

    return make


def _intx(weight: Tensor) -> Layer:
    """Asymmetric, in groups of 16."""
    groups = weight.view(len(weight), -1, 16)
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).bfloat16().float()
    zero = (-8 - (low / scale).round()).clamp(-8, 7)
    codes = ((groups / scale).round() + zero).clamp(-8, 7)
    parts = {
        "qdata": codes.flatten(1).to(torch.int8), "scale": scale.squeeze(-1).bfloat16(),
        "zero_point": zero.squeeze(-1).to(torch.int8),
    }  # fmt: skip
    said = {"target_dtype": dtype("int4"), "block_size": [1, 16], "dtype": dtype("bfloat16")}
    said["activation_quantization"] = None  # type: ignore[assignment]
    return parts, {"_type": "IntxUnpackedToInt8Tensor", "_data": said}, ((codes - zero) * scale).view(weight.shape)


def _int4(weight: Tensor) -> Layer:
    """Signed halves of bytes, and floats that are added."""
    groups = weight.view(len(weight), -1, 32)
    zero = groups.mean(-1, keepdim=True)
    scale = (groups - zero).abs().amax(-1, keepdim=True).clamp(min=1e-8) / 7
    codes = ((groups - zero) / scale).round().clamp(-8, 7)
    bits = codes.flatten(1).to(torch.int8) & 15
    parts = {
        "qdata": bits[:, ::2] | bits[:, 1::2] << 4, "scale": scale.squeeze(-1).T, "zero_point": zero.squeeze(-1).T,
    }  # fmt: skip
    said = {"block_size": [1, 32], "shape": list(weight.shape), "activation_dtype": dtype("bfloat16")}
    return parts, {"_type": "Int4Tensor", "_data": said}, (codes * scale + zero).view(weight.shape)


def _mxfp8(swizzled: bool) -> Callable[[Tensor], Layer]:
    def make(weight: Tensor) -> Layer:
        blocks = weight.view(len(weight), -1, 32)
        exponents = blocks.abs().amax(-1).clamp(min=1e-30).log2().floor() - 8
        codes = (blocks * 2 ** -exponents.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn)
        scale = (exponents + 127).to(torch.uint8)
        said = {
            "elem_dtype": dtype("float8_e4m3fn"), "block_size": 32, "orig_dtype": dtype("bfloat16"),
            "kernel_preference": None, "act_quant_kwargs": None, "is_swizzled_scales": swizzled,
        }  # fmt: skip
        parts = {
            "qdata": codes.view(weight.shape),
            "scale": (tiled(scale) if swizzled else scale).view(torch.float8_e8m0fnu),
        }
        floats = (codes.float() * 2 ** exponents.unsqueeze(-1)).view(weight.shape)
        return parts, {"_type": "MXTensor", "_data": said}, floats

    return make


def _mxfp4(swizzled: bool) -> Callable[[Tensor], Layer]:
    def make(weight: Tensor) -> Layer:
        blocks = weight.float().view(len(weight), -1, 32)
        exponents = blocks.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        least = (blocks.abs() * 2 ** -exponents.unsqueeze(-1)).unsqueeze(-1).sub(values).abs().argmin(-1)
        floats = (values[least] * blocks.sign() * 2 ** exponents.unsqueeze(-1)).view(weight.shape)
        codes = (least + 8 * (blocks < 0)).to(torch.uint8).view(weight.shape)
        scale = (exponents + 127).to(torch.uint8)
        said = {
            "elem_dtype": dtype("float4_e2m1fn_x2"), "block_size": 32, "orig_dtype": dtype("bfloat16"),
            "kernel_preference": None, "act_quant_kwargs": None, "is_swizzled_scales": swizzled,
        }  # fmt: skip
        stored = (tiled(scale) if swizzled else scale).view(torch.float8_e8m0fnu)
        return (
            {"qdata": codes[:, ::2] | codes[:, 1::2] << 4, "scale": stored},
            {"_type": "MXTensor", "_data": said},
            floats,
        )

    return make


def _nvfp4(swizzled: bool) -> Callable[[Tensor], Layer]:
    def make(weight: Tensor) -> Layer:
        codes, scale, factor = quantize_nvfp4(weight)
        said = {"block_size": 16, "orig_dtype": dtype("bfloat16"), "is_swizzled_scales": swizzled}
        stored = tiled(scale).view(torch.float8_e4m3fn) if swizzled else scale
        parts = {"qdata": codes, "scale": stored, "per_tensor_scale": factor.reshape(())}
        return parts, {"_type": "NVFP4Tensor", "_data": said}, dequantize_nvfp4(codes, scale, factor)

    return make


# The scheme of each, and how it is made.
KINDS: dict[str, tuple[str, Callable[[Tensor], Layer]]] = {
    "int8 row": ("int8_row", _int8(whole=False)), "int8 tensor": ("int8_tensor", _int8(whole=True)),
    "fp8 row": ("fp8", _fp8(whole=False)), "fp8 tensor": ("fp8", _fp8(whole=True)), "intx": ("hub-int4", _intx),
    "int4": ("hub-int4", _int4), "mxfp8": ("mxfp8", _mxfp8(swizzled=False)),
    "mxfp8 in tiles": ("mxfp8", _mxfp8(swizzled=True)), "nvfp4": ("comfy:nvfp4", _nvfp4(swizzled=False)),
    "mxfp4": ("mxfp4", _mxfp4(swizzled=False)), "mxfp4 in tiles": ("mxfp4", _mxfp4(swizzled=True)),
    "nvfp4 in tiles": ("comfy:nvfp4", _nvfp4(swizzled=True)),
}  # fmt: skip


def flattened(layers: Mapping[str, Layer | Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file of these weights, by name."""
    tensors: dict[str, Tensor] = {}
    metadata = {"format": "pt", "tensor_names": json.dumps(list(layers))}
    for name, layer in layers.items():
        if isinstance(layer, Tensor):
            tensors[name], metadata[name] = layer, json.dumps({"_type": "Tensor"})
            continue
        parts, said, _ = layer
        stem = f"{name.removesuffix('weight')}_weight_"
        tensors |= {stem + part: tensor.contiguous() for part, tensor in parts.items()}
        metadata[name] = json.dumps({**said, "_tensor_data_names": list(parts)})
    return tensors, metadata


def digits(folder: Path, kinds: list[str] | None = None, source: Path | None = None) -> dict[str, Tensor]:
    """Write a component with torchao's layers, by turns; return its weights as floats. source: digits-flux' one."""
    source = source or sdquant.demo.path("digits-flux") / "transformer"
    layers: dict[str, Layer | Tensor] = {}
    turns = itertools.cycle(KINDS[kind][1] for kind in kinds or KINDS)
    for name, tensor in load_file(source / WEIGHTS).items():
        fits = tensor.ndim == 2 and not any(size % 32 for size in tensor.shape)
        layers[name] = next(turns)(tensor.float()) if fits else tensor
    tensors, metadata = flattened(layers)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "torchao", "quant_type": {"default": {"_type": "FqnToConfig"}}}
    (folder / "config.json").write_text(json.dumps(config))
    return {name: layer if isinstance(layer, Tensor) else layer[2] for name, layer in layers.items()}
