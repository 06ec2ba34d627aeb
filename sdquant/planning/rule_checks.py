"""What rules mean for a plan: what they contradict, and what they reach. No torch, but where a model is looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ..core.backend import Unfit
from ..errors import ConflictError, MissingComponentError
from ..rules.infer_rules import does
from ..rules.packed_layout import ACT_SHAPE, plain_tiles
from ..rules.qconfig import QuantizationRule, Rules, rule_of, to_dict
from ..rules.quant_spec import RulesSpec, is_for_products_alone
from .weight_selection import Extent

if TYPE_CHECKING:
    from torch import nn

    from ..core.backend import QuantSpec
    from ..formats.checkpoint import Source
    from .plan import ComponentPlan

# The modules of a component in which rules quantize products of activations, each with its rules by operation; None
# where that is not known.
Marked = Mapping[str, Mapping[str, QuantizationRule]] | None
Weights = tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes


def refuse_computing(spec: QuantSpec | None, compute: str | None) -> None:
    """Raise ConflictError if rules say how products are computed, and compute= says it too."""
    if compute in (None, "float") or not isinstance(spec, RulesSpec):
        return
    said = next((row for row in spec.rules if row.act_qtype is not None), None)
    if said is not None:
        raise ConflictError(
            f"compute={compute!r} was asked for with rules",
            f"one of them says itself what products are computed in: {to_dict(said)}",
            "Leave compute out, or act_qtype",
        )


def refuse_other_rules(name: str, src: Source, spec: RulesSpec) -> None:
    """Raise ConflictError if a weight on disk is quantized by another rule than the one that was asked for."""
    for key, found in src.found.items():
        said = dict(found.details.get("rule") or {k: v for k, v in found.details.items() if k != ACT_SHAPE})
        shape = src.specs[key].shape if key in src.specs else src.tensors[found.keys["qvalue"]].shape
        try:
            asked = does(plain_tiles(spec.of(key, shape).rule, shape))
        except Unfit:
            asked = None
        if asked != does(plain_tiles(rule_of(said), shape)):
            raise ConflictError(
                f"Rules were given for {src.path}",
                f"its weights ({name}) are quantized by rules already, {key!r} by another one: {said}",
                "Leave rules out to load it as it is, or start from the unquantized model",
            )


def marked_in_file(src: Source, spec: RulesSpec) -> Marked:
    """The modules whose products of activations the rules name, in the model that a source is of; None where its class
    is not known.

    Raises:
        SettingsError: a rule that products cannot follow.
    """
    from ..models.classes import meta_model

    try:
        return marked_in(meta_model(src), spec)
    except MissingComponentError:  # which loading says, in better words
        return None


def marked_in(model: nn.Module, spec: RulesSpec) -> Marked:
    """The same of a model, on the meta device or not."""
    from ..rules.interception import followed

    return followed(model, Rules(spec.rules)) if spec.products else {}


def weights_in(src: Source) -> Weights:
    """The tensors of a source that rules may be for."""
    return tuple((name, info.shape) for name, info in src.tensors.items() if len(info.shape) > 1)


def extents_of(parts: Iterable[ComponentPlan], sources: Mapping[str, Source]) -> dict[str, Extent]:
    """How much of each component is to be quantized now, of those for which that was asked."""
    return {
        part.name: Extent(
            spec=part.spec,
            weights=len(part.weights),
            products=1 if part.products is None else part.products,
            kept=part.kept,
            layers=weights_in(sources[part.name]) if isinstance(part.spec, RulesSpec) else (),
        )
        for part in parts
        if part.spec is not None
    }


def unused(spec: RulesSpec, weights: Iterable[tuple[str, tuple[int, ...]]], marked: Iterable[Marked]) -> list[str]:
    """A sentence for each rule that decides for no weight, or, if it is for products alone, for no module."""
    found = [*marked]
    rows = [*spec.unused(weights)]
    if None not in found:
        used = {rule for one in found for chosen in (one or {}).values() for rule in chosen.values()}
        rows += [row for row in spec.rules if row.products and is_for_products_alone(row) and row not in used]
    return [f"the rule {to_dict(row)} matches no layer: it has no effect" for row in rows]
