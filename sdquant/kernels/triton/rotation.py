"""Rotations of activations on GPUs: `hadamard.rotate` by butterflies, as the C kernels do it (cpu/rotate.h).

The regular matrix of a power of 4 is a Kronecker product of matrices of four rows, so numbers are combined in fours
that are 1 apart, then 4, 16 and so on: the sum of a pair, and the difference of the other one, of their halves.
Sylvester's, of other powers of 2, combines pairs, and scales at the end. Numbers of regular groups are those of the C
kernels, bit for bit: the order of sums is the same, and halving is exact.

`rotated` is also called by `activations.quantize_kernel`. Reached by `imports.rotation`, so that nothing imports triton
by accident.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, import-untyped, import-not-found"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core import dtype_name, hadamard
from .decoding import rounded
from .launch_config import EXACT, INTERPRETED, Launch

AT_ONCE = 4096  # numbers for each program; a multiple of every group


@triton.jit
def _odd_bits(a, b):
    return a ^ b


@triton.jit
def swapped(v, AXIS: tl.constexpr):
    """Return v, float32, with the two places of an axis exchanged. By bits, which are exact and keep NaN where it is:
    within a warp an exchange is one shuffle, and nothing goes through shared memory."""
    bits = v.to(tl.int32, bitcast=True)
    return (bits ^ tl.reduce(bits, AXIS, _odd_bits, keep_dims=True)).to(tl.float32, bitcast=True)


@triton.jit
def rotated(v, BLOCK: tl.constexpr, STEPS: tl.constexpr, PAIRS: tl.constexpr, BY: tl.constexpr):
    """Return v, float32 [BLOCK], with each of its groups rotated. STEPS: of fours, or with PAIRS of twos, which are
    multiplied by BY at the end."""
    for step in tl.static_range(STEPS):
        if PAIRS:
            pairs = tl.reshape(v, [BLOCK // 2 ** (step + 1), 2, 2**step])
            other = swapped(pairs, 1)
            v = tl.where(tl.arange(0, 2)[None, :, None] == 0, pairs + other, other - pairs)
        else:
            halves = tl.reshape(v * 0.5, [BLOCK // 4 ** (step + 1), 2, 2, 4**step])
            other = swapped(halves, 2)
            v = (halves + other) + swapped(halves - other, 1)
        v = tl.reshape(v, [BLOCK])
    if PAIRS:
        v = v * BY
    return v


@triton.jit
def rotate_kernel(
    x, out, count, STEPS: tl.constexpr, PAIRS: tl.constexpr, BY: tl.constexpr, OUT: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate `count` numbers of x, whole groups, and round them to OUT, the dtype of x."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    v = rounded(rotated(v, BLOCK, STEPS, PAIRS, BY), OUT, BITS)
    tl.store(out + at, v.to(out.dtype.element_ty), mask=at < count)


def steps_of(group: int) -> dict[str, object]:
    """Return the constants of `rotated` for a group; 0 rotates nothing."""
    if not group:
        return {"STEPS": 0, "PAIRS": False, "BY": 1.0}
    bits = group.bit_length() - 1
    pairs = not hadamard.is_regular(group)
    return {"STEPS": bits if pairs else bits // 2, "PAIRS": pairs, "BY": 1 / math.sqrt(group) if pairs else 1.0}


def rotation(x: Tensor, group: int, out: Tensor) -> Launch:
    """Return the launch that rotates runs of `group` columns of x [..., columns] into `out`; both contiguous."""
    arguments = {
        "x": x,
        "out": out,
        "count": x.numel(),
        **steps_of(group),
        "OUT": dtype_name(out.dtype),
        "BITS": INTERPRETED,
        "BLOCK": AT_ONCE if not INTERPRETED else max(group, 16),
    }
    return Launch(rotate_kernel, (math.ceil(x.numel() / arguments["BLOCK"]),), arguments, {"num_warps": 8, **EXACT})  # type: ignore[operator]


def rotate_columns(x: Tensor, group: int) -> Tensor:
    """Do as `hadamard.rotate` for x of any float dtype but float64."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        rotation(x, group, out)(x.device)
    return out


def butterflies(x: Tensor, group: int) -> Tensor:
    """Return what `rotated` computes for x [..., columns], step by step in torch: float32."""
    values, bits = x.float(), group.bit_length() - 1
    if hadamard.is_regular(group):
        for step in range(bits // 2):
            a, b, c, d = (values * 0.5).reshape(-1, 4, 4**step).unbind(1)
            ab, cd = (a + b, a - b), (c + d, c - d)
            values = torch.stack([ab[0] + cd[1], ab[0] - cd[1], cd[0] + ab[1], cd[0] - ab[1]], 1)
        return values.view(x.shape)
    for step in range(bits):
        a, b = values.reshape(-1, 2, 2**step).unbind(1)
        values = torch.stack([a + b, a - b], 1)
    return values.view(x.shape) * (1 / math.sqrt(group))
