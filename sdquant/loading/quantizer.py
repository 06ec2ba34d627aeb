"""Quantize a loaded model: `sdquant.quantize(pipe, "nf4")`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import compat
from ..compat import hardware
from ..compat.default_runtime import default_runtime
from ..core.choices import LONE
from ..errors import ConflictError, IncompatibleError, SettingsError
from ..models import peft_hooks
from ..nn import openvino
from ..planning import planner
from ..planning.request import AUTO, request
from ..planning.rule_checks import marked_in
from ..planning.weight_selection import Extent, require_something
from ..rules.quant_spec import RulesSpec
from ..rules.range_checks import require_ranges
from ..utils.arguments import answered
from ..utils.inference_mode import ordinary

if TYPE_CHECKING:
    from torch import nn

    from ..core.scheme import QuantSpec

log = logging.getLogger(__name__)


@answered
@ordinary
def quantize(
    model: Any,
    quant: str | Mapping[str, str] | None = None,
    *,
    rules: Any = None,
    quant_stats: str | Path | None = None,
    components: tuple[str, ...] | list[str] | str | None = None,
    skip: tuple[str, ...] | list[str] | str = (),
    runtime: str | None = None,
    device: str | None = None,
    allow_incompatible: bool = False,
    progress: bool = True,
    compute: str | None = None,
) -> Any:
    """Quantize a diffusers pipeline or component in place, one weight at a time; each float weight is freed at once.

    Args:
        model: pipeline or module.
        quant, rules, quant_stats, components, skip, runtime, allow_incompatible, compute: as for `load_model`.
        device: where weights are quantized (default: where they are).

    Returns:
        The same object.

    Raises:
        ConflictError: the model is already quantized. IncompatibleError: the matrix refuses, or nothing would change.
    """
    from ..models.pipelines import is_pipeline, weight_parts
    from ..nn.layer_factory import set_compute
    from ..rules.model_rules import attach_rules
    from . import finishing

    if quant is None and rules is None:
        raise SettingsError("Cannot quantize the model", "no scheme is named", 'Name one, such as "nf4", or rules=')
    if isinstance(quant, str) and quant.strip().lower() == AUTO:
        raise SettingsError(
            "Cannot use quant='auto' with a loaded model",
            "auto chooses what fits before a model is loaded",
            "Use load_model(path, quant='auto'), or name a scheme",
        )
    options = request(
        "the loaded model",
        quant=quant, rules=rules, quant_stats=quant_stats, components=components, skip=skip, runtime=runtime,
        mode="post", compute=compute,
    )  # fmt: skip
    here = hardware.probe()
    target = device or hardware.default_device(here)
    for spec in options.specs().values():
        if spec is not None:
            planner.refuse_computing(spec, options.compute)
            compat.check(
                str(spec), "none", mode="post", runtime=options.plain_runtime, compute=options.compute,
                device=target, machine=here, allow_incompatible=allow_incompatible,
            )  # fmt: skip
    parts = weight_parts(model) if is_pipeline(model) else {LONE: model}
    specs = {
        name: spec
        for name in parts
        for requested, spec in [planner.asked_for(name, options)]
        if requested and spec is not None
    }
    for name in specs:
        peft_hooks.refuse_adapted(name, parts[name], "quantized")
        _refuse_quantized(name, parts[name])
        _refuse_float8(name, parts[name])
    runtimes = {name: options.plain_runtime or default_runtime(spec, target) for name, spec in specs.items()}
    selected = {
        name: weights_to_quantize(parts[name], spec, options.plain_runtime or spec.scheme.runtimes[0], options.skip)
        for name, spec in specs.items()
    }
    plans = {name: weights for name, (weights, _) in selected.items()}
    extents = {name: extent_of(parts[name], spec, *selected[name]) for name, spec in specs.items()}
    for name, spec in specs.items():
        if isinstance(spec, RulesSpec):
            require_ranges(spec, ((one, tuple(parts[name].get_parameter(one).shape)) for one in sorted(plans[name])))
    for name, weights in plans.items():
        _refuse_empty(name, parts[name], weights)
    named = {*(options.components or ()), *(quant if isinstance(quant, Mapping) else ())} - {"*"}
    for line in require_something(type(model).__name__, extents, named):
        log.warning("%s", line)
    from tqdm import tqdm

    total = sum(len(names) for names in plans.values())
    with tqdm(total=total, desc="Quantizing", disable=not progress, delay=2, leave=False, unit="weight") as bar:
        for name, spec in specs.items():
            quantize_module(
                parts[name],
                spec,
                runtime=runtimes[name],
                only=plans[name],
                device=device,
                tick=bar.update,
            )
            if isinstance(spec, RulesSpec):
                attach_rules(parts[name], spec)
            if options.compute is not None:
                set_compute(parts[name], options.compute)
            if options.runtime == openvino.NAME and openvino.suits(name, type(parts[name]).__name__):
                openvino.attach(parts[name])
            finishing.run_steps(parts[name])
    peft_hooks.prepare_pipeline(model)
    return model


def quantize_module(
    model: nn.Module,
    spec: QuantSpec,
    *,
    runtime: str,
    only: set[str],
    device: str | None = None,
    tick: Any = None,
) -> None:
    """Quantize the weights named in `only`, each on `device` (default: where it is), then return freed memory."""
    from ..models.components import tied
    from ..models.quantize_weight import encode
    from ..models.weight_loader import install_packed
    from ..utils.malloc_trim import Trimmer, trim

    trimmer, ties = Trimmer(), tied(model)
    for name in sorted(only):
        weight = model.get_parameter(name).data
        home = weight.device
        packed = encode(name, weight.to(device or home), spec).to(home)
        install_packed(model, ties.get(name, (name,)), packed, runtime, spec)
        trimmer.add(weight.numel() * weight.element_size())
        del weight, packed
        if tick is not None:
            tick(1)
    trim()


def extent_of(model: nn.Module, spec: QuantSpec, weights: Collection[str], skipped: Mapping[str, str]) -> Extent:
    """Return how much of a model would be quantized; `weights` and `skipped` come from `weights_to_quantize`.

    Raises:
        SettingsError: a rule that products of activations cannot follow.
    """
    if not isinstance(spec, RulesSpec):
        return Extent(spec=spec, weights=len(weights), kept=skipped)
    layers = tuple((name, tuple(row.shape)) for name, row in model.named_parameters() if row.dim() > 1)
    products = marked_in(model, spec)
    return Extent(spec=spec, weights=len(weights), products=len(products or ()), kept=skipped, layers=layers)


def weights_to_quantize(
    model: nn.Module, spec: QuantSpec, runtime: str, skip: tuple[str, ...]
) -> tuple[set[str], dict[str, str]]:
    """Return the names of the weights that `spec` quantizes, and the others with the reason why not. Only shapes and
    dtypes are read."""
    from ..models.components import tied
    from ..models.weight_loader import kind_to_quantize

    ties = tied(model)
    kinds = ("linear", "conv", "embedding") if spec.embeddings else ("linear", "conv")
    shapes = {
        names[0]: (tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
        for names, parameter in ((ties[name], row) for name, row in model.named_parameters())
        if names[0].endswith(".weight") and kind_to_quantize(model, names) in kinds
    }
    weights, skipped = planner.select(shapes, spec, runtime, skip, type(model).__name__)
    return {weight.name for weight in weights}, skipped


def _refuse_float8(name: str, model: nn.Module) -> None:
    """Raise IncompatibleError if diffusers' layerwise casting stores the model's weights in float8: they are already
    rounded, and no scheme quantizes float8."""
    from ..nn import kind_of

    for path, module in model.named_modules():
        weight = module._parameters.get("weight") if kind_of(module) is not None else None
        if weight is not None and weight.is_floating_point() and weight.itemsize == 1:
            raise IncompatibleError(
                f"Cannot quantize the {name}",
                f"layerwise casting stores its layer {path!r} in {str(weight.dtype).removeprefix('torch.')}",
                "Load the model again and quantize it without enable_layerwise_casting()",
            )


def _refuse_empty(name: str, model: nn.Module, selected: set[str]) -> None:
    """Raise IncompatibleError if a weight that would be quantized has no values."""
    empty = [weight for weight in sorted(selected) if model.get_parameter(weight).device.type == "meta"]
    if empty:
        raise IncompatibleError(
            f"Cannot quantize the {name}",
            f"{len(empty)} of its weights (such as {empty[0]!r}) are on the meta device, where they have no values",
            "Load its weights first, or load it quantized: load_model(path, quant=...)",
        )


def _refuse_quantized(name: str, model: nn.Module) -> None:
    from ..nn import packed_of

    for path, module in model.named_modules():
        packed = packed_of(module)
        if packed is not None:
            raise ConflictError(
                f"Cannot quantize the {name}",
                f"its layer {path!r} is already quantized to {packed.spec.scheme}",
                "Start from the unquantized model",
            )
