"""What a layer takes on this machine: measured when a plan first asks for it, and kept beside the verdicts.

Two curves over the number of activation rows are measured for each kind of layer and dtype: of the unquantized layer
and of `BASE`, a scheme that is encoded at once. Another scheme differs from `BASE` by what decoding a number takes, the
same for any number of rows, so that few rows are measured. A scheme that multiplies in a way of its own gets a curve.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import torch

from ...kernels import verdicts
from . import layer_trials
from .layer_trials import BASE, DIFFERENCE, SIZES, WIDE, Size

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_lock = threading.RLock()
_failed: set[tuple[object, ...]] = set()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # the thread that held it, maybe for seconds, is not in the new process


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What a layer takes.

    Attributes:
        call: seconds of a call that computes almost nothing.
        rows: numbers of activation rows, ascending. each: seconds for each number of the weight with so many.
        wide: what is added to `each` for a weight as large as `WIDE`, which fits into no cache.
        size: numbers of the weight that was measured, up to which nothing is added.
    """

    call: float
    rows: Sequence[int]
    each: Sequence[float]
    wide: float = 0.0
    size: int = 0

    def seconds(self, numbers: int, rows: int) -> float:
        """Return the seconds of a layer with so many numbers in its weight. Between and beyond the numbers of rows that
        were measured, the time grows evenly with them."""
        rows = max(rows, self.rows[0])
        lines = [*pairwise(zip(self.rows, self.each, strict=True))]
        (few, low), (many, high) = next((line for line in lines if rows <= line[1][0]), lines[-1])
        each = low + (rows - few) * max(high - low, 0.0) / (many - few)
        if self.wide and numbers > self.size:
            each += self.wide * min(1.0, math.log(numbers / self.size) / math.log(WIDE.numbers / self.size))
        return self.call + numbers * each


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A quantized layer and the unquantized one."""

    ours: Timing
    plain: Timing


def pair(kind: str, dtype: str, scheme: str | None, compute: str | None) -> Pair | None:
    """Return the times of a layer on this machine's processor; None if they cannot be found out.

    Args:
        kind: "linear" or "conv". dtype: of activations and of the unquantized weight.
        scheme: with its options; None for the unquantized layer, which then is both. compute: "int8", or None.
    """
    base = _curves(kind, dtype, BASE, compute)
    if base is None or scheme == BASE:
        return base
    if scheme is None:
        return Pair(ours=base.plain, plain=base.plain)
    if layer_trials.has_own_products(scheme):
        return _curves(kind, dtype, scheme, compute)
    few = DIFFERENCE[kind].rows
    values = _measured(
        ("layer", kind, dtype, scheme, compute, "than", BASE),
        1 + len(few),
        lambda: layer_trials.both(DIFFERENCE[kind], dtype, scheme, compute, than=BASE)[1],
    )
    if values is None:
        return None
    call, *ratios = values
    rows, each, more = base.ours.rows, [*base.ours.each], 0.0
    for count, ratio in zip(few, ratios, strict=True):
        more = (ratio - 1) * base.ours.each[rows.index(count)]
        each[rows.index(count)] += more
    each = [one if count in few else max(one + more, one / 2) for count, one in zip(rows, each, strict=True)]
    return Pair(ours=replace(base.ours, call=call * base.ours.call, each=each), plain=base.plain)


def others() -> tuple[float, float] | None:
    """Return the seconds of an operation that is no product, and of each byte that it writes; None if unknown."""
    values = _measured(("others",), 2, layer_trials.others)
    return None if values is None else (values[0], values[1])


def _curves(kind: str, dtype: str, scheme: str, compute: str | None) -> Pair | None:
    """Return the curves of a scheme and of the unquantized layer, whose times are the same for all schemes."""
    size = SIZES[kind]
    near = _both(size, dtype, scheme, compute)
    far = near and _both(WIDE, dtype, scheme, compute) if kind == WIDE.kind else near
    if near is None or far is None:
        return None
    at = 1 + size.rows.index(WIDE.rows[0]) if kind == WIDE.kind else 1
    plain, ours = (
        Timing(call=one[0], rows=size.rows, each=one[1:], wide=max(wide[1] - one[at], 0.0), size=size.numbers)
        for one, wide in zip(near, far, strict=True)
    )
    return Pair(plain=plain, ours=ours)


def _both(size: Size, dtype: str, scheme: str, compute: str | None) -> tuple[list[float], list[float]] | None:
    """Return what an unquantized layer and a scheme's take, as `layer_trials.both` has it. The former is measured
    together with `BASE`."""
    count, name = 1 + len(size.rows), (size.kind, size.inputs, dtype)

    def measured(scheme: str, compute: str | None) -> list[float] | None:
        key = ("layer", *name, scheme, compute)
        return _measured(key, 2 * count, lambda: [*chain(*layer_trials.both(size, dtype, scheme, compute))])

    base = measured(BASE, None)
    own = base and (base if (scheme, compute) == (BASE, None) else measured(scheme, compute))
    if not base or not own:
        return None
    plain = base[:count]
    return plain, [one * ratio for one, ratio in zip(plain, own[count:], strict=True)]


def _measured(key: tuple[object, ...], count: int, measure: Callable[[], list[float]]) -> list[float] | None:
    """Return `count` numbers that are kept under a key, or what `measure` finds; None if it fails. What failed is not
    tried again while the program runs."""
    values = _kept(key, count)
    if values is None and verdicts.tunes() and key not in _failed:
        with _lock:  # two would slow each other down
            values = _kept(key, count) or _found(key, measure)
    return values


def _kept(key: tuple[object, ...], count: int) -> list[float] | None:
    values = verdicts.known(_CPU, key)
    return values if isinstance(values, list) and len(values) == count else None


def _found(key: tuple[object, ...], measure: Callable[[], list[float]]) -> list[float] | None:
    log.info("measuring what layers take on this machine: %s", key)
    try:
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            values = measure()
    except Exception as error:  # whatever it is: then nothing is said of this scheme
        log.debug("%s is not timed: %s", key, error)
        _failed.add(key)
        return None
    verdicts.keep(_CPU, key, values)
    return values
