"""One tiny quantized model as each ecosystem writes it, in memory, so that a test can spoil it and write it again.

It is a Flux transformer with a single block, of which two linear layers are quantized. `malformed_cases` has the rows
of what is spoiled.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import sdquant
from sdquant import backends
from sdquant.backends import comfy

from .foreign import WEIGHTS

CONFIG = {
    "patch_size": 1, "in_channels": 8, "num_layers": 0, "num_single_layers": 1, "attention_head_dim": 16,
    "num_attention_heads": 4, "joint_attention_dim": 64, "pooled_projection_dim": 64, "axes_dims_rope": (4, 6, 6),
}  # fmt: skip
BLOCK = "single_transformer_blocks.0."
STEM = f"{BLOCK}proj_mlp."
NAME = f"{STEM}weight"  # [256, 64], the weight that is damaged
OTHER = f"{BLOCK}proj_out.weight"  # [64, 320], quantized too
BIAS = f"{STEM}bias"
STATE = f"{NAME}.quant_state.bitsandbytes__"


def tiny(folder: Path) -> Path:
    """The float model, written into `folder`."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    FluxTransformer2DModel(**CONFIG).to(dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@dataclass
class Model:
    """A component as it lies on disk: tensors, the file's metadata, and the JSON files beside it."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    files: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Model:
        with safe_open(str(folder / WEIGHTS), framework="pt") as file:
            metadata = dict(file.metadata() or {})
        files = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
        return cls({key: tensor.clone() for key, tensor in load_file(folder / WEIGHTS).items()}, metadata, files)

    def write(self, folder: Path, *, lone: bool = False) -> Path:
        """Write it; the path of the weights. `lone`: without the JSON files."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        save_file({key: tensor.contiguous() for key, tensor in self.tensors.items()}, folder / WEIGHTS, self.metadata)
        for name, value in ({} if lone else self.files).items():
            (folder / name).write_text(json.dumps(value))
        return folder / WEIGHTS

    def copy(self) -> Model:
        return Model(dict(self.tensors), dict(self.metadata), copy.deepcopy(self.files))

    @property
    def own(self) -> dict[str, Any]:
        """What sdquant's metadata says."""
        made: dict[str, Any] = json.loads(self.metadata["sdquant"])
        return made


Change = Callable[[Model], None]


# Formats: what is quantized to what, and how it comes to look like a file of its ecosystem.


@dataclass(frozen=True)
class Format:
    """A quantized form of the tiny model.

    Attributes:
        scheme: what sdquant makes it with.
        parts: of the weight NAME, by a short name: the file's key.
        own: whether sdquant's metadata stays in it, so that it is read by that.
        then: what else makes it a file of its ecosystem.
    """

    scheme: str
    parts: Mapping[str, str]
    own: bool = False
    then: Change = lambda model: None

    def make(self, source: Path, folder: Path) -> Model:
        """The sound model."""
        keep = ["time_text_embed", "context_embedder", "x_embedder", "norm", "norm_out", "attn", "proj_out*"]
        model = sdquant.load_model(source, self.scheme, runtime="plain", skip=keep, progress=False)
        sdquant.save(model, folder)
        made = Model.read(folder)
        if not self.own:
            del made.metadata["sdquant"]
        self.then(made)
        assert set(self.parts.values()) <= set(made.tensors), sorted(made.tensors)
        return made


def _four(scheme: str, *nested: str) -> dict[str, str]:
    parts = {part: f"{NAME}.{part}" for part in ("absmax", "quant_map", *nested)}
    return {"codes": NAME, **parts, "state": STATE + scheme}


def _respelled(scale: str, **more: Tensor) -> Change:
    """float8's scales under another name, and what else other tools write beside them."""

    def change(model: Model) -> None:
        for name in (NAME, OTHER):
            stem = name.removesuffix("weight")
            model.tensors[stem + scale] = model.tensors.pop(f"{stem}scale_weight")
            model.tensors |= {stem + key: tensor.clone() for key, tensor in more.items()}
        del model.files["config.json"]["quantization_config"]

    return change


