"""Weights with a low-rank branch, decoded for one product of torch's: whole, or with the second side to their right.

A whole weight is the residual, with its factors, and the product of the branch's two sides. It is multiplied by
activations as they are; that with a side to its right by those that `branch_sides.down` divides, with their product
with the first side to their right: decoding is cheaper then. Which way is faster is measured on each card.
"""

# ruff: noqa: SIM108  (branches on what is compiled in read better in full)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, import-untyped, import-not-found"

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core import LowRank, PackedLayout, dtype_name
from .decoding import position, rounded, values
from .launch_config import EXACT, Launch, plan_of, pointers

if TYPE_CHECKING:
    from .blocks import Block

Part = TypeVar("Part", Tensor, str)

__all__ = ["decoding_with_branch", "fits", "of_branch", "sound_branch"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROWS, _COLUMNS = 32, 128  # of a tile
LEAST_RANK, MOST_RANK = 16, 128


@triton.jit
def branch_kernel(
    out, up, down, smooth, of_rows, rank, rows, columns, apart, per_row, codes, scale, nested, zero, shift, table,
    dynamic, group, plane_size, offset, factor, number, count, many,
    FAMILY: tl.constexpr, PACKING: tl.constexpr, PLANES: tl.constexpr, LANES: tl.constexpr,
    ORDER: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, FACTOR: tl.constexpr,
    SHIFT: tl.constexpr, TAPS: tl.constexpr, FUSED: tl.constexpr, ARITHMETIC: tl.constexpr, CHUNKS: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, S: tl.constexpr, D_STEP: tl.constexpr,
    Q_STEP: tl.constexpr, H_STEP: tl.constexpr, S_STEP: tl.constexpr, Z: tl.constexpr, BITS: tl.constexpr,
    OUT: tl.constexpr, SMOOTH: tl.constexpr, OF_ROWS: tl.constexpr, TURNED: tl.constexpr, BESIDE: tl.constexpr,
    RANK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write a tile of of_rows * residual / smooth + up down^T, computed in float32 and rounded once, to rows of `out`
    that are `apart`. BESIDE: of of_rows * residual, and `up` to the right of its `columns`.

    Tiles of the same rows follow each other: those that are in work at a time lie together in memory.
    """
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_there = n < rows
    live = n_there[:, None] & (c < per_row)[None, :]
    g = n[:, None] * per_row + c[None, :]
    lane, r = tl.arange(0, LANES)[None, :], tl.arange(0, RANK)
    left = tl.load(up + n[:, None] * rank + r[None, :], mask=n_there[:, None] & (r < rank)[None, :], other=0.0)
    if OF_ROWS:
        by_row = tl.load(of_rows + n, mask=n_there, other=0.0).to(tl.float32)
    row = out + n[:, None] * apart
    if BESIDE:
        side = rounded(left.to(tl.float32), OUT, BITS).to(out.dtype.element_ty)
        tl.store(row + columns + r[None, :], side, mask=(n < tl.where(tl.program_id(0) > 0, 0, rows))[:, None])
    for p in tl.static_range(PLANES):
        v = values(
            codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset, factor, number, count,
            many, g, live, p, FAMILY, PACKING, PLANES, LANES, ORDER, TABLE, SCALE, ZERO, FACTOR, SHIFT, TAPS, FUSED,
            ARITHMETIC, CHUNKS, D, M, Q, H, S, D_STEP, Q_STEP, H_STEP, S_STEP, Z, BITS,
        )  # fmt: skip
        w = tl.reshape(v, [BLOCK_N, BLOCK_C * LANES])
        k = tl.reshape(position(c[:, None], lane, p, PLANES, LANES, ORDER), [BLOCK_C * LANES])
        k_there = k < columns
        if SMOOTH:
            w = w / tl.load(smooth + k, mask=k_there, other=1.0).to(tl.float32)[None, :]
        if OF_ROWS:
            w = w * by_row[:, None]
        if not BESIDE:
            if TURNED:
                at = down + r[:, None] * columns + k[None, :]
            else:
                at = down + k[None, :] * rank + r[:, None]
            right = tl.load(at, mask=(r < rank)[:, None] & k_there[None, :], other=0.0)
            if BITS:  # the interpreter has no products of bfloat16
                w += tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
            else:
                w += tl.dot(left, right)
        y = rounded(w, OUT, BITS).to(out.dtype.element_ty)
        tl.store(row + k[None, :], y, mask=n_there[:, None] & k_there[None, :])


def of_branch(branch: LowRank, parts: Mapping[str, Part]) -> dict[str, Part]:
    """Return the parts of a branch, or their names, by the kernel's pointers; unused ones point to one of its sides."""
    up = parts[branch.up]
    return {
        "up": up,
        "down": parts[branch.down],
        "smooth": parts[branch.smooth] if branch.smooth else up,
        "of_rows": parts[branch.rows] if branch.rows else up,
    }


def fits(form: PackedLayout, block: "Block", branch: LowRank, parts: Mapping[str, Tensor]) -> bool:
    """Return whether the kernel decodes a residual of this form beside this branch."""
    sides = of_branch(branch, parts)
    if any(tensor.dtype not in _DTYPES or not tensor.is_contiguous() for tensor in sides.values()):
        return False
    if sides["up"].dtype != sides["down"].dtype or sides["up"].dtype == torch.float32:  # no tensor cores for those
        return False
    whole = block.family == "form" and block.weights > 1 and form.columns % block.weights == 0
    return whole and sides["up"].shape[1] <= MOST_RANK


def decoding_with_branch(
    form: PackedLayout, parts: Mapping[str, Tensor], branch: LowRank, of: Mapping[str, Tensor], out: Tensor
) -> Launch:
    """Return the launch that dequantizes a weight into `out`, contiguous [rows, columns]; or [rows, columns and more],
    with the second side of its branch to the right.

    Args:
        form, parts: of the residual. of: all parts of the weight, which `branch` names.
    """
    is_beside = out.shape[1] > form.columns
    plan, sides = plan_of(form, parts), of_branch(branch, of)
    rank, per_row = sides["up"].shape[1], form.columns // plan.block.weights
    at_once = max(1, _COLUMNS // plan.block.weights)
    arguments = {
        "out": out,
        **sides,
        "rank": rank,
        "rows": form.rows,
        "columns": form.columns,
        "apart": out.shape[1],
        "per_row": per_row,
        **pointers(form, parts, plan.block),
        **plan.numbers,
        **plan.compiled,
        "OUT": dtype_name(out.dtype),
        "SMOOTH": bool(branch.smooth) and not is_beside,
        "OF_ROWS": bool(branch.rows),
        "TURNED": branch.is_turned,
        "BESIDE": is_beside,
        "RANK": max(LEAST_RANK, triton.next_power_of_2(rank)),
        "BLOCK_N": _ROWS,
        "BLOCK_C": at_once,
    }
    grid = (math.ceil(per_row / at_once), math.ceil(form.rows / _ROWS))
    return Launch(branch_kernel, grid, arguments, {"num_warps": 4, **EXACT})


def sound_branch(device: torch.device) -> bool:
    """Return whether the kernel gives the right weights on a device, whatever the dtypes of the branch."""
    rows, columns, rank = 70, 96, 20
    form = PackedLayout(rows=rows, columns=columns, codes="codes", packing="int8", group=32, scale="scale")
    wave = torch.linspace(-50, 50, rows * columns, dtype=torch.float32, device="cpu").sin()
    codes = (wave.view(rows, columns) * 100).to(torch.int8)
    scale, smooth = wave[: rows * 3].abs() + 0.01, wave[:columns].abs() + 0.5
    up, down = wave[: rows * rank].view(rows, rank), wave[: columns * rank].view(columns, rank)
    for dtype in (torch.bfloat16, torch.float16):
        sides = up.to(dtype), down.to(dtype)
        residual = (codes.view(-1, 32) * scale[:, None]).view(rows, columns)
        expected = residual / smooth + sides[0].float() @ sides[1].float().T
        inputs = {"codes": codes, "scale": scale, "up": sides[0], "down": sides[1], "smooth": smooth}
        of = {name: tensor.to(device) for name, tensor in inputs.items()}
        branch = LowRank(residual=("codes", "scale"), down="down", up="up", smooth="smooth")
        out = torch.empty(rows, columns, dtype=torch.float32, device=device)
        decoding_with_branch(form, of, branch, of, out)(device)
        if not torch.allclose(out.cpu(), expected, rtol=1e-4, atol=1e-3):
            return False
    return True
