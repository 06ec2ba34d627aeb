"""Which devices have tensor cores that Triton uses. No triton."""

from __future__ import annotations

import torch

_LEAST = (8, 0)  # of NVIDIA's; those of Turing it does not use since 3.3


def has_tensor_cores(device: torch.device) -> bool:
    """Return whether Triton multiplies on a device's tensor cores, or on what others have instead of them."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device) >= _LEAST
