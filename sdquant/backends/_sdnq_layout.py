"""The parts that SDNQ makes of a weight, by its settings; and the settings, by the parts. Needs no sdnq."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..core import ROTATION, TensorSpec, Unfit
from ._sdnq_storage import storage_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..core import Packed
    from ._sdnq_codes import Code

AUTO = 0  # the group size that SDNQ chooses by the dtype
_SIZES = (AUTO, -1, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Settings of SDNQ's that the shapes of parts, or their values, depend on.

    Attributes:
        group_size: input channels that share a scale; -1 for all of them.
        rank: of the SVD; 0 for none.
        hadamard: most values that are rotated together; 0 for no rotation.
        fp32_scales: scales are float32, whatever dtype the weight has.
    """

    group_size: int
    rank: int = 0
    hadamard: int = 0
    fp32_scales: bool = False


def part_specs(code: Code, choice: Choice, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
    """Return the parts of a weight of this shape and dtype.

    Raises:
        Unfit: its weights do not fill whole units of codes.
    """
    numel, per_unit = math.prod(shape), len(code.fields)
    if per_unit and numel % per_unit:
        raise Unfit(f"its {numel} weights do not fill whole units of {per_unit} codes")
    rank = min(choice.rank, shape[0], math.prod(shape[1:]))  # of a matrix, at most the shorter of its sides
    groups = _groups(shape[1], _group_size(code, choice, len(shape), bool(rank)))
    split = (shape[0], groups, shape[1] // groups, *shape[2:]) if groups > 1 else shape
    stored = split
    if code.fields:
        stored = (numel // per_unit, code.unit) if code.unit > 1 else (numel // per_unit,)
    axis = 2 if groups > 1 else 1
    scale = TensorSpec(
        dtype="float32" if choice.fp32_scales else dtype, shape=(*split[:axis], 1, *split[axis + 1 :])
    )  # fmt: skip
    parts = {"weight": TensorSpec(dtype=code.dtype, shape=stored), "scale": scale}
    if code.zero_point:
        parts["zero_point"] = scale
    if rank:
        parts["svd_up"] = TensorSpec(dtype=dtype, shape=(shape[0], rank))
        parts["svd_down"] = TensorSpec(dtype=dtype, shape=(rank, math.prod(shape[1:])))
    return parts


def rotation_of(choice: Choice, shape: tuple[int, ...]) -> int:
    """Return the group size of a weight's rotation; 0 for none."""
    if not choice.hadamard:
        return 0
    from ..core import hadamard  # which imports torch

    return hadamard.group_size(shape[1], choice.hadamard)


def choice_of(weights: Mapping[str, Packed]) -> tuple[Choice, frozenset[str]]:
    """Return the settings that most of these weights were made with, and the names of those that were."""
    plain = {name: packed for name, packed in weights.items() if is_plain(packed)}
    base = Choice(
        group_size=AUTO,
        # Smaller ranks and rotations are those of smaller matrices.
        rank=max((p.parts["svd_up"].shape[1] for p in plain.values() if "svd_up" in p.parts), default=0),
        hadamard=max((p.spec.rotation for p in plain.values()), default=0),
        fp32_scales=2 * sum(p.parts["scale"].itemsize == 4 for p in plain.values()) > len(plain),
    )
    best, fitting = base, frozenset[str]()
    for size in _SIZES:
        choice = replace(base, group_size=size)
        names = frozenset(name for name, packed in plain.items() if _is_of(packed, choice))
        if len(names) > len(fitting):
            best, fitting = choice, names
    return best, fitting


def is_plain(packed: Packed) -> bool:
    """Return whether a weight has nothing of SDNQ's but a rotation and an SVD: no codebook, no quantized scales."""
    return replace(storage_of(packed.spec.scheme.name, packed.spec.details), hadamard=0).plain


def _is_of(packed: Packed, choice: Choice) -> bool:
    """Return whether a weight's parts are those of the settings, in shape; scales may have a dtype of their own."""
    spec = packed.spec
    if spec.details.get(ROTATION, 0) != rotation_of(choice, spec.shape):
        return False
    try:
        parts = part_specs(storage_of(spec.scheme.name, spec.details).code, choice, spec.shape, spec.dtype)
    except Unfit:
        return False
    return {part: tuple(t.shape) for part, t in packed.parts.items()} == {
        part: row.shape for part, row in parts.items()
    }


def _group_size(code: Code, choice: Choice, dimensions: int, svd: bool) -> int:
    if choice.group_size != AUTO:
        return choice.group_size
    return 1 << (1 + code.bits + (dimensions == 2) + svd)


def _groups(channels: int, group_size: int) -> int:
    """Return the number of groups by SDNQ's rule: channels / group_size, or the next smaller number that divides."""
    groups = channels // group_size if 0 < group_size < channels else 1
    if groups > 1 and groups * group_size != channels:
        groups -= 1  # one group less, even where as many larger ones would divide them: 640 channels by 256 are 1 group
        while groups > 1 and channels % groups:
            groups -= 1
    return max(1, groups)
