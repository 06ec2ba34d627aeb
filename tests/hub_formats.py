"""Layers in the formats of quantized folders on the hub, made from descriptions of the formats.

Each maker gets a float weight, [out, in], and returns the tensors of its layer, by the last word of their names, and
the weight that they stand for in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
E4M3 = torch.float8_e4m3fn
Made = tuple[dict[str, Tensor], Tensor]


def dense(codes: Tensor, bits: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Codes of each row, [rows, n], one after another from the low bits on, as numbers of `dtype`."""
    ones = (codes.numpy().astype(np.uint8)[..., None] >> np.arange(bits)) & 1
    whole = np.packbits(ones.reshape(len(codes), -1), axis=1, bitorder="little")
    return torch.from_numpy(np.ascontiguousarray(whole)).view(dtype)


def _codes(
    weight: Tensor, bits: int, *, symmetric: bool = False, group: int = GROUP, groups: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [out, in], scales (float16) and zeros [out, groups], and the weight that they stand for."""
    of = torch.arange(weight.shape[1]) // group if groups is None else groups.long()
    count, top = int(of.max()) + 1, 2**bits - 1
    codes, values = torch.zeros_like(weight, dtype=torch.int64), torch.zeros_like(weight, dtype=torch.float32)
    scales, zeros = torch.ones(len(weight), count), torch.full((len(weight), count), 2 ** (bits - 1))
    for one in range(count):
        some = weight[:, of == one].float()
        low, high = some.amin(1), some.amax(1)
        if symmetric:
            scale = some.abs().amax(1) * 2 / top
        else:
            scale = (high - low) / top
            zeros[:, one] = (-low / scale.clamp(min=1e-6)).round().clamp(1, top)
        scales[:, one] = scale.clamp(min=1e-6)
        scales[:, one] = scales[:, one].half().float().clamp(min=1e-6)
        code = (some / scales[:, one, None] + zeros[:, one, None]).round().clamp(0, top).long()
        codes[:, of == one] = code
        values[:, of == one] = (code - zeros[:, one, None]) * scales[:, one, None].half().float()
    return codes, scales.half(), zeros, values


def gptq(bits: int, *, less: int = 1, symmetric: bool = False, shuffled: bool = False) -> Callable[[Tensor], Made]:
    def make(weight: Tensor) -> Made:
        columns = weight.shape[1]
        groups = torch.arange(columns) // GROUP
        if shuffled:
            groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        codes, scales, zeros, values = _codes(weight, bits, symmetric=symmetric, groups=groups)
        layer = {
            "qweight": dense(codes, bits).T,
            "qzeros": dense((zeros - less).T.contiguous(), bits),
            "scales": scales.T,
            "g_idx": groups.to(torch.int32),
        }
        return layer, values

    return make


def awq(weight: Tensor) -> Made:
    codes, scales, zeros, values = _codes(weight, 4)
    layer = {"qweight": _awq(codes.T), "qzeros": _awq(zeros.T), "scales": scales.T}
    return layer, values


def _awq(codes: Tensor) -> Tensor:
    words = torch.zeros(len(codes), codes.shape[1] // 8, dtype=torch.int64)
    for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= codes[:, column::8].long() << 4 * nibble
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def compressed(bits: int, *, symmetric: bool = True, group: int = GROUP) -> Callable[[Tensor], Made]:
    def make(weight: Tensor) -> Made:
        width = weight.shape[1] if group < 0 else group
        codes, scales, zeros, values = _codes(weight, bits, symmetric=symmetric, group=width)
        layer = {
            "weight_packed": dense(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        return layer if symmetric else layer | {"weight_zero_point": dense(zeros.T.contiguous(), bits).T}, values

    return make


def int8(*, whole: bool = False, symmetric: bool = True) -> Callable[[Tensor], Made]:
    def make(weight: Tensor) -> Made:
        if whole:
            scale = (weight.float().abs().max() / 127).reshape(1).bfloat16()
            codes = (weight.float() / scale.float()).round().clamp(-128, 127)
            return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale.float()
        codes, scales, zeros, values = _codes(weight, 8, symmetric=symmetric, group=weight.shape[1])
        layer = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
        return layer if symmetric else layer | {"weight_zero_point": (zeros - 128).to(torch.int8)}, values

    return make


def nvfp4(weight: Tensor) -> Made:
    from diffusers.quantizers.bfl.utils import quantize_nvfp4

    codes, scale, factor = quantize_nvfp4(weight.float())
    whole = factor.float().reciprocal().reshape(1)
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = torch.cat([levels, -levels])
    values = torch.stack([levels[codes.long() & 15], levels[codes.long() >> 4]], -1).flatten(1)
    values = values.view(len(weight), -1, 16) * (scale.float() / whole).unsqueeze(-1)
    return {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": whole}, values.flatten(1)


def mxfp4(weight: Tensor) -> Made:
    blocks = weight.float().view(len(weight), -1, 32)
    exponents = blocks.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = torch.cat([levels, -levels])
    steps = 2.0 ** exponents.unsqueeze(-1)
    codes = (blocks / steps).unsqueeze(-1).sub(levels).abs().argmin(-1)
    values = (levels[codes] * steps).view(weight.shape)
    flat = codes.to(torch.uint8).view(weight.shape)
    layer = {"weight_packed": flat[:, ::2] | flat[:, 1::2] << 4, "weight_scale": (exponents + 127).to(torch.uint8)}
    return layer, values


def mxfp6(weight: Tensor) -> Made:
    """compressed-tensors' E2M3: four codes, of a sign and five bits, in three bytes."""
    blocks = weight.float().view(len(weight), -1, 32)
    steps = 2.0 ** (exponents := (blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 7.5).log2().ceil())
    levels = torch.tensor([n / 8 if n < 8 else (1 + n % 8 / 8) * 2 ** (n // 8 - 1) for n in range(32)])
    levels = torch.cat([levels, -levels])
    codes = (blocks / steps).unsqueeze(-1).sub(levels).abs().argmin(-1)
    packed = dense(codes.view(weight.shape), 6).contiguous().view(torch.uint8)
    layer = {"weight_packed": packed, "weight_scale": (exponents.squeeze(-1) + 127).to(torch.uint8)}
    return layer, (levels[codes] * steps).view(weight.shape)


def mxfp8_of_transformers(weight: Tensor) -> Made:
    layer, values = mxfp8(weight)
    return {"weight": layer["weight"], "weight_scale_inv": layer["weight_scale"]}, values


def mxfp8(weight: Tensor) -> Made:
    blocks = weight.float().view(len(weight), -1, 32)
    exponents = (blocks.abs().amax(-1).clamp(min=1e-30) / 448).log2().ceil()
    steps = 2.0 ** exponents.unsqueeze(-1)
    codes = (blocks / steps).to(E4M3)
    layer = {"weight": codes.view(weight.shape), "weight_scale": (exponents + 127).to(torch.uint8)}
    return layer, (codes.float() * steps).view(weight.shape)


def float8(rows: int, columns: int, *, key: str = "weight_scale_inv") -> Callable[[Tensor], Made]:
    """One scale for each block of so many rows and columns; 0 for all of them."""

    def make(weight: Tensor) -> Made:
        down, across = rows or len(weight), columns or weight.shape[1]
        grid = (-(-len(weight) // down), -(-weight.shape[1] // across))
        scale, codes, values = torch.ones(grid), torch.zeros(weight.shape, dtype=E4M3), torch.zeros(weight.shape)
        for i in range(grid[0]):
            for j in range(grid[1]):
                place = (slice(i * down, (i + 1) * down), slice(j * across, (j + 1) * across))
                scale[i, j] = (weight[place].float().abs().max() / 448).clamp(min=1e-6)
                codes[place] = (weight[place].float() / scale[i, j]).to(E4M3)
                values[place] = codes[place].float() * scale[i, j]
        return {"weight": codes, key: scale.reshape(()) if grid == (1, 1) and not rows else scale}, values

    return make


def float8_by_row(weight: Tensor) -> Made:
    """AutoRound's: a scale of each row, of one dimension, in bfloat16."""
    scale = (weight.float().abs().amax(1) / 448).clamp(min=1e-6).bfloat16()
    codes = (weight.float() / scale.float().unsqueeze(1)).clamp(-448, 448).to(E4M3)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float().unsqueeze(1)


def hqq(bits: int, *, axis: int = 1) -> Callable[[Tensor], Made]:
    def make(weight: Tensor) -> Made:
        matrix = weight.float().reshape((-1, 64) if axis else (64, -1))
        low, high = matrix.amin(axis, keepdim=True), matrix.amax(axis, keepdim=True)
        scale = ((high - low) / (2**bits - 1)).clamp(min=1e-6).bfloat16()
        zero = (-low / scale.float()).bfloat16()
        codes = (matrix / scale.float() + zero.float()).round().clamp(0, 2**bits - 1).long()
        values = ((codes - zero.float()) * scale.float()).view(weight.shape)
        each, top = (10, 27) if bits == 3 else (8 // bits, 8 - bits)
        padded = torch.cat([codes, codes.new_zeros(-len(codes) % each, codes.shape[1])]).view(each, -1, codes.shape[1])
        packed = sum((padded[place] << top - bits * place for place in range(each)), start=torch.zeros((), dtype=int))
        layer = {
            "W_q": packed.to(torch.int32 if bits == 3 else torch.uint8),
            "scale": scale,
            "zero": zero,
            "nbits": torch.tensor(bits, dtype=torch.int32),
            "axis": torch.tensor(axis, dtype=torch.int32),
            "shape": torch.tensor(weight.shape),
            "group_size": torch.tensor(64, dtype=torch.int32),
            "packing": torch.tensor(list(f"{bits}bit_u8".encode()), dtype=torch.uint8),
            "view_as_float": torch.tensor(0, dtype=torch.uint8),
            "quant_scale": torch.tensor(0, dtype=torch.uint8),
        }
        return layer, values

    return make


@dataclass(frozen=True)
class Kind:
    """A format.

    Attributes:
        quant: the scheme that it is. words: in the evidence. config: the folder's quantization_config.
        make: see the module. exact: whether the weight is the same in every bit.
    """

    quant: str
    words: str
    config: Mapping[str, Any]
    make: Callable[[Tensor], Made]
    exact: bool = True


def _gptq(bits: int = 4, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": False, **more}


def _ct(bits: int, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int", "symmetric": True}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"], **more}


def _auto(packing: str) -> dict[str, Any]:
    return {"quant_method": "auto-round", "bits": 4, "sym": False, "packing_format": packing}


def _hqq(bits: int) -> dict[str, Any]:
    return {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": bits, "group_size": 64}}}


_AUTO_FP8 = {"quant_method": "auto-round", "bits": 8, "data_type": "fp", "act_bits": 16, "sym": True}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
KINDS: Mapping[str, Kind] = {
    "fp8 blocks": Kind("fp8", "weight_scale_inv", {**_FP8, "weight_block_size": [128, 128]}, float8(128, 128)),
    "fp8 small blocks": Kind("fp8", "weight_scale_inv", {**_FP8, "weight_block_size": [16, 32]}, float8(16, 32)),
    "fp8 whole": Kind("fp8", "weight_scale_inv", {**_FP8, "weight_block_size": None}, float8(0, 0)),
    "fp8 mxfp8": Kind("mxfp8", "MXFP8", {**_FP8, "weight_block_size": [1, 32]}, mxfp8_of_transformers),
    "fbgemm": Kind("fp8", "weight_scale", {"quant_method": "fbgemm_fp8"}, float8(1, 0, key="weight_scale")),
    "ct fp8 rows": Kind("fp8", "weight_scale", _ct(8, format="float-quantized"), float8(1, 0, key="weight_scale")),
    "ct fp8 blocks": Kind("fp8", "weight_scale", _ct(8), float8(128, 128, key="weight_scale")),
    "ct w4a16": Kind("hub-int4", "compressed-tensors: 4-bit", _ct(4, format="pack-quantized"), compressed(4)),
    "ct w4a16 asymmetric": Kind("hub-int4", "compressed-tensors: 4-bit", _ct(4), compressed(4, symmetric=False)),
    "ct w3a16": Kind("hub-int3", "compressed-tensors: 3-bit", _ct(3), compressed(3, symmetric=False)),
    "ct w8a16": Kind("hub-int8", "a scale for each row", _ct(8), compressed(8, group=-1)),
    "ct w8a8": Kind("int8_row", "a scale for each row", _ct(8, format="int-quantized"), int8()),
    "ct w8a8 whole": Kind("int8_tensor", "one scale", _ct(8), int8(whole=True)),
    "ct w8a8 asymmetric": Kind("hub-int8", "compressed-tensors: 8-bit", _ct(8), int8(symmetric=False)),
    "ct mxfp4": Kind("mxfp4", "MXFP4", _ct(4, format="mxfp4-pack-quantized"), mxfp4),
    "ct mxfp6": Kind("hub-int7", "MXFP6", _ct(6, format="mxfp6-pack-quantized"), mxfp6),
    "ct w6a16 asymmetric": Kind("hub-int6", "compressed-tensors: 6-bit", _ct(6), compressed(6, symmetric=False)),
    "ct mxfp8": Kind("mxfp8", "MXFP8", _ct(8, format="mxfp8-quantized"), mxfp8),
    "ct nvfp4": Kind("comfy:nvfp4", "NVFP4", _ct(4, format="nvfp4-pack-quantized"), nvfp4, exact=False),
    "gptq": Kind("hub-int4", "GPTQ, as its config.json says, zero points less one", _gptq(), gptq(4)),
    "gptq symmetric": Kind("hub-int4", "GPTQ", _gptq() | {"sym": True}, gptq(4, symmetric=True)),
    "gptq shuffled": Kind("hub-int4", "GPTQ", _gptq(desc_act=True), gptq(4, shuffled=True)),
    "gptq v2": Kind("hub-int4", "zero points as they are", _gptq(checkpoint_format="gptq_v2"), gptq(4, less=0)),
    "gptq 8": Kind("hub-int8", "8-bit", _gptq(8), gptq(8)),
    "gptq 3": Kind("hub-int3", "3-bit", _gptq(3), gptq(3, shuffled=True)),
    "gptq 2": Kind("hub-int2", "2-bit", _gptq(2), gptq(2)),
    "awq": Kind("hub-int4", "AWQ", {"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
    "auto-round": Kind("hub-int4", "AutoRound", _auto("auto_round"), gptq(4, less=0)),
    "auto-round gptq": Kind("hub-int4", "AutoRound", _auto("auto_round:auto_gptq"), gptq(4)),
    "auto-round awq": Kind("hub-int4", "AWQ's order, of auto-round", _auto("auto_round:auto_awq"), awq),
    "auto-round fp8": Kind("fp8", "weight_scale", _AUTO_FP8, float8(0, 0, key="weight_scale")),
    "auto-round fp8 rows": Kind("fp8", "weight_scale", _AUTO_FP8, float8_by_row),
    "auto-round fp8 blocks": Kind("fp8", "weight_scale_inv", _AUTO_FP8, float8(128, 128)),
    "auto-round mxfp8": Kind("mxfp8", "MXFP8", {**_AUTO_FP8, "data_type": "mx_fp"}, mxfp8),
    "hqq": Kind("hub-int4", "groups of 64 along axis 1", _hqq(4), hqq(4)),
    "hqq axis 0": Kind("hub-int4", "groups of 64 along axis 0", _hqq(4), hqq(4, axis=0)),
    "hqq 8": Kind("hub-int8", "HQQ: 8-bit", _hqq(8), hqq(8)),
    "hqq 3": Kind("hub-int3", "HQQ: 3-bit", _hqq(3), hqq(3)),
    "hqq 2": Kind("hub-int2", "HQQ: 2-bit", _hqq(2), hqq(2)),
}


def is_packable(key: str, tensor: Tensor) -> bool:
    """Whether it is the weight of a linear layer that the formats' usual groups fit."""
    is_table = "embed" in key or "shared" in key or "relative_attention_bias" in key
    return key.endswith(".weight") and tensor.ndim == 2 and not is_table and not any(n % 64 for n in tensor.shape)


def rewrite(folder: Path, kind: Kind) -> dict[str, Tensor]:
    """Rewrite a component's folder in a format; the weights that it then stands for, by name, in float32."""
    (file,) = folder.glob("*.safetensors")
    tensors: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for key, tensor in load_file(file).items():
        if not is_packable(key, tensor):
            tensors[key] = tensor
            continue
        layer, values[key] = kind.make(tensor)
        tensors |= {key.removesuffix("weight") + last: part.contiguous() for last, part in layer.items()}
    assert values
    save_file(tensors, file, metadata={"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": dict(kind.config)}))
    return values
