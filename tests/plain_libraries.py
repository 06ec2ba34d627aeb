"""Run by `test_plain_libraries` in a process of its own: diffusers and transformers without sdquant.

`python plain_libraries.py FOLDER...`: loads each folder, draws with it, and prints a line of JSON: by folder and
component, the file with the decoded weights, and as "picture" that with the picture; or {"error": ...}.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F


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
    bnb.nn.Linear4bit.forward = four_bit_linear


def four_bit_linear(layer: Any, x: Tensor) -> Tensor:
    """`Linear4bit.forward` as bitsandbytes has it for a GPU: its CPU kernels fail where a row is less than a block."""
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return F.linear(x, unpacked(layer.weight).to(x.dtype), bias)


def unpacked(weight: Any) -> Tensor:
    """The float weight of one of `Linear4bit`."""
    state, shape = copy.copy(weight.quant_state), weight.quant_state.shape
    state.shape = torch.Size([1, shape.numel()])  # one row, which is many blocks; see above
    return bnb.functional.dequantize_4bit(weight.data, state).view(shape)


class Unpacker:
    """quanto's compiled function, which it would compile here."""

    @staticmethod
    def unpack(packed: Tensor, bits: int) -> Tensor:
        """uint8 [rows, ...] of 8 / bits codes a byte -> uint8 [rows * 8 / bits, ...]."""
        return torch.cat([packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)])


def decoded(model: nn.Module) -> dict[str, Tensor]:
    """All weights and biases as floats, those of the libraries' quantized layers decoded by the libraries."""
    tensors = {}
    for name, tensor in model.named_parameters():
        weight: Any = tensor
        if isinstance(weight, bnb.nn.Params4bit):
            weight = unpacked(weight)
        elif isinstance(weight, bnb.nn.Int8Params):
            weight = weight.data.float() * weight.SCB.float()[:, None] / 127
        elif hasattr(weight, "qtype"):  # quanto's
            weight = weight.dequantize()
        tensors[name] = weight.detach().float().contiguous().clone()
    return tensors


def picture(pipe: Any) -> Tensor:
    """What a pipeline draws in two steps, [side, side, 3] in 0..1."""
    side, seed = pipe.vae.config.sample_size, torch.Generator().manual_seed(7)
    pipe.set_progress_bar_config(disable=True)
    size = {"height": side, "width": side}
    drawn = pipe("a handwritten seven", num_inference_steps=2, generator=seed, output_type="pt", **size)
    return drawn.images[0].float().permute(1, 2, 0).contiguous()


def attempt(folder: Path, **options: Any) -> Any:
    """The files with the whole pipeline's weights by component and with its picture, or the error."""
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
    files["picture"] = str(folder / "picture")
    save_file({"picture": picture(pipe)}, files["picture"])
    return files


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    free_bitsandbytes()
    import optimum.quanto.library.extensions.cpp as compiled

    compiled.ext._lib = Unpacker
    done = {path: attempt(Path(path)) for path in sys.argv[1:]}
    assert "sdquant" not in sys.modules
    print(json.dumps(done))
