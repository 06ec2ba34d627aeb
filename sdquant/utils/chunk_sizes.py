"""How many weights are dequantized at a time in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# What stays in a core's cache: a megabyte of float32.
CPU = 1 << 18
# On a GPU each piece costs kernel launches, 5 us each or more, and temporaries are given back at once: the weights of
# nearly every layer in one piece, with temporaries of 256 MB in float32.
ELSEWHERE = 1 << 26


def weights_at_once(device: torch.device) -> int:
    """Return how many weights are dequantized at a time on a device."""
    return CPU if device.type == "cpu" else ELSEWHERE
