"""What a run needs besides weights: a rough allowance, for advice and presets. No promise."""

from __future__ import annotations

GIB = 1 << 30

# Activations and the VAE's work at the sizes that images usually have.
MOST = int(1.5 * GIB)


def allowance(bytes_bf16: int) -> int:
    """Bytes to leave free for activations.

    Args:
        bytes_bf16: of the whole model in bf16. Activations grow with a model's width, so a small one (such as those
            that are shipped) is allowed as much again as its weights, and no more.
    """
    return min(MOST, bytes_bf16)
