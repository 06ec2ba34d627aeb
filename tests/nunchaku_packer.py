"""Run in a process of its own, with DeepCompressor: `python nunchaku_packer.py SOURCE TARGET`.

Rounds and packs the layer in SOURCE by DeepCompressor's own `convert_to_nunchaku_w4x4y16_linear_weight`, into TARGET:
what is left of the weight by the branch [out, in], in 16 bits, in codes of its scales. SOURCE has these as `left` and
`scale` [out, groups], and bias, smooth, down, up; `factor` [1] if it is NVFP4.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from deepcompressor.backend.nunchaku.utils import convert_to_nunchaku_w4x4y16_linear_weight
from safetensors.torch import load_file, save_file
from torch import Tensor


def packed(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    """The layer by the names of nunchaku_lite."""
    scale, factor = layer["scale"].to(layer["left"].dtype).view(len(layer["left"]), 1, -1, 1), layer.get("factor")
    codes, scales, bias, smooth, branch, small = convert_to_nunchaku_w4x4y16_linear_weight(
        layer["left"], scale if factor is None else factor, layer["bias"], layer["smooth"],
        (layer["down"].T.contiguous(), layer["up"]), factor is not None, None if factor is None else scale,
    )  # fmt: skip
    result = {"qweight": codes, "wscales": scales, "bias": bias, "smooth_factor": smooth}
    result |= {"proj_down": branch[0], "proj_up": branch[1]}
    return result if small is None else result | {"wtscale": scales, "wscales": small.to(torch.float8_e4m3fn)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    made = packed(load_file(Path(sys.argv[1])))
    save_file({name: tensor.contiguous() for name, tensor in made.items()}, Path(sys.argv[2]))
    print(json.dumps(sorted(made)))
