"""Code tables of bitsandbytes' formats, without bitsandbytes; tests compare them with its own.

All tables but torch's own floats are scaled to [-1, 1]: a weight is its code's value times its block's scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..utils.device_constants import constant

# Quantiles of the normal distribution: table 1 of "QLoRA", https://arxiv.org/abs/2305.14314, appendix E.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# Twelfths, by the three bits below the sign.
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)


@constant
def fourbit_code(quant_type: str, device: torch.device) -> Tensor:
    """Return the 16 values of "nf4" or "fp4" by code: float32 [16] in [-1, 1]."""
    values = NF4 if quant_type == "nf4" else (*_FP4, *(-value for value in _FP4))
    table = torch.tensor(values, dtype=torch.float32, device="cpu")
    return (table / table.abs().max()).to(device)


@constant
def float8_values(dtype: torch.dtype, target: torch.dtype, device: torch.device) -> Tensor:
    """Return the value of each of the 256 codes of an 8-bit float dtype, as torch converts them: [256] of `target`."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).to(target).to(device)


@constant
def dynamic_code(device: torch.device) -> Tensor:
    """Return the 256 values in which double quantization stores scales: float32 [256] in [-1, 1], sorted.

    For each of seven powers of ten, the midpoints of equal steps between a tenth of it and itself, twice as many for
    each power:
    "8-bit Optimizers via Block-wise Quantization", https://arxiv.org/abs/2110.02861, section 1.3.
    """
    values = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2**power + 1, dtype=torch.float32, device="cpu")
        middles = (edges[:-1] + edges[1:]) / 2.0
        values += (10 ** (power - 6) * middles).tolist() + (-(10 ** (power - 6)) * middles).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@constant
def e4m3_code(device: torch.device) -> Tensor:
    """Return the 256 values of 8-bit floats with 4 exponent and 3 mantissa bits: float32 [256], sorted, in [-1, 1]."""
    values = [mantissa / 8 * 2.0**-8 for mantissa in range(8)]
    values += [(1 + mantissa / 8) * 2.0 ** (9 - exponent) for exponent in range(1, 16) for mantissa in range(8)]
    table = torch.tensor(sorted([*values, *(-value for value in values)]), dtype=torch.float32, device="cpu")
    return (table / table.max()).to(device)


# The magnitudes of E2M1, of the OCP Microscaling formats 1.0; bit 3 of a code is the sign.
E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@constant
def code_table(name: str, arithmetic: str, device: torch.device) -> Tensor:
    """Return the values by code of a table of `packed_layout`: float32 [16 or 256], rounded to dtype `arithmetic`."""
    if name == "e4m3":
        values = e4m3_code(device)
    elif name == "e2m1":
        values = torch.tensor((*E2M1_LEVELS, *(-level for level in E2M1_LEVELS)), dtype=torch.float32, device=device)
    else:
        values = fourbit_code(name, device)
    return values.to(getattr(torch, arithmetic)).to(torch.float32)
