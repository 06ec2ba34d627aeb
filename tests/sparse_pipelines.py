"""Pipelines as large as the published ones, in files without data: their headers are real, the rest is a hole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import sdquant
from sdquant.models.components import empty, tied
from sdquant.saving.model_files import config_of

# FLUX.1's own sizes; what is not given is the classes' default, which is the same.
FLUX: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer": ("FluxTransformer2DModel", {"num_layers": 19, "num_single_layers": 38, "guidance_embeds": True}),
    "text_encoder": (
        "CLIPTextModel",
        {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    ),
    "text_encoder_2": (
        "T5EncoderModel",
        {
            "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "vocab_size": 32128,
            "feed_forward_proj": "gated-gelu",
        },
    ),
    "vae": (
        "AutoencoderKL",
        {
            "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16,
            "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
        },
    ),
}  # fmt: skip


def flux(folder: Path) -> Path:
    """A FluxPipeline's folder with FLUX.1's shapes in bfloat16: 34 GB that take no disk."""
    shutil.copytree(sdquant.demo.path("digits-flux"), folder)
    for name, (class_name, values) in FLUX.items():
        shutil.rmtree(folder / name)
        component(folder / name, class_name, values)
    return folder


def component(folder: Path, class_name: str, values: dict[str, Any]) -> None:
    """A component's folder: config and header, and as many bytes of nothing as the header says."""
    model = empty(None, class_name, values)
    folder.mkdir()
    config = config_of(model)
    (folder / "config.json").write_text(json.dumps(config))
    ties, header, end = tied(model), {}, 0
    for name, tensor in model.state_dict().items():
        if ties.get(name, (name,))[0] == name:
            begin, end = end, end + 2 * tensor.numel()
            header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    base = "diffusion_pytorch_model" if "_class_name" in config else "model"
    with (folder / f"{base}.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
