"""Ranges of groups that leave less error than those of their weights, in the same format.

An encoder takes a group's scale from its largest weights. A narrower range rounds all others finer and clips these; a
wider one may put more weights near a code: of float4 codes, 4 and 6 are far apart, and a group whose largest weight
becomes 4 has finer ones below ("Four Over Six", arXiv 2512.02010). A codec is given weights of the range that is tried,
so that scales come out as it rounds and packs them; then each weight gets the code that is nearest to it.

The error is that of the weights, or with statistics that of the layer's output: e H e^T, with the moments H of the
group's inputs, and squares alone where groups are large. GPTQ afterwards takes back what other inputs tell, so that
with it errors count by what is left (`unexplained`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ..core import GPTQ, HADAMARD, RANGE, Packed, QuantSpec, dtype_named, packed_rows
from ..utils.malloc_trim import trim
from ._code_levels import is_known, levels_of
from ._gptq import rotated_moments, unexplained
from ._new_codes import WEIGHTS_AT_ONCE, Nearest, RowTarget, with_new_codes

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import PackedLayout
    from ._code_levels import Levels

# What a group's range is multiplied by.
_NARROW = (0.96, 0.92, 0.88, 0.82, 0.76, 0.7, 0.6)
# Of codes with a zero point: first both ends by the same, then each of them by itself, from the best so far.
_BOTH, _ONE = (1.06, 0.95, 0.9, 0.84, 0.78, 0.7, 0.6), (0.92, 1.06, 0.96, 1.03)
# As far as the second largest code becomes the largest that is used, where that is so much smaller; in so many steps.
_SPARSE, _WIDE = 1.3, 5
_LARGE = 256  # weights in a group, from which on only the squares of inputs count
_WEIGHTS_AT_ONCE = 1 << 18  # which a processor's caches hold
_SAMPLE = 64  # rows that show what the codes of a weight are like


def with_ranges(weight: Tensor, packed: Packed, spec: QuantSpec) -> Packed:
    """Return the packed form of a weight [out, in, ...] with scales of other ranges, and codes for these.

    It is left as it is if its groups are unknown or end within a row, or if errors are not smaller.
    """
    codec, codes = packed.spec.scheme.codec, packed.without_rotation
    branch = codec.low_rank(codes)
    target = RowTarget(weight, packed.spec.rotation, codes, branch)
    if branch is not None:
        codes = Packed(spec=codes.spec, parts=branch.residual_of(codes.parts))
    form = codec.form(codes)
    if form is None or not weight.numel() or not is_known(form) or form.columns % form.group:
        return packed
    search = _Search(codes, form, _plain(packed, spec), _importance(spec, packed, form), target)
    if not search.knows_groups:
        return packed
    trim()  # what the encoder needed
    best = search.best()
    trim()
    encoded = search.encode(best)
    del best
    trim()
    better = with_new_codes(encoded, form, target, nearest_codes)
    del encoded
    if not search.loss(better) < search.loss(codes):
        return packed
    details = {**packed.spec.details, **better.spec.details}  # with the offset of scales that are quantized, too
    return Packed(spec=replace(packed.spec, details=details), parts={**packed.parts, **better.parts})


def nearest_codes(values: Tensor, levels: Levels) -> Tensor:
    """Return the codes that are nearest to values, float32 [rows, columns], which it overwrites: uint8."""
    step = torch.where(levels.step == 0, torch.ones_like(levels.step), levels.step)
    return Nearest(levels.table)(values.sub_(levels.low).div_(step))[0].to(torch.uint8)


def _plain(packed: Packed, spec: QuantSpec) -> QuantSpec:
    """Return the spec of what the codes are of: with neither rotation nor branch."""
    known = packed.spec.scheme.options
    kept = tuple(
        (name, value)
        for name, value in spec.options
        if name in known and not {name, known[name].of} & {GPTQ, RANGE, HADAMARD, "svd", "dynamic"}
    )
    return QuantSpec(packed.spec.scheme, kept)


def _importance(spec: QuantSpec, packed: Packed, form: PackedLayout) -> Tensor | None:
    """Return what errors of a row's columns count: squares [columns], or moments [groups, group, group]; None for
    all alike."""
    moments = spec.second_moments(form.columns)
    if moments is None:
        return None
    moments, rotation, group = moments.to(packed.device, torch.float32), packed.spec.rotation, form.group
    if GPTQ in spec.scheme.options and spec[GPTQ] and moments.shape[1] > 1:
        return unexplained(moments, form.columns, rotation)
    if rotation:
        moments = rotated_moments(moments, rotation, form.columns)
    count, width, _ = moments.shape
    if group > _LARGE or width % group:
        return moments.diagonal(dim1=1, dim2=2).flatten()[: form.columns]
    parts = moments.view(count, width // group, group, width // group, group).diagonal(dim1=1, dim2=3)
    return parts.permute(0, 3, 1, 2).flatten(0, 1)[: form.columns // group].contiguous()


class _End:
    """The weight at an end of each group [n, group], and its place: [n, 1]."""

    def __init__(self, flat: Tensor, place: Tensor) -> None:
        self.place, self.weight = place, flat.gather(1, place)


class _Search:
    """The search for one weight.

    Args:
        packed: what the encoder made of it. form: of that. spec: what encodes other ranges.
        importance: see `_importance`.
    """

    def __init__(
        self, packed: Packed, form: PackedLayout, spec: QuantSpec, importance: Tensor | None, target: RowTarget
    ) -> None:
        self._packed, self._form, self._spec, self._importance, self._target = packed, form, spec, importance, target
        self._codec, self._dtype = spec.scheme.codec, dtype_named(packed.spec.dtype)

    @cached_property
    def _sample(self) -> Levels:
        """The levels of a few rows."""
        packed = self.encode(self._target(0, min(self._form.rows, _SAMPLE)))
        form = self._codec.form(packed)
        assert form is not None  # as that of the whole
        return levels_of(packed, form)

    @property
    def knows_groups(self) -> bool:
        """Return whether the weights of a group lie side by side in a row."""
        steps = self._sample.step.view(-1, self._form.group)
        return bool(((steps - steps[:, :1]).abs() <= 0.02 * steps[:, :1].abs()).all())

    @cached_property
    def _has_two_ends(self) -> bool:
        """Return whether the least code of a group is not a fixed multiple of its step."""
        is_used = self._sample.step != 0
        places = self._sample.low[is_used] / self._sample.step[is_used]
        return places.numel() > 0 and bool(places.amax() - places.amin() > 0.5)

    def best(self) -> Tensor:
        """Return the rows [rows, columns] with the ranges that leave the least error."""
        rows, step = self._form.rows, max(1, _WEIGHTS_AT_ONCE // self._form.columns)
        ranges = [(start, min(start + step, rows)) for start in range(0, rows, step)]
        largest = max(float(self._target(*some).abs().amax()) for some in ranges)
        best = torch.empty(rows, self._form.columns, dtype=self._dtype, device=self._packed.device)
        for start, stop in ranges:
            best[start:stop] = self._best_of(self._target(start, stop), largest)
        return best

    def encode(self, rows: Tensor) -> Packed:
        """Return the packed form of rows [n, columns]."""
        shape = (len(rows), *self._packed.spec.shape[1:])
        return self._codec.encode(rows.to(self._dtype).view(shape), self._spec)

    def loss(self, packed: Packed) -> float:
        """Return the error of a packed weight."""
        total = 0.0
        for start, values in packed_rows.decode_rows(packed, WEIGHTS_AT_ONCE):
            losses = self._losses(values.sub_(self._target(start, start + len(values))))
            total += float(losses.sum(dtype=torch.float64))
        return total

    def _losses(self, errors: Tensor) -> Tensor:
        """Return the loss of each group for errors [n, columns], which it may change: [n * groups, 1]."""
        group = self._form.group
        if self._importance is None or self._importance.ndim == 1:
            squares = errors.square_() if self._importance is None else errors.square_().mul_(self._importance)
            return squares.view(-1, group).sum(1, keepdim=True)
        by_group = errors.view(len(errors), -1, group).transpose(0, 1)
        through = torch.bmm(by_group, self._importance)
        return through.mul_(by_group).sum(2).T.reshape(-1, 1)

    def _best_of(self, values: Tensor, largest: float) -> Tensor:
        """Return rows with the best ranges. `largest`: the largest weight of all, which may scale all groups' scales:
        it keeps its group's range, and no other exceeds it."""
        flat = values.view(-1, self._form.group)
        if self._has_two_ends:
            ends = [_End(flat, flat.argmin(1, keepdim=True)), _End(flat, flat.argmax(1, keepdim=True))]
        else:
            ends = [_End(flat, flat.abs().argmax(1, keepdim=True))]
        may_change = torch.stack([end.weight.abs() for end in ends]).amax(0) < largest
        best, least = flat.clone(), self._losses(self._decoded(flat, largest).sub_(values))
        shares = [torch.ones_like(end.weight) for end in ends]

        def attempt(some: list[Tensor]) -> None:
            ranged, loss = self._ranged(flat, ends, some, largest)
            is_better = (loss < least) & may_change
            least.copy_(torch.where(is_better, loss, least))
            best.copy_(torch.where(is_better, ranged, best))
            for share, new in zip(shares, some, strict=True):
                share.copy_(torch.where(is_better, new, share))

        for both in self._shares:
            attempt([torch.full_like(share, both) for share in shares])
        for factor in _ONE if len(ends) > 1 else ():
            for number in range(len(ends)):
                attempt([share * factor if at == number else share.clone() for at, share in enumerate(shares)])
        return best.view_as(values)

    @cached_property
    def _shares(self) -> tuple[float, ...]:
        """Factors of the ranges of groups, both ends alike."""
        if self._has_two_ends:
            return _BOTH
        table = self._sample.table
        second, last = table.sort().values[-2:].tolist()
        ratio = last / second if bool((table < 0).any()) else 1.0
        wide = (1 + (ratio - 1) * step / _WIDE for step in range(1, _WIDE + 1))
        return _NARROW + (tuple(wide) if ratio > _SPARSE else ())

    def _ranged(self, flat: Tensor, ends: list[_End], shares: list[Tensor], largest: float) -> tuple[Tensor, Tensor]:
        """Return groups [n, group] with other ranges, and their losses: what is outside is clipped, and where a range
        is wider, the weight at its end is moved there."""
        bounds = [(end.weight * share).clamp_(-largest, largest) for end, share in zip(ends, shares, strict=True)]
        low, high = bounds if len(bounds) > 1 else (bounds[0].abs().neg(), bounds[0].abs())
        ranged = flat.clamp(low, high)
        is_wide = [share > 1 for share in shares]
        for end, bound, wide in zip(ends, bounds, is_wide, strict=True):
            ranged.scatter_(1, end.place, torch.where(wide, bound, ranged.gather(1, end.place)))
        decoded = self._decoded(ranged, largest)
        by_group = decoded.view_as(flat)
        for end, wide in zip(ends, is_wide, strict=True):
            if bool(wide.any()):
                moved = torch.where(wide, self._of_moved(by_group, end), by_group.gather(1, end.place))
                by_group.scatter_(1, end.place, moved)
        return ranged, self._losses(decoded.sub_(flat.view_as(decoded)))

    def _of_moved(self, by_group: Tensor, end: _End) -> Tensor:
        """Return what the weights at an end become that were moved, by what they were decoded to there: [groups, 1]."""
        table, there = self._sample.table, by_group.gather(1, end.place)
        if self._has_two_ends:
            low = by_group.amin(1, keepdim=True)
            step = (by_group.amax(1, keepdim=True) - low) / (len(table) - 1)
        else:
            low, step = torch.zeros_like(there), there / torch.where(end.weight < 0, table.min(), table.max())
        position = Nearest(table)((end.weight - low) / torch.where(step == 0, 1, step))[1]
        return low + position * step

    def _decoded(self, flat: Tensor, largest: float) -> Tensor:
        """Return groups of weights [n, group] encoded and decoded: float32 [rows, columns]."""
        last = flat.new_zeros(1, self._form.columns)
        last[0, 0] = largest
        packed = self.encode(torch.cat((flat.view(-1, self._form.columns), last)))
        return self._codec.decode(packed, torch.float32).reshape(-1, self._form.columns)[:-1]
