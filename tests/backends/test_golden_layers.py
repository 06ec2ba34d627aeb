"""A layer of each golden vector is an ordinary one: copied, pickled, compiled, loaded, moved, and with a LoRA on it."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from sdquant.core import read_weight
from sdquant.formats.checkpoint import single_file
from sdquant.nn import QuantizedLayer, quantized_layer

from ..test_dequantize import GOLDEN, LAYERS

LITE = {"quant_method": "nunchaku_lite"}
NUNCHAKU = {"nunchaku_svdq_int4.safetensors": LITE, "nunchaku_svdq_nvfp4_wcscales.safetensors": LITE}


def _layer(name: str, folder: Path) -> Any:
    """The layer in float32."""
    path = GOLDEN / name
    if name in NUNCHAKU:  # without the same weight in natural order
        layer = {key: tensor for key, tensor in load_file(path).items() if key.startswith("layer.")}
        save_file(layer, path := folder / name)
    with safe_open(path, "pt") as file:
        settings = (file.metadata() or {}).get("quantization_config")
    given = {"quant_method": "sdnq", **json.loads(settings)} if settings else NUNCHAKU.get(name)
    given = {"quant_method": "modelopt"} if name.startswith("modelopt_export") else given
    (found,) = single_file(path, given=given).prequantized.values()
    packed = read_weight(found, None, None, load_file(path).__getitem__)
    rows, columns = packed.spec.shape
    torch.manual_seed(0)
    return quantized_layer(nn.Linear(columns, rows), packed, torch.float32)


@pytest.mark.parametrize("name", [*LAYERS, *NUNCHAKU])
def test_layers(name: str, tmp_path: Path) -> None:
    torch.compiler.reset()  # whose count of compilations would end it
    layer = _layer(name, tmp_path)
    assert isinstance(layer, QuantizedLayer) and isinstance(layer, nn.Linear)
    x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = layer(x)
        assert bool(y.isfinite().all())
        # SDNQ adds its branch to the weight in 16 bits; beside the codes it is not rounded.
        near = 3e-3 if "sdnq" in name and "svd" in name else 1e-5
        assert (y - nn.functional.linear(x, layer.dequantize(), layer.bias)).norm() <= near * y.norm()
        assert torch.equal(copy.deepcopy(layer)(x), y)
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False)(x), y)
        assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), y)
        other = copy.deepcopy(layer)
        for parameter in other.parameters():
            parameter.data.zero_()
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other(x), y)
        model = nn.Sequential(layer)
        peft.inject_adapter_in_model(
            peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0"], init_lora_weights=False), model
        )
        side: Any = model[0]
        a, b = (one["default"].weight for one in (side.lora_A, side.lora_B))
        assert torch.allclose(model(x) - y, 2 * x @ a.T @ b.T, atol=1e-4)
