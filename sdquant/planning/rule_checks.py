"""Check rules against a plan: conflicts, and what each rule matches. Imports torch only to inspect a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ..core import Unfit
from ..errors import ConflictError, MissingComponentError
from ..rules import (
    ACT_SHAPE,
    QuantizationRule,
    Rules,
    RulesSpec,
    infer_rules,
    is_for_products_alone,
    plain_tiles,
    qconfig,
    rule_of,
)
from .weight_selection import Extent

if TYPE_CHECKING:
    from torch import nn

    from ..core import QuantSpec
    from ..formats import Checkpoint
    from .plan import ComponentPlan

# Modules of a component whose activation products rules quantize, each with its rules by operation; None if unknown.
Marked = Mapping[str, Mapping[str, QuantizationRule]] | None
Weights = tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes


def refuse_computing(spec: QuantSpec | None, compute: str | None) -> None:
    """Raise ConflictError if both the rules and compute= set what products are computed in."""
    if compute in (None, "float") or not isinstance(spec, RulesSpec):
        return
    rule = next((row for row in spec.rules if row.act_qtype is not None), None)
    if rule is not None:
        raise ConflictError(
            f"Cannot combine compute={compute!r} with rules",
            f"one of them already sets what products are computed in ({qconfig.to_dict(rule)})",
            "Remove compute, or act_qtype from the rules",
        )


def refuse_other_rules(name: str, src: Checkpoint, spec: RulesSpec) -> None:
    """Raise ConflictError if a weight on disk is quantized by a rule other than the requested one."""
    for key, weight in src.prequantized.items():
        recorded = dict(weight.details.get("rule") or {k: v for k, v in weight.details.items() if k != ACT_SHAPE})
        shape = src.specs[key].shape if key in src.specs else src.tensors[weight.keys["qvalue"]].shape
        try:
            requested = infer_rules.does(plain_tiles(spec.of(key, shape).rule, shape))
        except Unfit:
            requested = None
        if requested != infer_rules.does(plain_tiles(rule_of(recorded), shape)):
            raise ConflictError(
                f"Cannot apply the rules to {src.path}",
                f"its weights ({name}) are already quantized by rules, {key!r} by a different one ({recorded})",
                "Remove rules to load it as it is, or use the unquantized model",
            )


def marked_in_file(name: str, src: Checkpoint, spec: RulesSpec) -> Marked:
    """Return the modules in a source's model whose activation products match a rule; None if its class is unknown.

    Raises:
        SettingsError: a rule that cannot apply to products.
    """
    from ..models import meta_model

    try:
        return marked_in(meta_model(src), spec)
    except MissingComponentError:  # loading reports it with a better message
        return None


def marked_in(model: nn.Module, spec: RulesSpec) -> Marked:
    """Return the modules of a model whose activation products match a rule. It may be on the meta device."""
    from ..rules import interception

    return interception.followed(model, Rules(spec.rules)) if spec.products else {}


def weights_in(src: Checkpoint) -> Weights:
    """Return names and shapes of the tensors of a source that rules can apply to."""
    return tuple((name, info.shape) for name, info in src.tensors.items() if len(info.shape) > 1)


def extents_of(parts: Iterable[ComponentPlan], sources: Mapping[str, Checkpoint]) -> dict[str, Extent]:
    """Return, for each component with a requested scheme, how much of it is to be quantized now."""
    return {
        component.name: Extent(
            spec=component.spec,
            weights=len(component.weights),
            products=1 if component.products is None else component.products,
            kept=component.kept,
            layers=weights_in(sources[component.name]) if isinstance(component.spec, RulesSpec) else (),
        )
        for component in parts
        if component.spec is not None
    }


def unused(spec: RulesSpec, weights: Iterable[tuple[str, tuple[int, ...]]], marked: Iterable[Marked]) -> list[str]:
    """Return a sentence for each rule that matches no weight, or, if it is for products only, no module."""
    modules = [*marked]
    rows = [*spec.unused(weights)]
    if None not in modules:
        used = {rule for one in modules for by_operation in (one or {}).values() for rule in by_operation.values()}
        rows += [row for row in spec.rules if row.products and is_for_products_alone(row) and row not in used]
    return [f"the rule {qconfig.to_dict(row)} matches no layer: it has no effect" for row in rows]
