"""Whether every layer that is to have a static range has one, asked before any weight is read."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import SettingsError
from .spec import RulesSpec, operation_of


def require_ranges(spec: RulesSpec, weights: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Raise SettingsError, with the layer's name, if its range is wanted and was not found.

    Args:
        weights: that will be quantized, by name and shape.
    """
    wanted = [(spec.of(*weight), weight[1]) for weight in weights]
    wanted = [(one, shape) for one, shape in wanted if one.rule.act_static_scale]
    if not wanted:
        return
    if spec.statistics is None:
        raise SettingsError(
            f"Static ranges of activations were asked for, the first of {wanted[0][0].path!r}",
            "no ranges were given",
            "Give quant_stats=<file of `sdquant calibrate`>, or leave out act_static_scale",
        )
    from .static import require_shape, static_range
    from .statistics_file import of_component, read_statistics

    known = of_component(read_statistics(spec.statistics), spec.component)
    for one, shape in wanted:
        require_shape(static_range(known, one.path, operation_of(shape), one.rule), one.path, one.rule, shape)
