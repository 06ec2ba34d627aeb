"""The range of a layer's activations, found beforehand in calibration: from statistics to a scale and zero point.

Statistics are named "<module path>.<operation>0_lhs.<what>", with Qwix's names of operations; what: `count` (int32, of
batches) and `sum_of_absmax`, or `sum_of_min` and `sum_of_max` (float32). The range is their mean.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ..errors import SettingsError
from .calibration import scale_and_zero_point
from .qtypes import qtype
from .rule import OPERATIONS, QuantizationRule

if TYPE_CHECKING:
    from torch import Tensor

SUM = "sum_of_"
CALIBRATE = (
    "Collect them with `sdquant calibrate` over prompts that this layer sees data in, or leave out act_static_scale"
)


@dataclass(frozen=True)
class StaticRange:
    """A scale (float32) and, where the range is not symmetric, a zero point; of one shape, leading ones left out."""

    scale: Tensor
    zero_point: Tensor | None


def operand(path: str, operation: str) -> str:
    """The prefix of the statistics of a module's input."""
    return f"{path}.{OPERATIONS[operation]}0_lhs" if path else f"{OPERATIONS[operation]}0_lhs"


def static_range(statistics: Mapping[str, Tensor], path: str, operation: str, rule: QuantizationRule) -> StaticRange:
    """The range of the input of the module at `path`.

    Raises:
        SettingsError: nothing was seen of it.
    """
    assert rule.act_qtype is not None
    prefix = operand(path, operation) + "."
    found = {name.removeprefix(prefix): value for name, value in statistics.items() if name.startswith(prefix)}
    count = found.pop("count", None)
    if count is None or int(count) == 0:
        raise SettingsError(
            f"The static range of the input of {path!r} was asked for",
            f"quant_stats is not initialized for {prefix.removesuffix('.')}: calibration saw no data of this layer",
            CALIBRATE,
        )
    mean = {name.removeprefix(SUM): value / count for name, value in found.items() if name.startswith(SUM)}
    if set(mean) not in ({"absmax"}, {"min", "max"}):
        raise SettingsError(
            f"The static range of the input of {path!r} was asked for",
            f"its statistics are {', '.join(sorted(found)) or 'missing'}, not those of a range",
            CALIBRATE,
        )
    scale, zero_point = scale_and_zero_point(mean, qtype(rule.act_qtype))
    while scale.ndim > 1 and scale.shape[0] == 1:
        scale = scale[0]
        zero_point = None if zero_point is None else zero_point[0]
    return StaticRange(scale.contiguous(), None if zero_point is None else zero_point.contiguous())


def read_statistics(file: str) -> Mapping[str, Tensor]:
    """The statistics in a safetensors file; read once.

    Raises:
        SettingsError: there is no such file. BadFileError: it is damaged.
    """
    if not os.path.isfile(file):
        raise SettingsError(
            f"quant_stats={file!r} was given", "there is no such file", "Make it with `sdquant calibrate`"
        )
    status = os.stat(file)
    return _read(os.path.abspath(file), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4)
def _read(file: str, changed: int, size: int) -> Mapping[str, Tensor]:
    from pathlib import Path

    from ..formats.safetensors import SafetensorsFile, read_header

    infos, _ = read_header(Path(file))
    opened = SafetensorsFile(Path(file))
    try:
        return {name: opened.get(name).clone() for name in infos}
    finally:
        opened.close()
