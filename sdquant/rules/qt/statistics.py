"""Ranges of activations over batches (quant_stats): Qwix at aa623acb, averaging.py and providers/qt.py.

A batch's range is averaged over rule.act_batch_axes, and these are summed: the static range is the mean of the batches'
ranges. For their names see `static_range`.

Sums are stored as whole numbers of 2**-149, the smallest step of a float32, so that neither the order of batches nor
their distribution over processes changes a bit: `quant_stats(model, exact=True)` of each process, then
`merge_quant_stats`. A layer's range in a batch depends on the layers before it, and those use the mean of the batches
so far, as in Qwix: for the same result from any number of processes, collect with own_ranges=True.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...core import RANGE_OPERAND
from ...errors import SettingsError
from ..core.static_range import SUM
from ..product_ranges import MARK
from ..statistics_file import SAMPLE

if TYPE_CHECKING:
    from ..qconfig import QuantizationRule

EXACT = "exact_of_"  # beside "sum_of_": the whole number, as little-endian bytes
STEP = 149  # a float32 is a whole number of 2**-149
BYTES = 40  # 2**31 batches of the largest float32 need 308 bits and a sign

Range = dict[str, Tensor]


@dataclass
class QuantStat:
    """The ranges of one operand over batches.

    Attributes:
        name: "<module path>.dot_general0_lhs". batch_axes: averaged over within a batch; None: all of them but the
            summed one (`axis`), or that one too if `whole`.
        count: of batches. shape: of the sums, as of the scales of the first batch. sums: by name ("absmax"), in units
            of 2**-149.
        collecting: whether batches are added. own_ranges: whether a batch that is added is quantized with its own
            range; else with the mean, itself included.
    """

    name: str
    batch_axes: tuple[int, ...] | None
    whole: bool = False
    count: int = 0
    shape: tuple[int, ...] = ()
    sums: dict[str, list[int]] = field(default_factory=dict)
    collecting: bool = False
    own_ranges: bool = False
    axis: int = -1

    def range_for(self, batch_range: Range) -> Range:
        """Return the range to quantize a batch with. While collecting, add the batch's own range first.

        Raises:
            SettingsError: another shape than before, numbers that are not finite, or axes that do not exist.
        """
        axes = self._axes(next(iter(batch_range.values())).ndim)
        own = {name: _mean(value, axes) for name, value in batch_range.items()}
        # Gradient checkpointing runs a layer again within the backward pass: that batch is counted already.
        if self.collecting and torch._C._current_graph_task_id() == -1:
            self.add(own)
        if self.count == 0 or (self.collecting and self.own_ranges):
            return own
        return {name: self._fitted(self.total(name) / self.count, like) for name, like in own.items()}

    def add(self, own: Range) -> None:
        """Add the range of a batch."""
        values = {name: value.detach().float().cpu() for name, value in own.items()}
        shape = tuple(next(iter(values.values())).shape)
        if self.count and _bare(shape) != _bare(self.shape):
            what = f"Cannot add a range of shape {list(shape)} for {self.name} to earlier ones of {list(self.shape)}"
            if self.batch_axes is None:
                raise SettingsError(
                    what,
                    "its tiles lie along an axis whose size has changed",
                    "Remove tile_size from its rule, or give it as a fraction (0.25) to keep the number of tiles",
                )
            raise SettingsError(
                what,
                f"act_batch_axes={self.batch_axes} keeps a range for each index of the other axes, whose sizes have "
                "changed",
                "Remove act_batch_axes, or list all axes whose size can change",
            )
        for value in values.values():
            if not bool(torch.isfinite(value).all()):
                raise SettingsError(
                    f"Cannot calibrate {self.name}",
                    "its input has values that are not finite",
                    "Look for the earlier layer that produces them; bfloat16 instead of float16 often helps",
                )
        if not self.count:
            self.shape, self.sums = shape, {name: [0] * value.numel() for name, value in values.items()}
        for name, value in values.items():
            steps = (int(math.ldexp(one, STEP)) for one in value.flatten().tolist())
            self.sums[name] = [total + one for total, one in zip(self.sums[name], steps, strict=True)]
        self.count += 1

    def total(self, name: str) -> Tensor:
        """Return a sum, rounded to float32 once."""
        floats = [total / (1 << STEP) for total in self.sums[name]]
        return torch.tensor(floats, dtype=torch.float64, device="cpu").float().reshape(self.shape)

    def _axes(self, ndim: int) -> list[int]:
        if self.batch_axes is None:
            return [axis for axis in range(ndim) if self.whole or axis != self.axis % ndim]
        if any(not -ndim <= axis < ndim for axis in self.batch_axes):
            raise SettingsError(
                f"Cannot average the range of {self.name} over act_batch_axes={self.batch_axes}",
                f"its input has {ndim} axes",
                "Remove act_batch_axes, or list only axes that exist",
            )
        return sorted({axis % ndim for axis in self.batch_axes})

    def _fitted(self, mean: Tensor, like: Tensor) -> Tensor:
        """Return a mean with the number of axes, dtype and device of this batch's range."""
        bare = _bare(tuple(mean.shape))
        if len(bare) > like.ndim:
            raise SettingsError(
                f"Cannot use the ranges of {self.name} for an input of {like.ndim} axes",
                f"they have shape {list(mean.shape)}",
                "Remove act_batch_axes, or give this layer a rule of its own",
            )
        return mean.reshape([1] * (like.ndim - len(bare)) + list(bare)).to(like)

    def to_dict(self, *, exact: bool) -> dict[str, Tensor]:
        """Return named tensors, on the CPU."""
        tensors = {f"{self.name}.count": torch.tensor(self.count, dtype=torch.int32, device="cpu")}
        for name, totals in self.sums.items():
            tensors[f"{self.name}.{SUM}{name}"] = self.total(name)
            if exact:
                tensors[f"{self.name}.{EXACT}{name}"] = _bytes(totals).reshape(*self.shape, BYTES)
        return tensors

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Load what `to_dict` returned, without the prefix."""
        self.count = int(values["count"])
        self.sums = {}
        for key, value in values.items():
            if key.startswith(SUM):
                name, self.shape = key.removeprefix(SUM), tuple(value.shape)
                known = values.get(EXACT + name)
                self.sums[name] = (
                    [int(math.ldexp(one, STEP)) for one in value.float().flatten().tolist()]
                    if known is None
                    else _integers(known)
                )


@dataclass
class SiteStats:
    """The ranges of the products of activations in one module, known once it has run.

    Attributes:
        path: of the module. stats: by the operand's name in it, "einsum0_lhs". collecting, own_ranges: of each of them.
    """

    path: str
    stats: dict[str, QuantStat] = field(default_factory=dict)
    collecting: bool = False
    own_ranges: bool = False

    def of(self, name: str) -> QuantStat:
        """Return the statistics of an operand; create them if there are none."""
        if name not in self.stats:
            self.stats[name] = QuantStat(f"{self.path}.{name}" if self.path else name, None)
        return self.stats[name]

    def range_for(self, name: str, batch_range: Range, axis: int, rule: QuantizationRule) -> Range:
        """See `QuantStat.range_for`. axis: that is summed."""
        stat = self.of(name)
        stat.batch_axes, stat.axis = rule.act_batch_axes, axis
        stat.collecting, stat.own_ranges = self.collecting, self.own_ranges
        return stat.range_for(batch_range)


@contextmanager
def collecting(model: nn.Module, *, own_ranges: bool = False) -> Iterator[None]:
    """Context manager: add all inputs of `model` to the statistics of its layers with static ranges.

    Args:
        own_ranges: quantize a batch with its own range, so that no batch changes the ranges of another.

    Raises:
        SettingsError: nothing in the model has a rule with act_static_scale.
    """
    stats: list[QuantStat | SiteStats] = [*_layers(model).values(), *_sites(model).values()]
    if not stats:
        raise SettingsError(
            f"Cannot collect ranges for a {type(model).__name__}",
            "nothing in it has a rule with act_static_scale",
            "Set act_static_scale in a rule, and call `quantize_model` with a QtProvider first",
        )
    before = [(stat, stat.collecting, stat.own_ranges) for stat in stats]
    for stat in stats:
        stat.collecting, stat.own_ranges = True, own_ranges
    try:
        yield
    finally:
        for stat, *state in before:
            stat.collecting, stat.own_ranges = state


def quant_stats(model: nn.Module, *, exact: bool = False) -> dict[str, Tensor]:
    """Return the statistics of a model's layers: flat names to tensors, as in a safetensors file.

    Args:
        exact: include sums as whole numbers, which `merge_quant_stats` adds without rounding.
    """
    tensors: dict[str, Tensor] = {}
    for stat in _stats(model).values():
        tensors |= stat.to_dict(exact=exact)
    return tensors


def load_quant_stats(model: nn.Module, statistics: Mapping[str, Tensor]) -> None:
    """Load into a model's layers the statistics that `quant_stats` returned. Layers without any keep their own.

    Raises:
        SettingsError: statistics of an operand that the model does not have.
    """
    stats, sites = _stats(model), _sites(model)
    for name, values in _by_operand(statistics).items():
        path, _, short = name.rpartition(".")
        if name not in stats and path in sites and RANGE_OPERAND.fullmatch(short):
            stats[name] = sites[path].of(short)
        if name not in stats:
            raise SettingsError(
                f"Cannot load statistics of {name!r}",
                f"this {type(model).__name__} has no such layer with a static range",
                "Use statistics of a model with the same layers and rules",
            )
        stats[name].load(values)


def merge_quant_stats(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Merge the statistics of several processes, which saw different batches.

    The result is bit for bit that of one process that saw all batches, if the parts are exact: those of
    `quant_stats(model, exact=True)`.

    Raises:
        SettingsError: parts whose ranges have different shapes.
    """
    merged: dict[str, QuantStat] = {}
    exact = True
    for part in parts:
        exact = exact and any(f".{EXACT}" in name for name in part)
        for name, values in _by_operand(part).items():
            one = QuantStat(name, None)
            one.load(values)
            whole = merged.setdefault(name, one)
            if whole is one or not one.count:
                continue
            if not whole.count:
                merged[name] = one
                continue
            if set(whole.sums) != set(one.sums) or _bare(whole.shape) != _bare(one.shape):
                raise SettingsError(
                    f"Cannot add statistics of {name!r} from several processes",
                    f"one has ranges of shape {list(whole.shape)}, another of shape {list(one.shape)}",
                    "Collect them with the same rules, and list all axes whose size can change in act_batch_axes",
                )
            whole.count += one.count
            for key, totals in one.sums.items():
                whole.sums[key] = [a + b for a, b in zip(whole.sums[key], totals, strict=True)]
    tensors: dict[str, Tensor] = {}
    for name in sorted(merged):
        tensors |= merged[name].to_dict(exact=exact)
    return tensors


