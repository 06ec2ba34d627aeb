"""Layers and models as Nunchaku's files have them, written by the formulas of their order; the golden files hold it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from sdquant.core import code_tables

SHIFT = 0.171875
Layer = tuple[dict[str, Tensor], Tensor, Tensor | None]  # its tensors, its weight and bias as floats


def scattered(values: Tensor, at: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [n, k], each put to its place in the result, which is flat."""
    out = torch.empty(values.numel(), dtype=dtype)
    out[at.reshape(-1)] = values.reshape(-1).to(dtype)
    return out


def _grid(n: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.arange(n)[:, None], torch.arange(k)[None]


def codes_at(height: int, width: int) -> Tensor:
    """Where qweight has the code of each weight, [n, k], in half bytes."""
    n, k = _grid(height, width)
    word = (n // 128) * (width // 64) + k // 64
    for digit, base in (((n % 128) // 16, 8), (n % 8, 8), ((k % 32) // 8, 4), ((n % 16) // 8, 2), ((k % 64) // 32, 2)):
        word = word * base + digit
    return word * 8 + k % 8


def codes(values: Tensor) -> Tensor:
    """4-bit codes [n, k] as qweight, int8 [n, k / 2]."""
    height, width = values.shape
    nibbles = scattered(values & 15, codes_at(height, width), torch.uint8).view(-1, 2)
    return (nibbles[:, 0] | nibbles[:, 1] << 4).view(torch.int8).view(height, width // 2)


def scales(values: Tensor) -> Tensor:
    """Scales [n, groups of 64] as wscales; a vector (bias, smooth, wcscales) is one of one group."""
    height, groups = values.shape
    n, g = _grid(height, groups)
    at = (n // 128) * groups + g
    for digit, base in (((n % 128) // 16, 8), ((n % 8) // 2, 4), ((n % 16) // 8, 2), (n % 2, 2)):
        at = at * base + digit
    return scattered(values, at, values.dtype).view(groups, height)


def vector(values: Tensor) -> Tensor:
    return scales(values[:, None])[0]


def small_scales(values: Tensor) -> Tensor:
    """Scales [n, groups of 16], float8, as wscales."""
    return small_positions(values.view(torch.uint8)).view(values.dtype)


def small_positions(values: Tensor) -> Tensor:
    """The same of integers."""
    height, groups = values.shape
    n, g = _grid(height, groups)
    at = (n // 128) * (groups // 4) + g // 4
    for digit, base in ((n % 8, 8), ((n % 32) // 8, 4), ((n % 128) // 32, 4), (g % 4, 4)):
        at = at * base + digit
    return scattered(values, at, values.dtype).view(groups, height)


def _factor(values: Tensor, row: tuple[Tensor, ...], inner: tuple[Tensor, ...], at: Tensor) -> Tensor:
    """The 16 x 16 tiles of a factor: `row` is (half, lane), `inner` (half, quarter, last)."""
    for digit, base in ((row[1], 8), (inner[1], 4), (row[0], 2), (inner[0], 2), (inner[2], 2)):
        at = at * base + digit
    return scattered(values, at, values.dtype).view(values.shape)


def down(values: Tensor) -> Tensor:
    k, r = _grid(*values.shape)
    at = (k // 16) * (values.shape[1] // 16) + r // 16
    return _factor(values, ((r % 16) // 8, r % 8), ((k % 16) // 8, (k % 8) // 2, k % 2), at)


def up(values: Tensor) -> Tensor:
    n, r = _grid(*values.shape)
    at = (n // 16) * (values.shape[1] // 16) + r // 16
    return _factor(values, ((n % 16) // 8, n % 8), ((r % 16) // 8, (r % 8) // 2, r % 2), at)


def awq_codes_at(height: int, width: int) -> Tensor:
    """Where AWQ's qweight has the code of each weight, [n, k], in half bytes."""
    n, k = _grid(height, width)
    word = (((n // 4) * (width // 64) + k // 64) * 4 + n % 4) * 16 + (k % 64) // 32 * 8 + k % 8
    return word * 4 + (k % 32) // 8


def awq_codes(values: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
    """4-bit codes [n, k] as AWQ's qweight."""
    height, width = values.shape
    nibbles = scattered(values, awq_codes_at(height, width), torch.uint8).view(-1, 2)
    return (nibbles[:, 0] | nibbles[:, 1] << 4).view(dtype).view(height // 4, -1)


def interleaved(values: Tensor, chunks: int) -> Tensor:
    return values.view(chunks, -1, *values.shape[1:]).transpose(0, 1).reshape(values.shape)


@dataclass(frozen=True)
class Names:
    """How a file spells the parts of a layer: the first version's or the second's."""

    smooth: str = "smooth"
    down: str = "lora_down"
    up: str = "lora_up"


FF = ("ff", "ff_context")
V1, V2 = Names(), Names("smooth_factor", "proj_down", "proj_up")


def smoothing(weight: Tensor) -> Tensor:
    return weight.float().abs().amax(0).clamp(min=1e-3).sqrt().bfloat16()


def svdquant(
    weight: Tensor, bias: Tensor | None, *, nvfp4: bool = False, shifted: bool = False, names: Names = V1,
    smooth: Tensor | None = None,
) -> Layer:  # fmt: skip
    """A layer with a branch of rank 16, quantized simply."""
    weight, height = weight.float(), len(weight)
    smooth = smoothing(weight) if smooth is None else smooth
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    first, second = (u[:, :16] * s[:16]).bfloat16(), v[:16].T.contiguous().bfloat16()
    rest = (weight - first.float() @ second.float().T) * smooth.float()
    file = {"qweight": rest, names.smooth: vector(smooth), names.down: down(second), names.up: up(first)}
    file[f"{names.smooth}_orig"] = file[names.smooth].clone()
    if nvfp4:
        rows = (rest.abs().amax(1).clamp(min=1e-8) / (6 * 448)).bfloat16()
        groups = (rest / rows.float()[:, None]).view(height, -1, 16)
        scale = (groups.abs().amax(-1) / 6).to(torch.float8_e4m3fn)
        table = code_tables.code_table("e2m1", "float32", torch.device("cpu"))
        steps = scale.float().clamp(min=1e-6).unsqueeze(-1)
        each = ((groups / steps).unsqueeze(-1) - table).abs().argmin(-1)
        residual = (table[each] * scale.float().unsqueeze(-1)).flatten(1) * rows.float()[:, None]
        file |= {"qweight": codes(each.flatten(1)), "wscales": small_scales(scale), "wcscales": vector(rows)}
        file["wtscale"] = torch.ones(1, dtype=torch.bfloat16)
    else:
        groups = rest.view(height, -1, 64)
        scale = (groups.abs().amax(-1).clamp(min=1e-8) / 7).bfloat16()
        each = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7).to(torch.int8)
        residual = (each * scale.float().unsqueeze(-1)).flatten(1)
        file |= {"qweight": codes(each.flatten(1)), "wscales": scales(scale)}
    residual = residual / smooth.float()
    floats = None
    if bias is not None:
        shift = SHIFT * residual.sum(1) if shifted and not nvfp4 else torch.zeros(height)
        stored = (bias.float() - shift).bfloat16()
        file["bias"], floats = vector(stored), stored.float() + shift
    return file, residual + first.float() @ second.float().T, floats


def awq(weight: Tensor, bias: Tensor, splits: int = 1) -> Layer:
    """A modulation, its rows interleaved, with 1 added to what scales."""
    groups = weight.float().view(len(weight), -1, 64)
    scale = ((groups.amax(-1) - groups.amin(-1)).clamp(min=1e-8) / 15).bfloat16()
    zero = (-7 * scale.float()).bfloat16()
    each = ((groups - zero.float().unsqueeze(-1)) / scale.float().unsqueeze(-1)).round().clamp(0, 15)
    floats = (each * scale.float().unsqueeze(-1) + zero.float().unsqueeze(-1)).flatten(1)
    stored = bias.float().clone().view(splits, -1)
    added = torch.zeros_like(stored)
    for chunk in {1, splits - 2} if splits > 1 else ():
        added[chunk] = 1
    stored = (stored + added).bfloat16()
    file = {
        "qweight": awq_codes(interleaved(each.flatten(1), splits)), "wscales": interleaved(scale, splits).T,
        "wzeros": interleaved(zero, splits).T, "bias": interleaved(stored.view(-1), splits),
    }  # fmt: skip
    return file, floats, (stored.float() - added).view(-1)


class Model:
    """A model in the making: the tensors of a file of Nunchaku's, and of one with the floats that these stand for."""

    def __init__(self, weights: Mapping[str, Tensor], *, nvfp4: bool = False, names: Names = V1) -> None:
        self.rest, self.nvfp4, self.names = dict(weights), nvfp4, names
        self.quantized: set[str] = set()  # weights
        self.file: dict[str, Tensor] = {}
        self.floats: dict[str, Tensor] = {}

    def _taken(self, name: str) -> tuple[Tensor, Tensor | None]:
        return self.rest.pop(f"{name}.weight"), self.rest.pop(f"{name}.bias", None)

    def _put(self, stored: str, layer: Layer, names: tuple[str, ...]) -> None:
        tensors, weight, bias = layer
        self.file |= {f"{stored}.{key}": tensor.contiguous() for key, tensor in tensors.items()}
        for name, rows in zip(names, weight.chunk(len(names)), strict=True):
            self.floats[f"{name}.weight"] = rows
            self.quantized.add(f"{name}.weight")
        if bias is not None:
            for name, values in zip(names, bias.chunk(len(names)), strict=True):
                self.floats[f"{name}.bias"] = values

    def svdquant(self, stored: str, *names: str, shifted: bool = False) -> None:
        """One layer of the rows of several."""
        weights, biases = zip(*map(self._taken, names), strict=True)
        bias = None if biases[0] is None else torch.cat(biases)
        self._put(
            stored, svdquant(torch.cat(weights), bias, nvfp4=self.nvfp4, shifted=shifted, names=self.names), names
        )

    def cut(self, one: str, other: str, name: str, width: int, *, shifted: bool = True) -> None:
        """Two layers of the columns of one, and whether the second is shifted."""
        weight, bias = self._taken(name)
        left = svdquant(weight[:, :width], None, nvfp4=self.nvfp4, names=self.names)
        right = svdquant(weight[:, width:], bias, nvfp4=self.nvfp4, shifted=shifted, names=self.names)
        self._put(one, left, (name,))
        self._put(other, right, (name,))
        self.floats[f"{name}.weight"] = torch.cat([left[1], right[1]], dim=1)

    def stacked(self, one: str, other: str, name: str, height: int) -> None:
        """Two layers of the rows of one, with its smoothing."""
        weight, bias = self._taken(name)
        assert bias is None
        for at, rows in ((one, weight[:height]), (other, weight[height:])):
            self._put(at, svdquant(rows, None, nvfp4=self.nvfp4, names=self.names, smooth=smoothing(weight)), (name,))
            self.floats.setdefault(f"rows of {name}", self.floats[f"{name}.weight"])
        whole = self.floats.pop(f"rows of {name}"), self.floats[f"{name}.weight"]
        self.floats[f"{name}.weight"] = torch.cat(whole)

    def padded(
        self, stored: str, weight: Tensor, bias: Tensor | None, parts: Mapping[str, tuple[Tensor, tuple[int, ...]]]
    ) -> None:
        """A layer whose rows and columns are filled up to whole tiles. parts: rows and shapes of layers in it."""
        rows, columns = (-size % 128 for size in weight.shape)
        whole = F.pad(weight, (0, columns, 0, rows))
        biases = None if bias is None else F.pad(bias, (0, rows))
        tensors, floats, added = svdquant(whole, biases, nvfp4=self.nvfp4, names=self.names)
        self.file |= {f"{stored}.{key}": tensor.contiguous() for key, tensor in tensors.items()}
        for name, (at, shape) in parts.items():
            self.floats[f"{name}.weight"] = floats[at, : shape[1]].reshape(shape)
            self.quantized.add(f"{name}.weight")
            if added is not None:
                self.floats[f"{name}.bias"] = added[at]

    def awq(self, name: str, splits: int = 1) -> None:
        weight, bias = self._taken(name)
        assert bias is not None
        self._put(name, awq(weight, bias, splits), (name,))

    def plain(self, stored: str, name: str) -> None:
        self.file[stored] = self.floats[name] = self.rest.pop(name)

    def save(self, path: Path, metadata: dict[str, Any] | None) -> Path:
        """The file, and beside it `floats.safetensors`."""
        self.file |= self.rest
        self.floats |= self.rest
        texts = {key: text if isinstance(text, str) else json.dumps(text) for key, text in (metadata or {}).items()}
        save_file({key: tensor.contiguous() for key, tensor in self.file.items()}, path, texts)
        floats = {key: tensor.float().contiguous() for key, tensor in self.floats.items()}
        save_file(floats, path.with_name("floats.safetensors"))
        return path


def flux(weights: Mapping[str, Tensor], *, nvfp4: bool = False) -> Model:
    """FLUX.1 with one block of each kind."""
    model = Model(weights, nvfp4=nvfp4)
    block, single = "transformer_blocks.0.", "single_transformer_blocks.0."
    model.svdquant(f"{block}qkv_proj", *(f"{block}attn.to_{name}" for name in "qkv"))
    model.svdquant(f"{block}qkv_proj_context", *(f"{block}attn.add_{name}_proj" for name in "qkv"))
    model.svdquant(f"{block}out_proj", f"{block}attn.to_out.0")
    model.svdquant(f"{block}out_proj_context", f"{block}attn.to_add_out")
    for theirs, ours in (("mlp", "ff"), ("mlp_context", "ff_context")):
        model.svdquant(f"{block}{theirs}_fc1", f"{block}{ours}.net.0.proj")
        model.svdquant(f"{block}{theirs}_fc2", f"{block}{ours}.net.2", shifted=True)
    for name in ("norm1", "norm1_context"):
        model.awq(f"{block}{name}.linear", 6)
    for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
        model.plain(f"{block}{name}.weight", f"{block}attn.{name}.weight")
    model.svdquant(f"{single}qkv_proj", *(f"{single}attn.to_{name}" for name in "qkv"))
    model.svdquant(f"{single}mlp_fc1", f"{single}proj_mlp")
    model.cut(f"{single}out_proj", f"{single}mlp_fc2", f"{single}proj_out", 256)
    model.awq(f"{single}norm.linear", 3)
    for name in ("norm_q", "norm_k"):
        model.plain(f"{single}{name}.weight", f"{single}attn.{name}.weight")
    return model


def metadata(config: Any, *, nvfp4: bool = False, name: str = "NunchakuFluxTransformer2dModel") -> dict[str, Any]:
    """What the single files say of themselves."""
    kind = "fp4_e2m1_all" if nvfp4 else "int4"
    return {
        "model_class": name, "config": config, "comfy_config": {"model_class": "Flux", "model_config": {}},
        "quantization_config": {
            "method": "svdquant", "rank": 16, "weight": {"dtype": kind, "group_size": 16 if nvfp4 else 64},
        },
    }  # fmt: skip


def qwen_image(weights: Mapping[str, Tensor]) -> Model:
    """Qwen-Image with one block."""
    model, block = Model(weights, names=V2), "transformer_blocks.0."
    model.svdquant(f"{block}attn.to_qkv", *(f"{block}attn.to_{name}" for name in "qkv"))
    model.svdquant(f"{block}attn.add_qkv_proj", *(f"{block}attn.add_{name}_proj" for name in "qkv"))
    for name in ("attn.to_out.0", "attn.to_add_out", "img_mlp.net.0.proj", "txt_mlp.net.0.proj"):
        model.svdquant(block + name, block + name)
    for stream in ("img", "txt"):
        model.svdquant(f"{block}{stream}_mlp.net.2", f"{block}{stream}_mlp.net.2", shifted=True)
        model.awq(f"{block}{stream}_mod.1", 6)
    return model


def z_image(weights: Mapping[str, Tensor]) -> Model:
    """Z-Image with a block of each kind, without its refiners (`skip_refiners`), which are as its runtime has them."""
    model = Model(weights, names=V2)
    for block in ("noise_refiner.0.", "context_refiner.0."):
        upper = [model.rest.pop(f"{block}feed_forward.{name}.weight") for name in ("w3", "w1")]
        model.file[f"{block}feed_forward.net.0.proj.weight"] = torch.cat(upper)
        for name, tensor in zip(("w3", "w1"), upper, strict=True):
            model.floats[f"{block}feed_forward.{name}.weight"] = tensor
        model.plain(f"{block}feed_forward.net.2.weight", f"{block}feed_forward.w2.weight")
    block = "layers.0."
    model.svdquant(f"{block}attention.to_qkv", *(f"{block}attention.to_{name}" for name in "qkv"))
    model.svdquant(f"{block}attention.to_out.0", f"{block}attention.to_out.0")
    model.svdquant(f"{block}feed_forward.net.0.proj", f"{block}feed_forward.w3", f"{block}feed_forward.w1")
    model.svdquant(f"{block}feed_forward.net.2", f"{block}feed_forward.w2")
    return model


def flux2(weights: Mapping[str, Tensor]) -> Model:
    """FLUX.2 with one block of each kind, under the names of tonera's files."""
    model, block, single = Model(weights, names=V2), "transformer_blocks.0.", "single_transformer_blocks.0.attn."
    model.svdquant(f"{block}attn.to_qkv", *(f"{block}attn.to_{name}" for name in "qkv"))
    model.svdquant(f"{block}attn.to_added_qkv", *(f"{block}attn.add_{name}_proj" for name in "qkv"))
    for name in ("attn.to_out.0", "attn.to_add_out", *(f"{ff}.linear_{to}" for ff in FF for to in ("in", "out"))):
        model.svdquant(block + name, block + name)
    width = len(weights[f"{single}to_out.weight"])
    model.stacked(f"{single}qkv_proj", f"{single}mlp_fc1", f"{single}to_qkv_mlp_proj", 3 * width)
    model.cut(f"{single}out_proj", f"{single}mlp_fc2", f"{single}to_out", width, shifted=False)
    return model


def flux2_of_before(weights: Mapping[str, Tensor]) -> Model:
    """The same under the names that FLUX.1 has, which other converters write."""
    model = flux2(weights)
    names = {
        "single_transformer_blocks.0.attn.": "single_transformer_blocks.0.", "attn.to_qkv": "qkv_proj",
        "attn.to_added_qkv": "qkv_proj_context", "attn.to_out.0": "out_proj", "attn.to_add_out": "out_proj_context",
        "ff.linear_in": "mlp_fc1", "ff.linear_out": "mlp_fc2", "ff_context.linear_in": "mlp_context_fc1",
        "ff_context.linear_out": "mlp_context_fc2", "0.attn.norm_": "0.norm_",
    }  # fmt: skip
    model.floats |= model.rest
    model.file |= model.rest
    model.rest = {}
    for theirs, ours in names.items():
        model.file = {key.replace(theirs, ours): tensor for key, tensor in model.file.items()}
    return model


def sana(weights: Mapping[str, Tensor], *, nvfp4: bool = False) -> Model:
    """SANA with one block: padded, keys and values by head in turns, the gated layer's halves channel by channel."""
    model, block = Model(weights, nvfp4=nvfp4), "transformer_blocks.0."
    width = weights[f"{block}scale_shift_table"].shape[1]
    padded, places = -(-width // 128) * 128, torch.arange(width)
    (q, _), (k, _), (v, _) = (model._taken(f"{block}attn1.to_{name}") for name in "qkv")
    heads = torch.stack([k.view(-1, 32, width), v.view(-1, 32, width)], dim=1).flatten(0, 2)
    qkv = torch.cat([F.pad(one, (0, 0, 0, size - len(one))) for one, size in ((q, padded), (heads, 2 * padded))])
    in_turn = padded + places // 32 * 64 + places % 32
    rows = {"to_q": places, "to_k": in_turn, "to_v": in_turn + 32}
    parts = {f"{block}attn1.{name}": (at, (width, width)) for name, at in rows.items()}
    model.padded(f"{block}attn.qkv_proj", qkv, None, parts)
    model.padded(f"{block}attn.pag_to_v", v, None, {})
    layers = {"attn.out_proj": "attn1.to_out.0", "cross_attn.q_linear": "attn2.to_q"}
    for theirs, ours in {**layers, "cross_attn.out_proj": "attn2.to_out.0"}.items():
        weight, bias = model._taken(block + ours)
        model.padded(block + theirs, weight, bias, {block + ours: (places, (width, width))})
    for last in ("weight", "bias"):
        both = [model.rest.pop(f"{block}attn2.to_{name}.{last}") for name in "kv"]
        model.file[f"{block}cross_attn.kv_linear.{last}"] = torch.cat(both)
        model.floats |= {f"{block}attn2.to_{name}.{last}": one for name, one in zip("kv", both, strict=True)}
    _gated(model, block, width)
    model.file[f"{block}attn.qkv_proj.bias"] = torch.zeros(3 * padded).bfloat16()  # as deepcompressor writes it
    return model


def _gated(model: Model, block: str, width: int) -> None:
    weight, bias = model._taken(f"{block}ff.conv_inverted")
    assert bias is not None
    hidden = len(bias) // 2
    more, turns = -hidden % 64, torch.arange(2 * hidden).view(2, -1).T.flatten()
    at = torch.empty_like(turns).index_copy_(0, turns, torch.arange(2 * hidden))
    inner = F.pad(weight.flatten(1)[turns], (0, 0, 0, 2 * more))
    parts = {f"{block}ff.conv_inverted": (at, (2 * hidden, width, 1, 1))}
    model.padded(f"{block}ff.inverted_conv", inner, F.pad(bias[turns], (0, 2 * more)), parts)
    weight, bias = model._taken(f"{block}ff.conv_depth")
    assert bias is not None
    model.floats |= {f"{block}ff.conv_depth.weight": weight, f"{block}ff.conv_depth.bias": bias}
    depth = F.pad(weight[turns].permute(0, 2, 3, 1), (0, 0, 0, 0, 0, 0, 0, 2 * more))
    model.file |= {
        f"{block}ff.depth_conv.weight": depth,
        f"{block}ff.depth_conv.bias": F.pad(bias[turns], (0, 2 * more)),
    }
    weight, _ = model._taken(f"{block}ff.conv_point")
    parts = {f"{block}ff.conv_point": (torch.arange(width), (width, hidden, 1, 1))}
    model.padded(f"{block}ff.point_conv", F.pad(weight.flatten(1), (0, more)), None, parts)


def sdxl(weights: Mapping[str, Tensor]) -> Model:
    """Stable Diffusion XL: its transformer blocks, but keys and values of the text."""
    model = Model(weights)
    for first in [name for name in weights if name.endswith("attn1.to_q.weight")]:
        block = first.removesuffix("attn1.to_q.weight")
        model.svdquant(f"{block}attn1.to_qkv", *(f"{block}attn1.to_{name}" for name in "qkv"))
        for name in ("attn1.to_out.0", "attn2.to_q", "attn2.to_out.0", "ff.net.0.proj", "ff.net.2"):
            model.svdquant(block + name, block + name)
    return model


def lite(weights: Mapping[str, Tensor], *, nvfp4: bool = False) -> Model:
    """Flux for diffusers' nunchaku_lite: its own layers, nothing shifted and no rows interleaved."""
    model = Model(weights, nvfp4=nvfp4, names=V2)
    for name in [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]:
        if re.search(r"norm1?(_context)?\.linear$", name) and name.startswith(("transformer_", "single_")):
            model.awq(name)
        elif re.search(r"_blocks\.0\.(attn\.(to|add)|ff|proj)", name):
            model.svdquant(name, name)
    return model
