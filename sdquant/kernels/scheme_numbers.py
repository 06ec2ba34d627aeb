"""Activations rounded to codes in one launch on GPUs, for products that are computed in floats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .triton import imports

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KINDS = ("int", "float8_e4m3fn")


def rounds(kind: str, device: torch.device) -> bool:
    """Return whether there is a kernel that rounds to codes of a kind on a device."""
    return kind in KINDS and device.type == "cuda" and imports.scheme_kernels(device) is not None


def numbers_of(
    x: Tensor, tiles: int, limits: tuple[float, float, float], kind: str, decoded: bool
) -> tuple[Tensor, Tensor]:
    """Round x, contiguous, as `cpu_int8.numbers_of` does, where it `rounds`."""
    kernels: Any = imports.scheme_kernels(x.device)
    pair: tuple[Tensor, Tensor] = kernels.round_tiles(x, x.numel() // tiles, limits, kind != "int", decoded)
    return pair
