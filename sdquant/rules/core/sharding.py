"""Ranges of weights found in parts: by chunks, devices or processes, with the same bits as found at once.

    with sharded(4):
        load_model("some-model", rules=[...])

A weight is cut along an axis that has no tiles. The range of each part is found like that of a whole weight, and the
largest (or least) of them is the weight's. This holds for absmax and minmax. rms would sum in another order, so that it
is found on the whole weight; fixed ranges need no weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import SettingsError
from ...utils.distributed import ALONE
from .how_to_quantize import HowToQuantize, scale_shape
from .qarray import range_of

if TYPE_CHECKING:
    from ...utils.distributed import Processes

_IN_PARTS = ("absmax", "minmax")


@dataclass(frozen=True)
class Sharding:
    """Assignment of parts: part i goes to process i modulo their count, and there to device i modulo theirs."""

    count: int
    processes: Processes
    devices: tuple[str, ...] = ()


_HERE: ContextVar[Sharding | None] = ContextVar("sharding", default=None)


@contextmanager
def sharded(count: int, processes: Processes = ALONE, devices: Sequence[str] = ()) -> Iterator[None]:
    """Find the ranges of weights in `count` parts while the block runs, in this thread.

    With several processes all of them must quantize the same weights in the same order: each finds the ranges of its
    parts, and all get the whole.

    Args:
        devices: to find parts on; default where the weight is, and all cards if that is one of several.

    Raises:
        SettingsError: no number of parts.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise SettingsError(
            f"Cannot find ranges in {count!r} parts",
            "their number must be a whole number of at least 1",
            "Use 1 to find them in one piece",
        )
    token = _HERE.set(Sharding(count, processes, tuple(devices)) if count > 1 else None)
    try:
        yield
    finally:
        _HERE.reset(token)


def range_of_weight(weight: Tensor, how: HowToQuantize) -> dict[str, Tensor]:
    """Return `range_of` a weight, found in parts inside of `sharded`.

    Raises:
        DistributedError: another process has ended.
    """
    sharding = _HERE.get()
    axis = _axis(weight.shape, how)
    if sharding is None or axis is None or how.method.name not in _IN_PARTS or any(n < 0 for n in how.method.numbers):
        return range_of(weight, how)
    shape = scale_shape(weight.shape, how)
    parts = weight.tensor_split(min(sharding.count, weight.shape[axis]), dim=axis)
    devices = sharding.devices or _devices(weight, sharding.processes)
    whole: dict[str, Tensor] = {}
    for number, begin in enumerate(_begins(parts, axis)):
        if number % sharding.processes.count != sharding.processes.rank or not parts[number].numel():
            continue
        part = parts[number].to(devices[number % len(devices)])
        for name, limits in range_of(part, how).items():
            _merge(whole, name, limits.to(weight.device), shape, axis, begin)
    if sharding.processes.count > 1:
        whole = _of_all(sharding.processes, whole, weight, how, shape)
    return whole


def _axis(shape: Sequence[int], how: HowToQuantize) -> int | None:
    """Return the axis to split along: the first untiled one with more than one number; None if there is none."""
    return next((axis for axis, size in enumerate(shape) if size > 1 and axis not in how.tiled_axes), None)


def _begins(parts: Sequence[Tensor], axis: int) -> Iterator[int]:
    begin = 0
    for part in parts:
        yield begin
        begin += part.shape[axis]


def _merge(whole: dict[str, Tensor], name: str, limits: Tensor, shape: Sequence[int], axis: int, begin: int) -> None:
    """Merge a part's range into the whole one, which starts as zeros: every range contains 0."""
    into = whole.setdefault(name, limits.new_zeros(tuple(shape)))
    place = into.narrow(axis, begin if shape[axis] > 1 else 0, limits.shape[axis])
    place.copy_((torch.minimum if name == "min" else torch.maximum)(place, limits))


def _of_all(
    processes: Processes, mine: dict[str, Tensor], weight: Tensor, how: HowToQuantize, shape: Sequence[int]
) -> dict[str, Tensor]:
    """Merge the ranges of all processes in one collective: a minimum is the negated maximum of negated numbers."""
    names = ("min", "max") if how.method.name == "minmax" else ("absmax",)
    dtype = torch.float32 if weight.dtype == torch.float16 else weight.dtype
    none = torch.zeros(tuple(shape), dtype=dtype, device=weight.device)
    rows = [-mine.get(name, none) if name == "min" else mine.get(name, none) for name in names]
    merged = processes.largest(torch.stack(rows))
    return {name: -row if name == "min" else row for name, row in zip(names, merged, strict=True)}


def _devices(weight: Tensor, processes: Processes) -> tuple[str, ...]:
    """Return the devices to find ranges on: all GPUs for a single process, else the weight's own device."""
    if weight.is_cuda and processes.count == 1:
        return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    return (str(weight.device),)
