"""Run in a process of its own, with torchao: `python torchao_writer.py SOURCE TARGET`.

Saves the transformer at SOURCE with diffusers, its linear layers in torchao's tensors of all classes by turns, at
TARGET, and the same dequantized by torchao at TARGET-decoded; prints the classes and their numbers.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def makers() -> list[Any]:
    """What makes each kind of tensor of a bfloat16 weight."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.quantization import Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor
    from torchao.quantization.granularity import PerBlock, PerGroup, PerRow, PerTensor
    from torchao.quantization.quant_primitives import MappingType

    e4m3 = torch.float8_e4m3fn
    asymmetric = MappingType.ASYMMETRIC
    return [
        lambda w: Int8Tensor.from_hp(w, PerRow()),
        lambda w: Int8Tensor.from_hp(w, PerTensor()),
        lambda w: Int8Tensor.from_hp(w, PerGroup(16)),
        lambda w: Float8Tensor.from_hp(w, e4m3, PerRow()),
        lambda w: Float8Tensor.from_hp(w, e4m3, PerTensor()),
        lambda w: Float8Tensor.from_hp(w, torch.float8_e5m2, PerRow()),
        lambda w: Float8Tensor.from_hp(w, e4m3, PerBlock([32, 32])),
        lambda w: IntxUnpackedToInt8Tensor.from_hp(w, (1, 16), torch.int4, mapping_type=asymmetric),
        lambda w: IntxUnpackedToInt8Tensor.from_hp(w, (1, 32), torch.int3, mapping_type=MappingType.SYMMETRIC),
        lambda w: MXTensor.to_mx(w, e4m3, 32, is_swizzled_scales=True),
        lambda w: MXTensor.to_mx(w, e4m3, 32),
        lambda w: MXTensor.to_mx(w, torch.float4_e2m1fn_x2, 32, is_swizzled_scales=True),
        lambda w: MXTensor.to_mx(w, torch.float4_e2m1fn_x2, 32),
        lambda w: NVFP4Tensor.to_nvfp4(w, per_tensor_scale=per_tensor_amax_to_scale(w.float().abs().max())),
        lambda w: NVFP4Tensor.to_nvfp4(w, is_swizzled_scales=True),
    ]


def main(source: str, target: str) -> None:
    from diffusers import FluxTransformer2DModel, TorchAoConfig
    from safetensors.torch import save_file
    from torchao.quantization import Int8WeightOnlyConfig

    how = TorchAoConfig(Int8WeightOnlyConfig(version=2))
    given: dict[str, Any] = {"quantization_config": how, "torch_dtype": torch.bfloat16}
    model: Any = FluxTransformer2DModel.from_pretrained(source, **given)
    floats = FluxTransformer2DModel.from_pretrained(source, torch_dtype=torch.bfloat16).state_dict()
    kinds, turn, classes = makers(), 0, Counter()
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and not any(size % 32 for size in layer.weight.shape):
            made = kinds[turn % len(kinds)](floats[f"{name}.weight"])
            layer.weight = nn.Parameter(made, requires_grad=False)
            classes[type(made).__name__] += 1
            turn += 1
    model.save_pretrained(target)
    weights = {
        name: (tensor if type(tensor) is Tensor else tensor.dequantize()).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(weights, f"{target}-decoded")
    print(json.dumps(classes))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*(str(Path(path)) for path in sys.argv[1:]))