def _one_scale(model: Model) -> None:
    """ComfyUI's scaled fp8: one scale a weight, a marker, and hints for activations."""
    for name in (NAME, OTHER):
        stem = name.removesuffix("weight")
        model.tensors[f"{stem}scale_weight"] = model.tensors[f"{stem}scale_weight"].amax()
        model.tensors[f"{stem}scale_input"] = torch.tensor(1.0)
    model.tensors["scaled_fp8"] = torch.empty(0, dtype=torch.float8_e4m3fn)
    del model.files["config.json"]["quantization_config"]


def _unscaled(model: Model) -> None:
    _one_scale(model)
    for key in [key for key in model.tensors if "scale" in key]:
        del model.tensors[key]


def _with_map(scheme: str) -> Change:
    """As optimum-quanto's own folders: the map beside the weights."""

    def change(model: Model) -> None:
        modules = (name.removesuffix(".weight") for name in (NAME, OTHER))
        model.files["quantization_map.json"] = {key: {"weights": scheme, "activations": "none"} for key in modules}
        model.files["config.json"].pop("quantization_config", None)

    return change


def _with_config(word: str) -> Change:
    """As diffusers saves what it quantized by optimum-quanto: settings in config.json."""
    settings = {"quant_method": "quanto", "weights_dtype": word, "modules_to_not_convert": []}
    return lambda model: model.files["config.json"].update(quantization_config=settings)


_SIZES = {NAME: (256, 64), OTHER: (64, 320)}


def _of_comfy(scheme: str) -> Change:
    """As ComfyUI's files have it, of other values."""

    def change(model: Model) -> None:
        spec, dice = backends.parse(scheme), torch.Generator().manual_seed(0)
        for name, shape in _SIZES.items():
            stem = name.removesuffix("weight")
            for key in [key for key in model.tensors if key.startswith(stem) and key != f"{stem}bias"]:
                del model.tensors[key]
            packed = comfy.BACKEND.encode(torch.randn(shape, generator=dice).bfloat16(), spec)
            model.tensors |= comfy.BACKEND.export(name, packed)
        del model.files["config.json"]["quantization_config"]

    return change


def _with_extras(model: Model) -> None:
    """SDNQ's rotation, and its low-rank branch."""
    for name, (rows, columns) in _SIZES.items():
        stem = name.removesuffix("weight")
        model.tensors |= {f"{stem}svd_up": torch.ones(rows, 8) / 99, f"{stem}svd_down": torch.ones(8, columns) / 99}
    extras = {"use_svd": True, "svd_rank": 8, "use_hadamard": True, "hadamard_group_size": 64}
    model.files["config.json"]["quantization_config"].update(extras)


def line(value: Any) -> Tensor:
    """A line of JSON (or raw bytes) as the tensor of bytes that formats keep it in."""
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return torch.tensor(list(raw), dtype=torch.uint8)


_COMFY = {"comfy_quant": line({"format": "float8_e4m3fn"}), "input_scale": torch.tensor(1.0)}
_TWO_LEVELS = {"data": f"{NAME}._data._data", "scale": f"{NAME}._scale", "shift": f"{NAME}._shift"}
_ONE_LEVEL = {"data": f"{NAME}._data", "scale": f"{NAME}._scale"}
_SDNQ = {"weight": NAME, "scale": f"{STEM}scale"}
_INT8 = {"codes": NAME, "scale": f"{STEM}weight_scale", "line": f"{STEM}comfy_quant"}
_W4A8 = {"codes": NAME, "line": f"{STEM}comfy_quant"} | {
    part: f"{STEM}weight_{part}" for part in ("s_rel", "s_channel")
}

