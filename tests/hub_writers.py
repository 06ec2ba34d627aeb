"""Run in a process of its own, with compressed-tensors, HQQ, AutoRound: `python hub_writers.py SOURCE TARGET WAY...`.

Each way rewrites the text encoder at SOURCE by a library's own code, and saves it as transformers and that library do,
in TARGET/WAY; TARGET/WAY.safetensors has the weights as that library dequantizes them, by the names of the float model.
Prints the ways, each with the error that stopped it, or null.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Way = Callable[[Any, Path], dict[str, Tensor]]


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers that formats quantize."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}


def compressed(preset: str, **changes: Any) -> Way:
    """compressed-tensors by a preset of its own, with scales of the least and the largest weight of each group."""

    def write(model: Any, target: Path) -> dict[str, Tensor]:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
        from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        scheme = preset_name_to_scheme(preset, ["Linear"])
        for name, value in changes.items():
            setattr(scheme.weights, name, value)
        apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}))
        for layer in linears(model).values():
            for name in ("input_scale", "input_global_scale"):  # of no activations: as good as any
                if hasattr(layer, name):
                    getattr(layer, name).data.fill_(0.5)
            blocks, whole = divided(layer.weight.detach(), layer.weight_scale.shape), None
            if hasattr(layer, "weight_global_scale"):
                whole = generate_gparam(layer.weight.min(), layer.weight.max())
                layer.weight_global_scale.data = whole.reshape(layer.weight_global_scale.shape)
            low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
            made = calculate_qparams(low, high, scheme.weights, global_scale=whole)
            for part, value in zip(("weight_scale", "weight_zero_point"), made, strict=True):
                if hasattr(layer, part):
                    old = getattr(layer, part)
                    old.data = value.reshape(old.shape).to(old.dtype)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(target)
        compressor.update_config(str(target))
        compressor.decompress_model(model)
        return {f"{name}.weight": layer.weight for name, layer in linears(model).items()}

    return write


def divided(weight: Tensor, grid: torch.Size) -> Tensor:
    """[rows, in a block, columns, in a block], for the shape of the scales."""
    down, across = (grid[0], grid[1]) if len(grid) == 2 else (1, 1)
    return weight.view(down, weight.shape[0] // down, across, weight.shape[1] // across)


def saved(model: Any, target: Path, layers: dict[str, dict[str, Tensor]], config: dict[str, Any]) -> None:
    """Write the tensors of layers in place of the float ones, and a quantization_config."""
    from safetensors.torch import save_file

    shared = {"encoder.embed_tokens.weight"}  # the same tensor as `shared`
    gone = {f"{name}.{last}" for name in layers for last in ("weight", "bias")} | shared
    tensors = {key: tensor for key, tensor in model.state_dict().items() if key not in gone}
    tensors |= {f"{name}.{last}": tensor for name, layer in layers.items() for last, tensor in layer.items()}
    rows = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
    save_file(rows, target / "model.safetensors", metadata={"format": "pt"})
    model.config.quantization_config = config
    model.config.save_pretrained(target)


def hqq(bits: int, axis: int) -> Way:
    """HQQ's own layers, by the state dict that they have for safetensors."""

    def write(model: Any, target: Path) -> dict[str, Tensor]:
        from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
        from transformers import HqqConfig

        how = BaseQuantizeConfig(nbits=bits, group_size=64, axis=axis)
        layers, floats = {}, {}
        for name, layer in linears(model.float()).items():
            mine = HQQLinear(layer, how, compute_dtype=torch.float32, device="cpu", del_orig=False)
            layers[name] = mine.state_dict()
            floats[f"{name}.weight"] = mine.dequantize()
        saved(model, target, layers, HqqConfig(nbits=bits, group_size=64, axis=axis).to_dict())
        return floats

    return write


def auto_round(packing: str, symmetric: bool, bits: int = 4) -> Way:
    """AutoRound's own packers, the codes from its own search of scales."""

    def write(model: Any, target: Path) -> dict[str, Tensor]:
        from auto_round.data_type.int import quant_tensor_asym, quant_tensor_sym
        from auto_round.export.export_to_awq.utils import WQLinear_GEMM
        from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

        layers, floats = {}, {}
        for name, layer in linears(model.half()).items():
            find = quant_tensor_sym if symmetric else quant_tensor_asym
            values, scale, zero = find(layer.weight.detach(), bits=bits, group_size=32)
            rows = len(layer.weight)
            scale = scale.reshape(rows, -1).half()
            zeros = zero.reshape(rows, -1) if isinstance(zero, Tensor) else torch.full_like(scale, float(zero))
            layer.weight.data = values.half()
            if packing == "auto_round:auto_awq":
                packed = WQLinear_GEMM.from_linear(
                    layer, bits, 32, scales=scale.T.contiguous(), zeros=zeros.T.contiguous()
                )
            else:
                of = qlinear_torch if packing == "auto_round" else qlinear_torch_zp
                packed = of.QuantLinear(bits, 32, layer.in_features, layer.out_features, layer.bias is not None)
                packed.device = torch.device("cpu")
                packed.pack(layer, scale, zeros, None)
            layers[name] = {key: part for key, part in packed.state_dict().items() if part is not None}
            floats[f"{name}.weight"] = packed(torch.eye(layer.in_features, dtype=torch.float16)).T.detach()
        said = {"quant_method": "auto-round", "bits": bits, "group_size": 32, "sym": symmetric}
        saved(model, target, layers, said | {"packing_format": packing})
        return floats

    return write


