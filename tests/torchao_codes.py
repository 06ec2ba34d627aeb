"""Run in a process of its own, with torchao: `python torchao_codes.py SOURCE TARGET`.

Quantizes each weight in the file SOURCE as torchao does what sdquant makes too; writes codes and scales to TARGET, as
WEIGHT.KIND.PART.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch


def main(source: str, target: str) -> None:
    from safetensors.torch import load_file, save_file
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.quantization import Float8Tensor, Int8Tensor
    from torchao.quantization.granularity import PerRow

    e4m3 = torch.float8_e4m3fn
    made: dict[str, torch.Tensor] = {}
    for name, w in load_file(source).items():
        factor = per_tensor_amax_to_scale(w.float().abs().max())
        kinds: dict[str, Any] = {
            "int8_row": Int8Tensor.from_hp(w, PerRow()),
            "fp8": Float8Tensor.from_hp(w, e4m3, PerRow()),
            "mxfp8": MXTensor.to_mx(w, e4m3, 32, scaling_mode=ScaleCalculationMode.RCEIL),
            "comfy:nvfp4": NVFP4Tensor.to_nvfp4(w, per_tensor_scale=factor),
        }
        for kind, one in kinds.items():
            scale = one.scale if one.scale.element_size() > 1 else one.scale.view(torch.uint8)
            codes = one.qdata if one.qdata.dtype != e4m3 else one.qdata.view(torch.uint8)
            made |= {f"{name}.{kind}.codes": codes.contiguous(), f"{name}.{kind}.scale": scale.contiguous()}
        made[f"{name}.comfy:nvfp4.factor"] = factor.reshape(1).clone()
    save_file(made, target)
    print("{}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