FORMATS: dict[str, Format] = {
    "nf4": Format("nf4", _four("nf4")),
    "fp4": Format("fp4", _four("fp4")),
    "nf4 nested": Format("nf4,double_quant", _four("nf4", "nested_absmax", "nested_quant_map")),
    "bnb-int8": Format("bnb-int8", {"codes": NAME, "scb": f"{STEM}SCB", "format": f"{NAME}_format"}),
    "fp8 scale_weight": Format("fp8,packing=float8", {"codes": NAME, "scale": f"{STEM}scale_weight"}, then=_one_scale),
    "fp8 weight_scale": Format(
        "fp8,packing=float8",
        {"codes": NAME, "scale": f"{STEM}weight_scale", "line": f"{STEM}comfy_quant"},
        then=_respelled("weight_scale", **_COMFY),
    ),
    "fp8 weight_scale_inv": Format(
        "fp8,packing=float8",
        {"codes": NAME, "scale": f"{STEM}weight_scale_inv"},
        then=_respelled("weight_scale_inv"),
    ),
    "fp8 plain": Format("fp8,packing=float8", {"codes": NAME}, then=_unscaled),
    "qint8": Format("qint8", _ONE_LEVEL, then=_with_map("qint8")),
    "qfloat8": Format("qfloat8", _ONE_LEVEL, then=_with_map("qfloat8_e4m3fn")),
    "qint4": Format("qint4", _TWO_LEVELS, then=_with_map("qint4")),
    "qint2": Format("qint2", _TWO_LEVELS, then=_with_map("qint2")),
    "diffusers qint8": Format("qint8", _ONE_LEVEL, then=_with_config("int8")),
    "diffusers qint4": Format("qint4", _TWO_LEVELS, then=_with_config("int4")),
    "sdnq-int8": Format("sdnq-int8", _SDNQ),
    "sdnq-uint4": Format("sdnq-uint4", _SDNQ | {"zero_point": f"{STEM}zero_point"}),
    "sdnq-uint3": Format("sdnq-uint3", _SDNQ | {"zero_point": f"{STEM}zero_point"}),
    **{f"comfy {scheme}": Format(scheme, _INT8, then=_of_comfy(scheme)) for scheme in ("int8_row", "int8_convrot")},
    "comfy w4a4": Format("w4a4", _INT8, then=_of_comfy("w4a4")),
    "comfy w4a8": Format("w4a8", _W4A8, then=_of_comfy("w4a8")),
    "comfy mxfp8": Format("mxfp8", _INT8, then=_of_comfy("mxfp8")),
    "comfy nvfp4": Format("comfy:nvfp4", _INT8 | {"factor": f"{STEM}weight_scale_2"}, then=_of_comfy("comfy:nvfp4")),
    "sdnq extras": Format(
        "sdnq-uint4", _SDNQ | {part: f"{STEM}{part}" for part in ("svd_up", "svd_down")}, then=_with_extras
    ),
    "own nf4": Format("nf4", _four("nf4"), own=True),
    "own nf4 nested": Format("nf4,double_quant", _four("nf4", "nested_absmax", "nested_quant_map"), own=True),
    "own bnb-int8": Format("bnb-int8", {"codes": NAME, "scb": f"{STEM}SCB"}, own=True),
    "own fp8": Format("fp8", {"codes": f"{NAME}.codes", "absmax": f"{NAME}.absmax"}, own=True),
    "own float8": Format("fp8,packing=float8", {"codes": NAME, "scale": f"{STEM}scale_weight"}, own=True),
    "own qint8": Format("qint8", _ONE_LEVEL, own=True),
    "own qint4": Format("qint4", _TWO_LEVELS, own=True),
    "own qint3": Format("qint3", _ONE_LEVEL | {"shift": f"{NAME}._shift"}, own=True),
    "own int8": Format("int8", {part: f"{NAME}.{part}" for part in ("codes", "scale", "zero_point")}, own=True),
    "own int8_sym": Format("int8_sym", {part: f"{NAME}.{part}" for part in ("codes", "scale")}, own=True),
    "own int4": Format("int4", {part: f"{NAME}.{part}" for part in ("codes", "scale", "zero_point")}, own=True),
    "own int4_sym": Format("int4_sym", {part: f"{NAME}.{part}" for part in ("codes", "scale")}, own=True),
    "own sdnq-uint3": Format("sdnq-uint3", _SDNQ | {"zero_point": f"{STEM}zero_point"}, own=True),
}