def has_statistics(model: nn.Module) -> bool:
    """Return whether ranges can be collected for anything in the model."""
    return bool(_layers(model) or _sites(model))


def _stats(model: nn.Module) -> dict[str, QuantStat]:
    of_sites = (stat for site in _sites(model).values() for stat in site.stats.values())
    return _layers(model) | {stat.name: stat for stat in of_sites}


def _layers(model: nn.Module) -> dict[str, QuantStat]:
    candidates = (getattr(module, "statistics", None) for module in model.modules())
    return {stat.name: stat for stat in candidates if isinstance(stat, QuantStat)}


def _sites(model: nn.Module) -> dict[str, SiteStats]:
    candidates = (getattr(module.__dict__.get(MARK), "statistics", None) for module in model.modules())
    return {site.path: site for site in candidates if isinstance(site, SiteStats)}


def _by_operand(statistics: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    operands: dict[str, dict[str, Tensor]] = {}
    for name, value in statistics.items():
        operand, _, what = name.rpartition(".")
        if not name.endswith(SAMPLE):
            operands.setdefault(operand, {})[what] = value
    return operands


def _mean(value: Tensor, axes: Sequence[int]) -> Tensor:
    if not axes:
        return value
    wide = value if value.device.type == "mps" else value.double()  # no order of additions shows in float32
    return wide.mean(list(axes), keepdim=True).to(value.dtype)


def _bare(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without its leading ones, which only reflect the number of the input's axes."""
    first = next((axis for axis, size in enumerate(shape) if size > 1), len(shape))
    return tuple(shape[first:])


def _bytes(totals: Sequence[int]) -> Tensor:
    return torch.tensor(
        [list(total.to_bytes(BYTES, "little", signed=True)) for total in totals], dtype=torch.uint8, device="cpu"
    )


def _integers(packed: Tensor) -> list[int]:
    rows = packed.reshape(-1, BYTES).tolist()
    return [int.from_bytes(bytes(row), "little", signed=True) for row in rows]
