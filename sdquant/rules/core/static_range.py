"""Static ranges of activations: from calibration statistics to a scale and zero point.

Statistics are named "<module path>.<operation>0_lhs.<what>", with Qwix's names of operations; what: `count` (int32, of
batches) and `sum_of_absmax`, or `sum_of_min` and `sum_of_max` (float32). The range is their mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import SettingsError
from ...models import KEY_PREFIXES
from ..packed_layout import act_method, layout
from ..qconfig import OPERATIONS, QuantizationRule
from .calibration import scale_and_zero_point
from .qtypes import qtype

if TYPE_CHECKING:
    from torch import Tensor

SUM = "sum_of_"
CALIBRATE = "Calibrate with `sdquant calibrate` on prompts that reach this layer, or remove act_static_scale"


@dataclass(frozen=True)
class StaticRange:
    """A scale (float32) and, if the range is asymmetric, a zero point of the same shape, without leading ones."""

    scale: Tensor
    zero_point: Tensor | None


def spellings(path: str) -> list[str]:
    """Return the paths that a module may have: files may call one "text_model.encoder..." that the model, in another
    version of its library, calls "encoder...", or the other way round."""
    return [path, *(path.removeprefix(word) for word in KEY_PREFIXES), *(word + path for word in KEY_PREFIXES)]


def require_shape(static: StaticRange, path: str, rule: QuantizationRule, shape: tuple[int, ...]) -> None:
    """Raise SettingsError if a range does not have the tiles that this rule has on a weight of this shape."""
    expected = layout(rule, shape, "float32")["act_scale"].shape
    if rule.act_batch_axes is None and tuple(static.scale.shape) != expected:
        raise SettingsError(
            f"Cannot use the static range of the input of {path!r}",
            f"its statistics have {static.scale.numel()} tiles, but the rule needs {expected[0]}",
            "Calibrate again with these rules",
        )


def operand(path: str, operation: str) -> str:
    """Return the prefix of the statistics of a module's input."""
    return f"{path}.{OPERATIONS[operation]}0_lhs" if path else f"{OPERATIONS[operation]}0_lhs"


def static_range(statistics: Mapping[str, Tensor], path: str, operation: str, rule: QuantizationRule) -> StaticRange:
    """Return the static range of the input of the module at `path`.

    Raises:
        SettingsError: calibration saw no data for it, or used another rule.
    """
    candidates = (operand(name, operation) for name in spellings(path))
    known = next((one for one in candidates if f"{one}.count" in statistics), operand(path, operation))
    return of_operand(statistics, known, rule, f"the input of {path!r}")


def of_operand(
    statistics: Mapping[str, Tensor], operand: str, rule: QuantizationRule, what: str | None = None
) -> StaticRange:
    """Return an operand's range by its name in the statistics. what: its name in errors. Raises as `static_range`."""
    assert rule.act_qtype is not None
    prefix, what = f"{operand}.", what or repr(operand)
    values = {name.removeprefix(prefix): value for name, value in statistics.items() if name.startswith(prefix)}
    count = values.pop("count", None)
    if count is None or count.numel() != 1 or not float(count) >= 1:
        raise SettingsError(
            f"Cannot find a static range for {what}",
            f"quant_stats is not initialized for {operand}: calibration saw no data for this layer",
            CALIBRATE,
        )
    mean = {name.removeprefix(SUM): value / count for name, value in values.items() if name.startswith(SUM)}
    expected = {"min", "max"} if act_method(rule).asymmetric else {"absmax"}
    if set(mean) != expected:
        raise SettingsError(
            f"Cannot use the static range of {what}",
            f"its statistics have {' and '.join(sorted(mean)) or 'nothing'}, but the rule's calibration method needs "
            f"{' and '.join(sorted(expected))}",
            "Calibrate again with these rules",
        )
    scale, zero_point = scale_and_zero_point(mean, qtype(rule.act_qtype))
    while scale.ndim > 1 and scale.shape[0] == 1:
        scale = scale[0]
        zero_point = None if zero_point is None else zero_point[0]
    return StaticRange(scale.contiguous(), None if zero_point is None else zero_point.contiguous())
