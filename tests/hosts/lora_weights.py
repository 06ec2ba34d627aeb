"""LoRAs for the hosts' tests: random ones on every kind of layer that is quantized, and what they do to a network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

LAYERS = ("to_q", "to_out.0", "ff.net.2", "conv1", "q_proj", "time_emb_proj")


def layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that get a LoRA, by path."""
    for path, module in model.named_modules():
        if path.endswith(LAYERS):
            yield path, module


def matrices(layer: Any, rank: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Up and down of a LoRA, which changes the weight by a tenth."""
    shape = torch.Size(layer.weight.shape)
    generator = torch.Generator().manual_seed(seed)
    up, down = (torch.randn(n, rank, generator=generator) for n in (shape[0], shape[1:].numel()))
    up *= 0.1 * layer.weight.detach().norm() / (up @ down.T).norm()
    kernel = [1] * (len(shape) - 2)
    return {
        "lora_up.weight": up.reshape(shape[0], rank, *kernel), "lora_down.weight": down.T.reshape(rank, *shape[1:])
    }  # fmt: skip


def run(unet: nn.Module) -> Tensor:
    """Output of a UNet for fixed inputs."""
    torch.manual_seed(1)
    sample, states = torch.randn(1, 4, 8, 8), torch.randn(1, 16, unet.config.cross_attention_dim)
    with torch.no_grad():
        out: Tensor = unet(sample, 5, encoder_hidden_states=states).sample
    return out


def cosine(one: Tensor, other: Tensor) -> float:
    """How alike the directions of two effects are."""
    return float(torch.nn.functional.cosine_similarity(one.flatten().double(), other.flatten().double(), 0))
