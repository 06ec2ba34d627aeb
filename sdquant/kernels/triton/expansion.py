"""Codes of 4 and 6 bits to the 8-bit integers that they stand for: see `kernels.expansion`."""

# ruff: noqa: SIM108  (branches on what is compiled in read better in full)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, import-untyped, import-not-found"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core import dtype_name
from .activations import nearest
from .decoding import float8, nibbles, of_sixteen, rounded, sixteen
from .launch_config import EXACT, FLOAT8_SCALES, INTERPRETED, Launch
from .loads import byte

BLOCK = 1024  # columns for each program
_LARGEST = 127


@triton.jit
def expand_kernel(
    codes, scale, table, channel, out, columns, stored, groups, group, apart, SIX: tl.constexpr, FLOAT8: tl.constexpr,
    CHANNEL: tl.constexpr, OUT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the integers of BLOCK columns of one row; with CHANNEL as floats, times the scale of the row. Rows of codes
    are `stored` bytes, those of tables `apart` values apart."""
    row, first = tl.program_id(0), tl.program_id(1) * BLOCK
    k = first + tl.arange(0, BLOCK)
    live = k < columns
    at = scale + row * groups + k // group
    if FLOAT8:
        s = float8(tl.load(at, mask=live, other=0).to(tl.int32), True)
    else:
        s = tl.load(at, mask=live, other=0.0)
    of_row = codes + row * stored
    words = (first // 8 + tl.arange(0, BLOCK // 8))[None, :]
    code = tl.reshape(nibbles(of_row, words, words * 8 < columns, 8, False), [BLOCK])
    if SIX:
        upper = byte(of_row + columns // 2, k // 4, live) >> (2 * (k % 4))
        v = (code + ((upper & 3) << 4) - 32).to(tl.float32)
    else:
        v = of_sixteen(sixteen(table + row * apart), code)
    whole = nearest(tl.minimum(tl.maximum(v * s, -127.0), 127.0))
    if CHANNEL:
        y = rounded(whole.to(tl.float32) * tl.load(channel + row), OUT, BITS).to(out.dtype.element_ty)
    else:
        y = whole.to(tl.int8)
    tl.store(out + row * columns + k, y, mask=live)


def expansion(
    codes: Tensor, bits: int, scale: Tensor, table: Tensor | None, out: Tensor, channel: Tensor | None = None
) -> Launch:
    """Return the launch of `kernels.expansion.expand_rows`, for words of codes: rows are multiples of four bytes."""
    (rows, columns), groups = out.shape, scale.shape[1]
    is_float8 = scale.dtype in FLOAT8_SCALES
    arguments = {
        "codes": codes,
        "scale": scale.view(torch.uint8) if is_float8 else scale,
        "table": out if table is None else table,
        "channel": out if channel is None else channel,
        "out": out,
        "columns": columns,
        "stored": codes.shape[1],
        "groups": groups,
        "group": columns // groups,
        "apart": 16 if table is not None and table.ndim == 2 else 0,
        "SIX": bits == 6,
        "FLOAT8": is_float8,
        "CHANNEL": channel is not None,
        "OUT": dtype_name(out.dtype),
        "BITS": INTERPRETED,
        "BLOCK": BLOCK,
    }
    return Launch(expand_kernel, (rows, math.ceil(columns / BLOCK)), arguments, {"num_warps": 4, **EXACT})


def sound_expansion(device: torch.device) -> bool:
    """Return whether the kernel gives the right integers on a device."""
    k = torch.arange(4 * 64, dtype=torch.float32, device="cpu")
    codes = (k * 37 % 256).to(torch.uint8).view(8, 32)
    table, scale = k[:16].sub(7.5).mul(1 / 7), k[:32].add(1).mul(5).view(8, 4)
    levels = table[torch.stack([codes & 15, codes >> 4], -1).view(8, 64).int()]
    expected = (levels.view(8, 4, 16) * scale.unsqueeze(-1)).round().clamp(-_LARGEST, _LARGEST).to(torch.int8)
    out = torch.empty(8, 64, dtype=torch.int8, device=device)
    expansion(codes.to(device), 4, scale.to(device), table.to(device), out)(device)
    values = torch.empty(8, 64, dtype=torch.bfloat16, device=device)
    channel = scale[:, :1].contiguous()
    expansion(codes.to(device), 4, scale.to(device), table.to(device), values, channel.to(device))(device)
    right = (expected.view(8, 64).float() * channel).to(values.dtype)
    return torch.equal(out.cpu(), expected.view(8, 64)) and torch.equal(values.cpu(), right)
