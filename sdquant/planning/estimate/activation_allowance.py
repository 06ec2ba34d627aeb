"""Rough allowance for the memory that a run needs besides weights, for advice and presets."""

from __future__ import annotations

from ...utils.byte_sizes import GIB

# Activations and the VAE's temporaries at usual image sizes.
MOST = int(1.5 * GIB)


def allowance(bytes_bf16: int) -> int:
    """Return how many bytes to leave free for activations.

    Args:
        bytes_bf16: size of the whole model in bf16. Activations grow with the width of a model, so the allowance for a
            small one (such as the bundled models) is at most the size of its weights.
    """
    return min(MOST, bytes_bf16)
