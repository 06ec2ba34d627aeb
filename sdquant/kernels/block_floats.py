"""Rows of numbers as small floats in blocks that share a scale: NVFP4 and MXFP8, of weights and of activations.

NVFP4: values of E2M1, two in a byte, an E4M3 scale for 16, and a float32 factor of all scales. MXFP8 (OCP Microscaling
formats 1.0): values of E4M3, and a power of two for 32; exponent 0 stands for a block of zeros. Codes and scales are
those of comfy-kitchen's `quantize_nvfp4` and `quantize_mxfp8`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import dtype_named
from ..utils.tensors import divided

NVFP4, MXFP8 = 16, 32  # numbers in a block
_LARGEST, _LARGEST_SCALE = 6.0, 448.0  # of E2M1 and E4M3
_BIAS, _MOST, _NAN = 127, 254, 255  # of E8M0
_ROWS, _COLUMNS = 128, 4  # of a tile of scales
_E8M0 = "float8_e8m0fnu"


def factor_of(largest: Tensor) -> Tensor:
    """Return the factor of NVFP4 scales for the largest magnitude of all numbers: float32 []."""
    factor = divided(largest.float(), _LARGEST * _LARGEST_SCALE)
    return torch.where(factor == 0, 1.0, factor)  # zeros alone; NaN stays, and shows


def nvfp4(rows: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows [m, k] with a factor: codes, uint8 [m, k / 2], the even column in the low half; scales,
    float8_e4m3fn [m, k / 16]. A last block that is not full is filled up with zeros."""
    values = rows.float()
    values = F.pad(values, (0, -values.shape[1] % NVFP4)).view(len(values), -1, NVFP4)
    largest = divided(values.abs().amax(dim=-1), _LARGEST)
    scale = (largest / factor).clamp_(max=_LARGEST_SCALE).to(torch.float8_e4m3fn)
    step = (scale.float() * factor).unsqueeze(-1)
    values = torch.where(step == 0, 0.0, values / step)
    codes = _e2m1(values).view(len(values), -1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale


def _e2m1(values: Tensor) -> Tensor:
    """Return the nearest E2M1 codes, ties to even, saturated: uint8 of the same shape. Bit 3 is the sign.

    Levels are 0.5 apart below 2, 1 apart below 4, and 2 apart from there to 6.
    """
    sizes = values.abs().clamp_(max=_LARGEST)
    upper = torch.where(sizes < 4, sizes.round().add_(2), sizes.mul(0.5).round_().add_(4))
    codes = torch.where(sizes < 2, sizes.mul_(2).round_(), upper).to(torch.uint8)
    return codes.bitwise_or_(torch.signbit(values).to(torch.uint8).mul_(8))


def mxfp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows [m, k]: codes, float8_e4m3fn [m, k]; scales, float8_e8m0fnu [m, k / 32], rounded up."""
    wide = rows.float()
    values = F.pad(wide, (0, -wide.shape[1] % MXFP8)).view(len(wide), -1, MXFP8)
    largest = values.abs().amax(dim=-1)
    exponents = torch.log2(divided(largest, _LARGEST_SCALE).clamp_(min=2.0**-_BIAS)).ceil_()
    exponents = exponents.add_(_BIAS).clamp_(0, _MOST)
    exponents = torch.where(largest == 0, 0.0, exponents)
    exponents = torch.where(largest.isfinite(), exponents, float(_NAN))  # which shows
    scale = exponents.to(torch.uint8)
    step = (scale.int() << 23).view(torch.float32).unsqueeze(-1)  # 0 for exponent 0
    codes = torch.where(step == 0, 0.0, values / step).clamp_(-_LARGEST_SCALE, _LARGEST_SCALE)
    codes = codes.view(len(wide), -1)[:, : wide.shape[1]].to(torch.float8_e4m3fn)
    return codes.contiguous(), scale.view(dtype_named(_E8M0))


def tiled(grid: Tensor) -> Tensor:
    """Return scales of one byte [rows, columns] in the order of Blackwell's tensor cores: uint8 [rows, columns], both
    in whole tiles of 128 rows and 4 columns.

    Entry (r, c) of a grid with C columns, both padded, lies at

        (r // 128 * (C // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4

    ("1D block scaling factors layout" of the cuBLAS documentation).
    """
    rows, columns = grid.shape
    down, across = math.ceil(rows / _ROWS), math.ceil(columns / _COLUMNS)
    padded = F.pad(grid.view(torch.uint8), (0, across * _COLUMNS - columns, 0, down * _ROWS - rows))
    tiles = padded.view(down, 4, 32, across, _COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * _ROWS, across * _COLUMNS)