def auto_round_blocks(model: Any, target: Path) -> dict[str, Tensor]:
    """AutoRound's FP8_BLOCK: its search of scales, and its `pack_layer`."""
    from auto_round.data_type.fp8 import quant_block_fp_sym
    from auto_round.export.export_to_autoround.export_to_fp8 import pack_layer

    layers, floats, sizes = {}, {}, (128, 128)
    for name, layer in linears(model).items():
        _, scale, zero = quant_block_fp_sym(layer.weight.detach(), group_size=sizes)
        for key, value in {"bits": 8, "act_bits": 8, "group_size": sizes, "scale": scale, "zp": zero}.items():
            setattr(layer, key, value)
        pack_layer(name, model, "fp", "cpu")
        layers[name] = model.get_submodule(name).state_dict()
        codes, scales = layers[name]["weight"].float(), layers[name]["weight_scale_inv"].float()
        each = scales.repeat_interleave(sizes[0], 0).repeat_interleave(sizes[1], 1)
        floats[f"{name}.weight"] = codes * each[: codes.shape[0], : codes.shape[1]]
    said = {"group_size": list(sizes), "data_type": "fp", "act_bits": 8, "act_data_type": "fp", "act_dynamic": True}
    more = {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(sizes)}
    saved(model, target, layers, {"quant_method": "auto-round", "bits": 8, "sym": True, **said, **more})
    return floats


def auto_round_mx(model: Any, target: Path) -> dict[str, Tensor]:
    """AutoRound's MXFP8: its search of exponents, and its `QuantLinear`."""
    from auto_round.data_type.mxfp import quant_mx
    from auto_round.export.export_to_autoround.qlinear_fp import QuantLinear

    layers, floats = {}, {}
    for name, layer in linears(model).items():
        values, scale, _ = quant_mx(layer.weight.detach(), bits=8, group_size=32)
        sizes = layer.in_features, layer.out_features
        packed = QuantLinear(8, 32, *sizes, layer.bias is not None, data_type="mx_fp8", act_bits=8)
        packed.pack(layer, scale.reshape(sizes[1], -1))
        layers[name] = packed.state_dict()
        floats[f"{name}.weight"] = values.float()
    said = {"group_size": 32, "data_type": "mx_fp", "act_bits": 8, "act_data_type": "mx_fp", "act_dynamic": True}
    said |= {"packing_format": "auto_round", "sym": True}
    saved(model, target, layers, {"quant_method": "auto-round", "bits": 8, **said})
    return floats


WAYS: dict[str, Way] = {
    **{name: compressed(name) for name in (
        "W4A16_ASYM", "W2A16", "W3A16", "W4A16", "W8A16", "W4A8", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK",
        "NVFP4", "NVFP4A16", "MXFP4", "MXFP8", "W5A16", "W6A16", "W7A16", "MXFP6A16",
    )},
    "W4A16 of 32": compressed("W4A16", group_size=32), "W6A16 asymmetric": compressed("W6A16", symmetric=False),
    "W1A16": compressed("W4A16", num_bits=1),
    **{f"hqq {bits} axis {axis}": hqq(bits, axis) for bits in (8, 6, 5, 4, 3, 2, 1) for axis in (1, 0)},
    "auto-round": auto_round("auto_round", True), "auto-round asymmetric": auto_round("auto_round", False),
    "auto-round gptq": auto_round("auto_round:auto_gptq", False),
    "auto-round awq": auto_round("auto_round:auto_awq", False),
    "auto-round 2": auto_round("auto_round:auto_gptq", True, 2), "auto-round 8": auto_round("auto_round", True, 8),
    "auto-round 5": auto_round("auto_round", False, 5), "auto-round 6": auto_round("auto_round:auto_gptq", True, 6),
    "auto-round 7": auto_round("auto_round", True, 7),
    "auto-round fp8 blocks": auto_round_blocks, "auto-round mxfp8": auto_round_mx,
}  # fmt: skip


def main(source: Path, target: Path, ways: list[str]) -> None:
    import transformers
    from safetensors.torch import save_file

    config = json.loads((source / "config.json").read_text())
    done: dict[str, str | None] = {}
    for way in ways or WAYS:
        model = getattr(transformers, config["architectures"][0]).from_pretrained(source, dtype=torch.bfloat16)
        place = target / way.replace(" ", "-")
        place.mkdir(parents=True)
        try:
            floats = WAYS[way](model.requires_grad_(False), place)
        except Exception as error:  # whatever it is: the test reads it
            done[way] = f"{type(error).__name__}: {error}"
            continue
        save_file({key: part.contiguous() for key, part in floats.items()}, f"{place}.safetensors")
        done[way] = None
    print(json.dumps(done))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
