"""Run in a process of its own: what diffusers and transformers read without sdquant, in the formats of libraries that
need not be installed (torchao), which are found on the path.

`python library_readers.py PLACE...`: loads each component (a folder, or a file beside the config.json that it needs),
and prints a line of JSON: by place, the file with the decoded weights and with the output for one input, the classes of
its quantized weights, and why there is no output; or {"error": ...} where it does not load.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


def dtype_of(place: Path) -> torch.dtype:
    """bfloat16, unless its path says float32."""
    return torch.float32 if "float32" in str(place) else torch.bfloat16


def load(place: Path) -> nn.Module:
    """The component at a place."""
    import diffusers
    import transformers

    dtype = dtype_of(place)
    folder = place if place.is_dir() else place.parent
    config = json.loads((folder / "config.json").read_text())
    if "_class_name" not in config:
        model: nn.Module = getattr(transformers, config["architectures"][0]).from_pretrained(place, dtype=dtype)
        return model
    kind = getattr(diffusers, config["_class_name"])
    if place.is_dir():
        model = kind.from_pretrained(place, torch_dtype=dtype)
        return model
    how = diffusers.BFLQuantizationConfig(compute_dtype=dtype)
    model = kind.from_single_file(str(place), config=str(folder), quantization_config=how, torch_dtype=dtype)
    return model


def decoded(model: nn.Module) -> tuple[dict[str, Tensor], set[str]]:
    """Parameters as floats, decoded by the libraries in the dtype that they compute in; the quantized ones' classes."""
    from diffusers.quantizers.bfl import utils as bfl

    floats: dict[str, Tensor] = {}
    classes: set[str] = set()
    for path, layer in model.named_modules():
        for last, tensor in layer.named_parameters(recurse=False):
            weight: Any = tensor
            if last == "weight" and isinstance(layer, bfl.BFLFP8RLinear):
                weight, kind = bfl.dequantize_fp8r(layer.weight, layer.weight_scale), "fp8r"
            elif last == "weight" and isinstance(layer, bfl.BFLNVFP4Linear):
                weight = bfl.dequantize_nvfp4(layer.weight, layer.weight_scale, layer.weight_scale_2)
                kind = "nvfp4"
            elif hasattr(weight, "tensor_data_names"):  # torchao's
                weight, kind = weight.dequantize(torch.float32), type(weight.data).__name__
            else:
                kind = ""
            classes |= {kind} - {""}
            floats[f"{path}.{last}"] = weight.detach().float().contiguous().clone()
    return floats, classes


def output(model: Any, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """What the component returns for an input that is always the same."""
    torch.manual_seed(0)
    with torch.no_grad():
        if hasattr(model.config, "vocab_size"):
            return model(input_ids=torch.arange(3, 19)[None]).last_hidden_state.float()  # type: ignore[no-any-return]
        config = model.config
        inputs = {
            "hidden_states": torch.randn(1, 16, config.in_channels, dtype=dtype),
            "encoder_hidden_states": torch.randn(1, 8, config.joint_attention_dim, dtype=dtype),
            "pooled_projections": torch.randn(1, config.pooled_projection_dim, dtype=dtype),
            "timestep": torch.tensor([0.5], dtype=dtype), "guidance": torch.tensor([3.0], dtype=dtype),
            "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3),
        }  # fmt: skip
        return model(**inputs, return_dict=False)[0].float()  # type: ignore[no-any-return]


def attempt(place: Path) -> dict[str, Any]:
    """See the module."""
    try:
        model = load(place)
        tensors, classes = decoded(model)
    except Exception as error:  # whatever it is: the test reads it
        return {"error": f"{type(error).__name__}: {error}"}
    target, stops = place.parent / f"{place.name}-decoded", ""
    try:
        tensors["output"] = output(model, dtype_of(place))
    except Exception as error:
        stops = f"{type(error).__name__}: {error}"
    save_file(tensors, target)
    return {"tensors": str(target), "classes": sorted(classes), "stops": stops}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    done = {path: attempt(Path(path)) for path in sys.argv[1:]}
    assert "sdquant" not in sys.modules
    print(json.dumps(done))
