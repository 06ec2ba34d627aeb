"""Checks, before any weight is read, that static ranges exist where rules require them.

Which modules multiply activations is only known when they run: for these, each rule must have at least one range, in
some component. The first run raises an error that names what is still missing.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import SettingsError
from .qconfig import Rules
from .quant_spec import RulesSpec, operation_of


def require_ranges(spec: RulesSpec, weights: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Raise SettingsError, with the layer's name, if a layer lacks a static range that its rule requires.

    Args:
        weights: that will be quantized, by name and shape.
    """
    require_products(spec)
    required = [(spec.of(*weight), weight[1]) for weight in weights]
    required = [(one, shape) for one, shape in required if one.rule.act_static_scale]
    if not required:
        return
    if spec.statistics is None:
        raise SettingsError(
            f"Cannot quantize activations with static ranges, such as the input of {required[0][0].path!r}",
            "quant_stats is not set",
            "Pass quant_stats=<file of `sdquant calibrate`>, or remove act_static_scale",
        )
    from .core.static_range import require_shape, static_range
    from .statistics_file import of_component, read_statistics

    known = of_component(read_statistics(spec.statistics), spec.component)
    for one, shape in required:
        require_shape(static_range(known, one.path, operation_of(shape), one.rule), one.path, one.rule, shape)


def require_products(spec: RulesSpec) -> None:
    """Raise SettingsError for a rule for products with static ranges if the statistics have none for it, or ranges of
    another kind."""
    rules = [rule for rule in spec.rules if rule.products and rule.act_static_scale]
    if not rules:
        return
    from .core.static_range import of_operand
    from .product_ranges import static_rule
    from .statistics_file import read_statistics

    known = {} if spec.statistics is None else read_statistics(spec.statistics)
    covered = set()
    for prefix in {name.rpartition(".")[0] for name in known}:
        path, _, name = prefix.rpartition(".")
        for one in (path, path.partition(".")[2]):  # with and without the component's name
            rule = static_rule(Rules(spec.rules), one, name)
            if rule is not None:
                of_operand(known, prefix, rule)
                covered.add(rule)
    for rule in rules:
        if rule not in covered:
            raise SettingsError(
                f"Cannot quantize products of activations in {rule.module_path!r} with static ranges "
                f"({', '.join(rule.op_names)})",
                "quant_stats is not set" if spec.statistics is None else "quant_stats has none of their ranges",
                "Pass quant_stats=<file of `sdquant calibrate`>, or remove act_static_scale",
            )
