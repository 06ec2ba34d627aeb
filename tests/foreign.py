"""Quantized models as other tools write them: made by those tools here, or in their format from their sources."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import sdquant

WEIGHTS = "diffusion_pytorch_model.safetensors"
COMFY = json.dumps({"format": "float8_e4m3fn"}).encode()


@dataclass(frozen=True)
class Row:
    """A file or folder: what it is, and how it is made.

    Attributes:
        quant: the scheme that it holds.
        evidence: a word of the evidence for it.
        make: makes it in a folder, and says where it is.
        config: whether the model's config is there, so that it loads without `base`.
    """

    quant: str
    evidence: str
    make: Callable[[Path], Path]
    config: bool = True


def _transformer() -> Path:
    return sdquant.demo.path("digits-flux") / "transformer"


def _float8(kind: str) -> Callable[[Path], Path]:
    """A lone float8 file of the Flux transformer, its linear layers scaled in one of the ways that are around."""

    def make(folder: Path) -> Path:
        tensors: dict[str, Tensor] = {}
        for name, tensor in load_file(_transformer() / WEIGHTS).items():
            if tensor.ndim < 2:
                tensors[name] = tensor
                continue
            wide = tensor.float()
            rows = wide.abs().amax(1, keepdim=True) / 448
            scale = rows if kind == "rows" else rows.max()
            codes = (wide if kind == "plain" else wide / scale).clamp(-448, 448)
            tensors[name] = codes.to(torch.float8_e5m2 if kind == "e5m2" else torch.float8_e4m3fn)
            stem = name.removesuffix("weight")
            key = {"comfy": "scale_weight", "rows": "weight_scale", "inverse": "weight_scale_inv"}.get(
                kind, "weight_scale"
            )
            if kind != "plain":
                tensors[stem + key] = scale.contiguous()
            if kind == "comfy":
                tensors[stem + "scale_input"] = torch.tensor(1.0)
            if kind == "quant":
                tensors[stem + "comfy_quant"] = torch.frombuffer(bytearray(COMFY), dtype=torch.uint8)
        if kind == "comfy":
            tensors["scaled_fp8"] = torch.empty(0, dtype=torch.float8_e4m3fn)
        save_file(tensors, folder / "digits-flux-fp8.safetensors")
        return folder / "digits-flux-fp8.safetensors"

    return make


def _bnb_lone(scheme: str) -> Callable[[Path], Path]:
    """A lone file with bitsandbytes' keys and nothing else: what a web UI's users have."""

    def make(folder: Path) -> Path:
        model = sdquant.load_model(_transformer(), scheme, progress=False)
        sdquant.save(model, folder / "own.safetensors")
        save_file(load_file(folder / "own.safetensors"), folder / f"digits-flux-{scheme}.safetensors")
        (folder / "own.safetensors").unlink()
        return folder / f"digits-flux-{scheme}.safetensors"

    return make


def _diffusers(config: Callable[[], Any]) -> Callable[[Path], Path]:
    """A folder that diffusers saved after it quantized while loading."""

    def make(folder: Path) -> Path:
        from diffusers import FluxTransformer2DModel
        from diffusers.quantizers import auto

        with ExitStack() as stack:
            for method in ("bitsandbytes_4bit", "bitsandbytes_8bit"):  # which it refuses on machines without a GPU
                base: Any = auto.AUTO_QUANTIZER_MAPPING[method]
                free = {
                    "validate_environment": lambda self, *args, **kwargs: None,
                    "update_device_map": lambda self, device_map: device_map or {"": "cpu"},
                }
                cls = type(base.__name__, (base,), free)
                stack.enter_context(mock.patch.dict(auto.AUTO_QUANTIZER_MAPPING, {method: cls}))
            model = FluxTransformer2DModel.from_pretrained(
                _transformer(), quantization_config=config(), torch_dtype=torch.bfloat16
            )
        model.save_pretrained(folder / "transformer")
        return folder / "transformer"

    return make


def _bnb_config(**values: Any) -> Callable[[], Any]:
    def config() -> Any:
        from diffusers import BitsAndBytesConfig

        return BitsAndBytesConfig(**values)

    return config


def _quanto_config(dtype: str) -> Callable[[], Any]:
    def config() -> Any:
        from diffusers import QuantoConfig

        return QuantoConfig(weights_dtype=dtype)

    return config


def _quanto(dtype: str, map_name: str = "quantization_map.json") -> Callable[[Path], Path]:
    """A folder of optimum-quanto's own: what `quantize` and `freeze` leave, saved, and the map beside it."""

    def make(folder: Path) -> Path:
        from diffusers import UNet2DConditionModel
        from optimum import quanto

        unet = sdquant.demo.path("digits-sd") / "unet"
        model = UNet2DConditionModel.from_pretrained(unet, torch_dtype=torch.bfloat16)
        quanto.quantize(model, weights=quanto.qtypes[dtype], exclude="conv_out")
        quanto.freeze(model)
        save_file(model.state_dict(), folder / WEIGHTS)
        (folder / map_name).write_text(json.dumps(quanto.quantization_map(model)))
        shutil.copy(unet / "config.json", folder)
        return folder

    return make


