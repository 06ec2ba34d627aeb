"""Quantize rows that are rotated, to the codes and scales that a product with the matrix gives, mostly without one.

Weights are rotated as comfy-kitchen does it, by a product in float32 with the matrix of `core.hadamard`, and are to
have the same codes. The product takes ten times as long as butterflies, which sum in another order. But the order
matters for few codes: butterflies, with a bound of how far each group is from any other order
(kernels/cpu/rotate_bounds.h), decide nearly all of bfloat16's and float16's weights. Groups in which it may decide
a row's scale or a code, one in twenty of bfloat16's, are multiplied with the matrix after all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import hadamard
from ..utils.tensors import is_finite
from .cpu.rotation import code_within, rotate_within
from .dispatch_guard import plain, seen, undisturbed
from .workspace import scratch

GROUPS = (64, 256)  # for which it is faster, and bounds are small
TOGETHER = 16  # groups are multiplied in multiples of it: BLAS sums a few rows in another order than many
_SAMPLE = 16  # rows that show whether it is worth it
_WORTHWHILE = 0.25  # the largest share of groups that the matrix may have to do again


class _Rotated(NamedTuple):
    """Rows rotated by butterflies: values [rows, columns]; of each group, [rows, groups], the largest size and how far
    results of another order of sums may be from the values."""

    values: Tensor
    largest: Tensor
    bounds: Tensor


def quantize(
    rows: Tensor, group: int, scale_of: Callable[[Tensor], Tensor], least: int, most: int
) -> tuple[Tensor, Tensor]:
    """Return the codes of rotated rows, int8 [rows, columns], and their scales, float32 [rows, 1].

    Args:
        rows: weights, [rows, columns], in a float dtype.
        group: how many columns are rotated together.
        scale_of: makes the scales of the largest sizes in rows, [rows, 1].
        least: the smallest code.
        most: the largest code.
    """
    if group in GROUPS and rows.is_cpu and plain(rows) and not seen(rows) and _is_worth_it(rows, group, scale_of):
        result = _mostly_without_matrix(rows, group, scale_of, least, most)
        if result is not None:
            return result
    values = hadamard.rotate_by_matrix(rows.float(), group)
    scale = scale_of(values.abs().amax(dim=1, keepdim=True))
    return _codes(values, scale, least, most), scale


def chunks(weight: Tensor) -> int:
    """Return how many times as many rows of a weight are best quantized together as where each step is torch's, whose
    temporaries are to stay in the cache."""
    return 4 if weight.element_size() == 2 else 1


def _codes(values: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
    return (values / scale).round_().clamp_(least, most).to(torch.int8)


def _is_worth_it(rows: Tensor, group: int, scale_of: Callable[[Tensor], Tensor]) -> bool:
    rotated = _rotate(rows[:_SAMPLE], group) if rows.numel() // group >= TOGETHER else None
    if rotated is None:
        return False
    # Where numbers are evenly spread, 2 * bound / scale of them are within the bound of the middle of two codes.
    within = rotated.bounds / scale_of(rotated.largest.amax(1, keepdim=True)) * (2 * group)
    is_rare = bool(within.clamp_(max=1).mean() <= _WORTHWHILE)  # not with NaN
    return is_rare and _sums_alike(group, torch.get_num_threads(), torch.get_float32_matmul_precision())


@lru_cache
@undisturbed
def _sums_alike(group: int, threads: int, precision: str) -> bool:
    """Return whether a product with the matrix has the same bits for a few groups as for many, and sums in float32."""
    x = torch.randn(
        64 * TOGETHER, group, dtype=torch.float32, generator=torch.Generator("cpu").manual_seed(0), device="cpu"
    )
    many, exact = hadamard.rotate_by_matrix(x, group), hadamard.rotate_by_matrix(x.double(), group)
    alike = all(torch.equal(hadamard.rotate_by_matrix(some, group), expected)
                for some, expected in zip(x.chunk(64), many.chunk(64), strict=True))  # fmt: skip
    return alike and bool(((many - exact).abs().amax(1) <= 2**-24 * x.double().abs().sum(1)).all())


def _rotate(rows: Tensor, group: int) -> _Rotated | None:
    """Rotate by butterflies, into this thread's workspace; None where the C kernels cannot."""
    values = scratch(tuple(rows.shape), torch.float32, rows.device)
    largest, bounds = torch.empty(2, len(rows), rows.shape[1] // group, dtype=torch.float32, device=rows.device)
    return _Rotated(values, largest, bounds) if rotate_within(rows, group, values, largest, bounds) else None


def _mostly_without_matrix(
    rows: Tensor, group: int, scale_of: Callable[[Tensor], Tensor], least: int, most: int
) -> tuple[Tensor, Tensor] | None:
    """Do as `quantize`; None for numbers that are not finite."""
    rotated = _rotate(rows, group)
    assert rotated is not None
    values, largest, bounds = rotated
    # Which groups may have a row's largest number: those that reach what some group has whatever the order.
    may_have = (bounds > 0) & (largest + bounds >= (largest - bounds).amax(1, keepdim=True))
    index = may_have.view(-1).nonzero().view(-1)
    if len(index):
        exact = _by_matrix(rows, group, index)
        values.view(-1, group)[index] = exact
        largest.view(-1)[index] = exact.abs().amax(1)
        bounds.view(-1)[index] = 0
    scale = scale_of(largest.amax(1, keepdim=True))
    if not is_finite(scale):
        return None
    codes, undecided = code_within(values, group, scale, bounds, least, most)
    index = undecided.view(-1).nonzero().view(-1)
    if len(index):
        exact = _by_matrix(rows, group, index)
        codes.view(-1, group)[index] = _codes(exact, scale[index // bounds.shape[1]], least, most)
    return codes, scale


def _by_matrix(rows: Tensor, group: int, index: Tensor) -> Tensor:
    """Return some groups of rows, rotated by the matrix, [groups, group]."""
    groups = rows.reshape(-1, group)[index].float()
    missing = -len(index) % TOGETHER
    if missing:
        groups = torch.cat([groups, groups.new_zeros(missing, group)])
    return hadamard.rotate_by_matrix(groups, group)[: len(index)]
