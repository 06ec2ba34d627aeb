"""Run by `test_plain_libraries` in a process of its own: diffusers and transformers without sdquant.

`python plain_libraries.py FOLDER...`: loads each folder's components, and prints a line of JSON: by folder and
component, the file with the decoded weights, or {"error": ...}.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


def free_bitsandbytes() -> None:
    """Let diffusers use bitsandbytes on a CPU, which works, and which it refuses before it tries."""
    from diffusers.quantizers import auto

    for method in ("bitsandbytes_4bit", "bitsandbytes_8bit"):
        base: Any = auto.AUTO_QUANTIZER_MAPPING[method]
        free = {
            "validate_environment": lambda self, *args, **kwargs: None,
            "update_device_map": lambda self, device_map: device_map or {"": "cpu"},
        }
        auto.AUTO_QUANTIZER_MAPPING[method] = type(base.__name__, (base,), free)


class Unpacker:
    """quanto's compiled function, which it would compile here."""

    @staticmethod
    def unpack(packed: Tensor, bits: int) -> Tensor:
        """uint8 [rows, ...] of 8 / bits codes a byte -> uint8 [rows * 8 / bits, ...]."""
        return torch.cat([packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)])


def decoded(model: nn.Module) -> dict[str, Tensor]:
    """All weights and biases as floats, those of the libraries' quantized layers decoded by the libraries."""
    import bitsandbytes as bnb

    tensors = {}
    for name, tensor in model.named_parameters():
        weight: Any = tensor
        if isinstance(weight, bnb.nn.Params4bit):
            state, shape = copy.copy(weight.quant_state), weight.quant_state.shape
            state.shape = torch.Size([1, shape.numel()])  # its CPU kernel is wrong where a row is less than a block
            weight = bnb.functional.dequantize_4bit(weight.data, state).view(shape)
        elif isinstance(weight, bnb.nn.Int8Params):
            weight = weight.data.float() * weight.SCB.float()[:, None] / 127
        elif hasattr(weight, "qtype"):  # quanto's
            weight = weight.dequantize()
        tensors[name] = weight.detach().float().contiguous().clone()
    return tensors


def attempt(folder: Path, **options: Any) -> Any:
    """The whole pipeline's weights by component, or the error."""
    from diffusers import DiffusionPipeline

    try:
        pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16, **options)
    except Exception as error:  # whatever it is: the test reads it
        return {"error": f"{type(error).__name__}: {error}"}
    files = {}
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module):
            files[name] = str(folder / f"{name}-decoded")
            save_file(decoded(part), files[name])
    return files


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    free_bitsandbytes()
    import optimum.quanto.library.extensions.cpp as compiled

    compiled.ext._lib = Unpacker
    done = {path: attempt(Path(path)) for path in sys.argv[1:]}
    assert "sdquant" not in sys.modules
    print(json.dumps(done))
