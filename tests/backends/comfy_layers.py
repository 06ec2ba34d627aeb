"""Layers of ComfyUI's files, one a file: as the golden vectors are, and as the tests write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdquant.core import Packed, read_weight
from sdquant.formats.checkpoint import single_file

GOLDEN = Path(__file__).parent / "golden"


def read(path: Path, shape: tuple[int, ...] | None = None) -> Packed:
    """The only quantized weight of a file."""
    (found,) = single_file(path).prequantized.values()
    return read_weight(found, None, shape, load_file(path).__getitem__)


def line(row: Any) -> Tensor:
    """The bytes of a `comfy_quant` tensor."""
    return torch.tensor(list(json.dumps(row).encode()), dtype=torch.uint8)


def write(folder: Path, said: Any, tensors: dict[str, Tensor], metadata: bool = False) -> Path:
    """A file of the layer "proj" with these tensors, and what is said of it in a tensor or in the metadata."""
    file = {f"proj.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    if said is not None and not metadata:
        file["proj.comfy_quant"] = line(said)
    table = {"_quantization_metadata": json.dumps({"layers": {"proj": said}})} if metadata else None
    save_file(file, folder / "model.safetensors", table)
    return folder / "model.safetensors"
