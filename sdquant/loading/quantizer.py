"""Quantize a loaded model: `sdquant.quantize(pipe, "nf4")`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..compat import hardware
from ..core import dtype_name
from ..errors import ConflictError, IncompatibleError, SettingsError
from ..models import peft_hooks
from ..planning import (
    AUTO,
    check_schemes,
    device_of,
    make_request,
    mix,
    plan_resolved,
    planner,
    resolve_loaded,
    rule_checks,
    statistics_arguments,
)
from ..rules import RulesSpec
from ..utils.arguments import answered
from ..utils.inference_mode import ordinary
from ..utils.progress import count_bar

if TYPE_CHECKING:
    from torch import nn

    from ..core import QuantSpec

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
    size: int | str | None = None,
    quality: float | None = None,
) -> Any:
    """Quantize a diffusers pipeline or component in place, one weight at a time; each float weight is freed at once.

    Args:
        model: pipeline or module.
        quant, rules, quant_stats, components, skip, runtime, allow_incompatible, compute, size, quality: as for
            `load_model`. "auto" needs size or quality.
        device: where weights are quantized (default: where they are).

    Returns:
        The same object.

    Raises:
        ConflictError: the model is already quantized. IncompatibleError: the matrix refuses, or nothing would change.
    """
    from ..models import weight_parts
    from . import finishing

    if quant is None and rules is None:
        raise SettingsError("Cannot quantize the model", "no scheme is named", 'Name one, such as "nf4", or rules=')
    if isinstance(quant, str) and quant.strip().lower() == AUTO and size is None and quality is None:
        raise SettingsError(
            "Cannot use quant='auto' with a loaded model",
            "auto chooses what fits before a model is loaded",
            "Use load_model(path, quant='auto'), name a scheme, or say which size= or quality= you want",
        )
    options = make_request(
        type(model).__name__,
        quant=quant, rules=rules, quant_stats=quant_stats, components=components, skip=skip, runtime=runtime,
        mode="auto" if size is not None or quality is not None else "post", compute=compute, device=device,
        allow_incompatible=allow_incompatible, size=size, quality=quality, progress=progress,
    )  # fmt: skip
    here = hardware.probe()
    target = device_of(options, here)
    check_schemes(options, options.specs, "none", target, here)
    parts = weight_parts(model)
    resolved = resolve_loaded(options.path, parts, options, target)
    planner.refuse_conflicts(resolved)
    origin = statistics_arguments.refuse_other_weights(
        options.quant_stats, {name: parts[name] for name in planner.floats_to_quantize(resolved)}
    )
    if options.mixed:
        resolved = mix.choose_mix(
            resolved, here, lambda _, name: nullcontext(lambda key: parts[name].get_parameter(key).data)
        )
    for name, module in parts.items():
        if planner.spec_for(name, resolved)[1] is not None:
            peft_hooks.refuse_adapted(name, module, "quantized")
            _refuse_quantized(name, module)
            _refuse_float8(name, module)
    plan = plan_resolved(resolved, here, marked=lambda name, _, spec: rule_checks.marked_in(parts[name], spec))
    chosen = {part.name: part for part in plan.components if part.spec is not None}
    names = {name: {weight.name for weight in part.weights} for name, part in chosen.items()}
    for name, weights in names.items():
        _refuse_empty(name, parts[name], weights)
    for line in (*plan.warnings, *origin):
        log.warning("%s", line)
    finishing.prepare_libraries(chosen.values(), target)
    total = sum(map(len, names.values()))
    with count_bar("Quantizing", total, "weight", progress) as bar:
        for name, part in chosen.items():
            assert part.spec is not None
            quantize_module(
                parts[name], part.spec, runtime=part.runtime, only=names[name], device=options.device, tick=bar.update
            )
            finishing.finish(parts[name], part, part.spec if isinstance(part.spec, RulesSpec) else None)
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
    from ..models import BiasCorrection, install_packed, quantize_weight, tied
    from ..utils.malloc_trim import Trimmer, trim

    trimmer, ties, biases = Trimmer(), tied(model), BiasCorrection()
    for name in sorted(only):
        weight = model.get_parameter(name).data
        home = weight.device
        weight = weight.to(device or home)
        packed = quantize_weight.encode(name, weight, spec)
        biases.add(name, name, weight, packed, spec)
        install_packed(model, ties.get(name, (name,)), packed.to(home), runtime, spec)
        trimmer.add(weight.numel() * weight.element_size())
        del weight, packed
        if tick is not None:
            tick(1)
    biases.apply(model)
    trim()


def _refuse_float8(name: str, model: nn.Module) -> None:
    """Raise IncompatibleError if diffusers' layerwise casting stores the model's weights in float8: they are already
    rounded, and no scheme quantizes float8."""
    from ..nn import kind_of

    for path, module in model.named_modules():
        weight = module._parameters.get("weight") if kind_of(module) is not None else None
        if weight is not None and weight.is_floating_point() and weight.itemsize == 1:
            raise IncompatibleError(
                f"Cannot quantize the {name}",
                f"layerwise casting stores its layer {path!r} in {dtype_name(weight.dtype)}",
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
