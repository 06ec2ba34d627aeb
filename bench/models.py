"""Component folders at real width with random weights: what there is to measure where no real model is at hand.

    python -m bench.models sdxl /tmp/models

A weight of a layer is N(0, 1 / inputs), which keeps the size of what goes through; a bias is zero and a norm's scale
one. Where a block's last layer adds to what went in, the sum grows, and the next norm takes that away again, as in
trained models. Files are written shard by shard: no more than one is in memory.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARD = 1 << 30  # bytes of a file, about


@dataclass(frozen=True)
class Model:
    """A component's class and config, and the size of image that it is measured at on a CPU.

    Attributes:
        side: pixels, so that a step takes seconds on one core; the models were made for 512 and 1024.
    """

    config: Mapping[str, Any]
    side: int


def _flux(double: int, single: int) -> dict[str, Any]:
    """FLUX.1's widths, with so many double and single blocks; the real one has 19 and 38."""
    return {
        "_class_name": "FluxTransformer2DModel", "patch_size": 1, "in_channels": 64, "attention_head_dim": 128,
        "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True,
        "axes_dims_rope": [16, 56, 56], "num_layers": double, "num_single_layers": single,
    }  # fmt: skip


# What the UNets of Stable Diffusion 1.5 and SDXL have in common.
_UNET: Mapping[str, Any] = {
    "_class_name": "UNet2DConditionModel", "act_fn": "silu", "center_input_sample": False, "downsample_padding": 1,
    "flip_sin_to_cos": True, "freq_shift": 0, "in_channels": 4, "out_channels": 4, "layers_per_block": 2,
    "mid_block_scale_factor": 1, "norm_eps": 1e-05, "norm_num_groups": 32,
}  # fmt: skip

MODELS: Mapping[str, Model] = {
    "sd15": Model(
        side=256,
        config=dict(_UNET) | {
            "sample_size": 64, "attention_head_dim": 8, "block_out_channels": [320, 640, 1280, 1280],
            "cross_attention_dim": 768,
            "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
            "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
        },
    ),
    "sdxl": Model(
        side=512,
        config=dict(_UNET) | {
            "sample_size": 128, "attention_head_dim": [5, 10, 20], "block_out_channels": [320, 640, 1280],
            "cross_attention_dim": 2048, "transformer_layers_per_block": [1, 2, 10], "use_linear_projection": True,
            "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
            "down_block_types": ["DownBlock2D"] + ["CrossAttnDownBlock2D"] * 2,
            "up_block_types": ["CrossAttnUpBlock2D"] * 2 + ["UpBlock2D"],
        },
    ),
    "flux-1.2b": Model(side=256, config=_flux(2, 3)),
    "flux-12b": Model(side=1024, config=_flux(19, 38)),
}  # fmt: skip


def folder(name: str, models: Path, *, files: int | None = None) -> Path:
    """The component's folder under `models`, generated if it is not there."""
    place = models / f"sdquant-bench-{name}"
    if not (place / "config.json").exists():
        generate(MODELS[name].config, place, files=files)
    return place


def generate(config: Mapping[str, Any], place: Path, dtype: str = "bfloat16", files: int | None = None) -> None:
    """Write a component with random weights; config.json comes last, so that a folder with one is whole.

    Args:
        dtype: torch's name. files: how many, of about the same size; default: as many as make a GiB each.
    """
    import torch
    from safetensors.torch import save_file
    from tqdm import tqdm

    from sdquant.models import components

    empty = components.empty("diffusers", config["_class_name"], config)
    shapes = {name: tuple(p.shape) for name, p in empty.named_parameters()}
    kind: torch.dtype = getattr(torch, dtype)
    total = sum(math.prod(shape) for shape in shapes.values()) * kind.itemsize
    count, noise = files or math.ceil(total / SHARD), torch.Generator().manual_seed(0)
    place.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    part: dict[str, torch.Tensor] = {}
    names = [
        f"diffusion_pytorch_model-{number + 1:05}-of-{count:05}.safetensors" if count > 1
        else "diffusion_pytorch_model.safetensors"
        for number in range(count)
    ]  # fmt: skip
    done = 0
    with tqdm(total=total, desc=f"Generating {place.name}", unit="B", unit_scale=True, disable=None) as bar:
        for position, (name, shape) in enumerate(shapes.items()):
            part[name] = _values(name, shape, kind, noise)
            nbytes = part[name].numel() * kind.itemsize
            done += nbytes
            bar.update(nbytes)
            file = names[min(len(set(index.values())), count - 1)]
            last = position == len(shapes) - 1
            if last or (done >= total * (names.index(file) + 1) / count and names.index(file) < count - 1):
                save_file(part, place / file, metadata={"format": "pt"})
                index |= dict.fromkeys(part, file)
                part = {}
    if count > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
        (place / "diffusion_pytorch_model.safetensors.index.json").write_text(text)
    (place / "config.json").write_text(json.dumps(dict(config), indent=1))


def _values(name: str, shape: tuple[int, ...], dtype: Any, noise: Any) -> Any:
    """A weight, a norm's scale, or a bias; a norm's scale is what has one dimension and is called weight."""
    import torch

    if len(shape) < 2:
        return (torch.ones if name.endswith("weight") else torch.zeros)(shape, dtype=dtype)
    return torch.empty(shape, dtype=dtype).normal_(0, math.prod(shape[1:]) ** -0.5, generator=noise)


def main() -> None:
    """Generate one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("models", type=Path, help="the folder that its folder goes into")
    args = parser.parse_args()
    print(folder(args.model, args.models))


if __name__ == "__main__":
    main()
