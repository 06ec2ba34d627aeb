"""Other codes for a packed weight, which are chosen for the rows that they stand for, with the scales that it has."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..core import Packed, hadamard, packed_rows
from ..utils.malloc_trim import trim
from ._code_levels import levels_of, with_codes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ..core import LowRank, PackedLayout
    from ._code_levels import Levels

WEIGHTS_AT_ONCE = 1 << 21  # rounded at a time; a few float32 numbers are kept of each


class RowTarget:
    """The float32 rows that codes are to stand for: rotated, without the branch. Made when they are asked for: callers
    may change them, and not the weight."""

    def __init__(self, weight: Tensor, rotation: int, codes: Packed, branch: LowRank | None) -> None:
        self._weight, self._rotation = weight.detach(), rotation
        self._up = self._down = self.smooth = None
        if branch is not None:
            down = codes.parts[branch.down].float()
            self._up, self._down = codes.parts[branch.up].float(), down if branch.is_turned else down.T
            self.smooth = codes.parts[branch.smooth].float() if branch.smooth else None

    def __call__(self, start: int, stop: int) -> Tensor:
        rows = self._weight[start:stop].reshape(stop - start, -1).to(torch.float32, copy=True)
        if self._rotation:
            rows = hadamard.rotate_by_matrix(rows, self._rotation)
        if self._up is not None and self._down is not None:
            rows = torch.addmm(rows, self._up[start:stop], self._down, alpha=-1)
        return rows if self.smooth is None else rows * self.smooth


def with_new_codes(
    packed: Packed, form: PackedLayout, target: Callable[[int, int], Tensor], choose: Callable[[Tensor, Levels], Tensor]
) -> Packed:
    """Return the packed weight with other codes of the same scales.

    Args:
        target: returns the rows that they are for, of a first and a last one: float32 [n, columns].
        choose: returns the codes for such rows, which it may change, and levels: uint8 [n, columns].
    """
    codec, rows = packed.spec.scheme.codec, form.rows
    step = max(1, WEIGHTS_AT_ONCE // form.columns) if codec.by_row(packed) else rows
    new = torch.empty_like(packed.parts[form.codes], memory_format=torch.contiguous_format)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        some = packed if step >= rows else packed_rows.cut(packed, [(start, stop)])
        here = replace(form, rows=stop - start)
        codes = choose(target(start, stop), levels_of(some, here))
        some = with_codes(some, here, codes)
        if step >= rows:
            return some
        new.view(rows, -1)[start:stop] = some.parts[form.codes].reshape(stop - start, -1)
        del codes, some
        trim()
    return Packed(spec=packed.spec, parts={**packed.parts, form.codes: new})


class Nearest:
    """The nearest of the positions in a table, and its code."""

    def __init__(self, table: Tensor) -> None:
        self._last = len(table) - 1
        self._is_plain = torch.equal(table, torch.arange(len(table), dtype=table.dtype, device=table.device))
        self._positions, self._codes = table.sort(stable=True)
        self._between = (self._positions[1:] + self._positions[:-1]) / 2

    def __call__(self, place: Tensor) -> tuple[Tensor, Tensor]:
        if self._is_plain:
            position = place.round_().clamp_(0, self._last)
            return position, position
        at = torch.bucketize(place, self._between)
        return self._codes[at], self._positions[at]