def _quanto_lone(dtype: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        _quanto(dtype)(folder)
        (folder / WEIGHTS).rename(folder / f"unet-{dtype}.safetensors")
        (folder / "config.json").unlink()
        (folder / "quantization_map.json").unlink()
        return folder / f"unet-{dtype}.safetensors"

    return make


def _sdnq(folder: Path) -> Path:
    """A folder that the sdnq package saved through diffusers."""
    model = sdquant.load_model(_transformer(), "sdnq-uint4", progress=False)
    sdquant.save(model, folder / "own")
    save_file(load_file(folder / "own" / WEIGHTS), folder / "own" / WEIGHTS)  # without sdquant's metadata
    return folder / "own"


def _float8_blocks(folder: Path) -> Path:
    """A folder as transformers' fine-grained fp8 leaves it: a scale for each 128 x 128 weights, said in the config."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(_transformer() / WEIGHTS).items():
        if tensor.ndim < 2:
            tensors[name] = tensor
            continue
        rows, columns = tensor.shape
        down, across = -(-rows // 128), -(-columns // 128)
        wide = torch.nn.functional.pad(tensor.float(), (0, across * 128 - columns, 0, down * 128 - rows))
        blocks = wide.view(down, 128, across, 128)
        scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / 448
        tensors[name] = (blocks / scale).view(wide.shape)[:rows, :columns].to(torch.float8_e4m3fn).contiguous()
        tensors[name.removesuffix("weight") + "weight_scale_inv"] = scale.view(down, across)
    save_file(tensors, folder / WEIGHTS)
    config = json.loads((_transformer() / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _comfy(kind: str) -> Callable[[Path], Path]:
    """A lone file of ComfyUI's, by its own library: listed in the metadata, or with a line beside each weight."""

    def make(folder: Path) -> Path:
        from comfy_kitchen.tensor import TensorCoreMXFP8Layout, TensorCoreNVFP4Layout, TensorWiseINT8Layout

        tensors: dict[str, Tensor] = {}
        layers: dict[str, Any] = {}
        for name, tensor in load_file(_transformer() / WEIGHTS).items():
            if tensor.ndim < 2 or any(size % 32 for size in tensor.shape):
                tensors[name] = tensor
                continue
            stem = name.removesuffix("weight")
            if kind == "mxfp8":
                codes, params = TensorCoreMXFP8Layout.quantize(tensor)
                layers[stem[:-1]] = {"format": kind}
            elif kind == "nvfp4":
                codes, block_params = TensorCoreNVFP4Layout.quantize(tensor.float())
                layers[stem[:-1]] = {"format": kind}
                tensors |= {name: codes, stem + "weight_scale": block_params.block_scale}
                tensors[stem + "weight_scale_2"] = block_params.scale
                continue
            elif kind == "convrot":
                # Rotated in float32, as published files are; the library would rotate in the weight's own dtype.
                group = next(size for size in (256, 64, 16) if tensor.shape[1] % size == 0)
                options = {"convrot": True, "convrot_groupsize": group}
                codes, params = TensorWiseINT8Layout.quantize(tensor.float(), per_channel=True, **options)
                said = {"format": "int8_tensorwise", **options}
                layers[stem[:-1]] = said
                tensors[stem + "comfy_quant"] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
            else:
                codes, params = TensorWiseINT8Layout.quantize(tensor, per_channel="norm" not in name)
                line = json.dumps({"format": kind}).encode()
                tensors[stem + "comfy_quant"] = torch.frombuffer(bytearray(line), dtype=torch.uint8)
            tensors |= {name: codes, stem + "weight_scale": params.scale}
        listed = json.dumps({"format_version": "1.0", "layers": layers})
        path = folder / f"digits-flux-{kind}.safetensors"
        save_file(tensors, path, {"_quantization_metadata": listed} if layers else None)
        return path

    return make


ROWS: dict[str, Row] = {
    "fp8 plain": Row("fp8", "no scales", _float8("plain"), config=False),
    "fp8 scale_weight": Row("fp8", "*.scale_weight", _float8("comfy"), config=False),
    "fp8 weight_scale by row": Row("fp8", "*.weight_scale", _float8("rows"), config=False),
    "fp8 weight_scale_inv": Row("fp8", "*.weight_scale_inv", _float8("inverse"), config=False),
    "fp8 e5m2": Row("fp8", "float8_e5m2", _float8("e5m2"), config=False),
    "fp8 comfy_quant": Row("fp8", "*.weight_scale", _float8("quant"), config=False),
    "fp8 in blocks": Row("fp8", "*.weight_scale_inv", _float8_blocks),
    "comfy mxfp8": Row("mxfp8", "ComfyUI's mxfp8", _comfy("mxfp8"), config=False),
    "comfy nvfp4": Row("comfy:nvfp4", "ComfyUI's nvfp4", _comfy("nvfp4"), config=False),
    "comfy int8": Row("int8_row", "int8_tensorwise", _comfy("int8_tensorwise"), config=False),
    "comfy convrot": Row("int8_convrot", "rotated in groups of", _comfy("convrot"), config=False),
    "lone nf4": Row("nf4", "quant_state", _bnb_lone("nf4"), config=False),
    "lone nf4 doubly quantized": Row("nf4", "quant_state", _bnb_lone("nf4,double_quant"), config=False),
    "lone fp4": Row("fp4", "quant_state", _bnb_lone("fp4"), config=False),
    "lone bnb-int8": Row("bnb-int8", "SCB", _bnb_lone("bnb-int8"), config=False),
    "diffusers nf4": Row("nf4", "quant_state", _diffusers(_bnb_config(load_in_4bit=True, bnb_4bit_quant_type="nf4"))),
    "diffusers int8": Row("bnb-int8", "SCB", _diffusers(_bnb_config(load_in_8bit=True))),
    "diffusers quanto int8": Row("qint8", "optimum-quanto", _diffusers(_quanto_config("int8"))),
    "diffusers quanto int4": Row("qint4", "optimum-quanto", _diffusers(_quanto_config("int4"))),
    "quanto qint8": Row("qint8", "optimum-quanto", _quanto("qint8")),
    "quanto qint4": Row("qint4", "optimum-quanto", _quanto("qint4")),
    "quanto qint2": Row("qint2", "optimum-quanto", _quanto("qint2", "quanto_qmap.json")),
    "quanto qfloat8": Row("qfloat8", "optimum-quanto", _quanto("qfloat8")),
    "lone qint4": Row("qint4", "optimum-quanto", _quanto_lone("qint4"), config=False),
    "lone qint8": Row("qint8", "optimum-quanto", _quanto_lone("qint8"), config=False),
    "sdnq": Row("sdnq-uint4", "sdnq", _sdnq),
}
