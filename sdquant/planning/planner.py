"""Plan how each weight is loaded, and its size in bytes. Pure: no torch, no files, no machine."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING

from ..compat import default_runtime, library_kernels
from ..core import FLOATS, LONE, Unfit, choices, name_patterns, registry
from ..errors import ConflictError, IncompatibleError, SettingsError
from ..formats import type_histogram
from ..models import float32_of_class, same_scheme
from ..nn import openvino
from ..rules import MixSpec, RulesSpec
from ..utils.suggestions import did_you_mean
from .component_types import is_quantized_by_default
from .plan import ComponentPlan, Plan
from .rule_checks import Marked, extents_of, refuse_other_rules, unused, weights_in
from .weight_selection import SKIPPED, WeightPlan, nbytes, require_something, select

if TYPE_CHECKING:
    from ..compat import Machine
    from ..core import QuantSpec
    from ..formats import Checkpoint
    from .request import Request
    from .resolve import Resolved

__all__ = [
    "ComponentPlan", "Plan", "WeightPlan", "build_plan", "refuse_conflicts",
    "select", "spec_for",
]  # fmt: skip


def refuse_conflicts(resolved: Resolved, again: Container[str] = ()) -> None:
    """Raise for what contradicts the files, before they are compared with their models.

    Args:
        again: components that are to be quantized again; see `to_quantize_again`.

    Raises:
        ConflictError: the request has another scheme for a pre-quantized component.
        IncompatibleError: the request has a scheme for float weights that exists only in files.
        SettingsError: the request names a component that does not exist.
    """
    sources = resolved.detected.sources
    unknown = [name for name in resolved.named if name not in sources]
    if unknown:
        raise SettingsError(
            f"Unknown component {unknown[0]!r}",
            f"{resolved.detected.path} has {', '.join(sources)}",
            did_you_mean(unknown[0], sources, "Name one of them"),
        )
    for name, src in sources.items():
        is_set, spec = spec_for(name, resolved)
        if src.prequantized and name not in again:
            _refuse_conflict(name, src, is_set, spec)
        elif not _is_float_gguf(src, spec):
            _refuse_file_scheme(src, spec, resolved.files.path)


def to_quantize_again(resolved: Resolved) -> frozenset[str]:
    """Return the components that are quantized on disk, and requested in another scheme, or with options by which their
    weights are other ones."""
    specs = {name: spec_for(name, resolved)[1] for name in resolved.detected.sources}
    return frozenset(
        name
        for name, src in resolved.detected.sources.items()
        if (spec := specs[name]) is not None
        and src.prequantized
        and (not same_scheme(spec.scheme.name, scheme_of(src)) or has_options(src, spec) is False)
    )


def has_options(src: Checkpoint, spec: QuantSpec) -> bool | None:
    """Return whether the weights of a component, which are in a spec's scheme, have the options that it sets, by the
    sizes of their parts. None: the files do not show it."""
    if not spec.options or isinstance(spec, RulesSpec):
        return True
    rows = [(src.prequantized[name], row) for name, row in src.specs.items() if row.scheme == spec.scheme]
    for found, row in rows:
        parts = {part: src.tensors[key].nbytes for part, key in found.keys.items()}
        try:
            layout = row.scheme.codec.layout(spec, row.shape, row.dtype)
        except Unfit:
            continue
        if any(parts.get(name) != part.nbytes for name, part in layout.items()):
            return False
    return True if rows else None


def scheme_of(src: Checkpoint) -> str:
    """Return the scheme that a component is quantized to on disk, the one with the most bytes."""
    if src.recorded_quant is not None:
        return src.recorded_quant
    sizes = {scheme: 0 for scheme in sorted({weight.scheme for weight in src.prequantized.values()})}
    for name, weight in src.prequantized.items():
        sizes[weight.scheme] += src.prequantized_bytes(name)
    return max(sizes, key=sizes.__getitem__)


def build_plan(
    resolved: Resolved, machine: Machine, *, marked: Callable[[str, Checkpoint, RulesSpec], Marked] | None = None
) -> Plan:
    """Return the plan for a request whose conflicts with its files have been refused.

    Args:
        machine: the one that the plan is for. Weights that are quantized on disk run in plain layers if their package
            is missing there.
        marked: finds the modules of a model that multiply activations. None: rules for such products are assumed to
            match some.

    Raises:
        IncompatibleError: nothing would be quantized. SettingsError: the same for a component that was named.
    """
    request, detected = resolved.request, resolved.detected
    sources = detected.sources
    specs = {name: spec_for(name, resolved)[1] for name in sources}
    products = {
        name: marked(name, sources[name], spec)
        for name, spec in specs.items()
        if marked is not None and isinstance(spec, RulesSpec) and spec.products and not sources[name].prequantized
    }
    components = tuple(
        _found(name, src, resolved, machine)
        if src.prequantized
        else _unquantized(name, src, specs[name], resolved, machine, products.get(name))
        for name, src in sources.items()
    )
    warnings = [
        *detected.warnings,
        *_without_effect(resolved, components, sources, machine),
        *_unused_rules(request, components, sources, products),
        *_require_something(resolved, components, sources),
    ]
    return Plan(
        path=resolved.files.path, base=resolved.files.base, container=detected.container, family=detected.family,
        offload_mode=resolved.offload_mode, device=resolved.device, dtype=resolved.dtype, budget=resolved.budget,
        components=components, warnings=tuple(warnings), detected=detected,
        why=resolved.why, foreseen=resolved.foreseen, curve=resolved.curve,
    )  # fmt: skip


def spec_for(name: str, resolved: Resolved) -> tuple[bool, QuantSpec | None]:
    """Return whether the request says how to quantize this component, and the scheme (None: do not quantize)."""
    specs = resolved.specs
    if name in specs:
        spec = specs[name]
    elif "*" not in specs or not _chosen(name, resolved.request):
        return False, None
    else:
        spec = specs["*"]
    return True, None if spec is None else spec.of_component("" if name == LONE else name)


def floats_to_quantize(resolved: Resolved) -> dict[str, Checkpoint]:
    """Return the components of floats that the request wants quantized, before a mix is chosen for them."""
    request = resolved.request
    return {
        name: src
        for name, src in resolved.detected.sources.items()
        if not src.prequantized
        and (_chosen(name, request) if request.mixed else spec_for(name, resolved)[1] is not None)
    }


def _chosen(name: str, request: Request) -> bool:
    if request.components is not None:
        return name in request.components
    return is_quantized_by_default(name)


def _is_float_gguf(src: Checkpoint, spec: QuantSpec | None) -> bool:
    """Return whether it is a GGUF file of floats that is requested by its type: it is loaded as it is."""
    return spec is not None and spec.scheme.bits >= 16 and src.container == "gguf"


def _refuse_file_scheme(src: Checkpoint, spec: QuantSpec | None, path: str) -> None:
    if spec is not None and not spec.scheme.on_the_fly and not isinstance(spec, MixSpec):
        row = spec.scheme
        if row.backend != "gguf":
            raise IncompatibleError(
                f"Cannot quantize the float weights of {src.path} to {row.name}",
                "sdquant reads it from files, and does not make it",
                "Use a scheme that quantizes on the fly, such as int8 or nf4",
            )
        raise IncompatibleError(
            f"Cannot quantize the float weights of {src.path} to {row.name}",
            "GGUF files can be loaded, but models cannot be quantized to GGUF at load time",
            f"Write the file with `sdquant quantize {path} model-{row.name}.gguf --quant {row.name}`, "
            "or use a scheme that quantizes on the fly, such as int8 or nf4",
        )


def _unquantized(
    name: str, src: Checkpoint, spec: QuantSpec | None, resolved: Resolved, machine: Machine, marked: Marked
) -> ComponentPlan:
    """Return the plan for a component of float weights."""
    request = resolved.request
    if _is_float_gguf(src, spec):
        spec = None
    shapes = shapes_in_memory(src, resolved.dtype)
    total = sum(nbytes(shape, dtype) for shape, dtype in shapes.values())
    as_bf16 = sum(
        nbytes(shape, "bfloat16") if dtype in FLOATS else nbytes(shape, dtype) for shape, dtype in shapes.values()
    )
    named = _runtime(name, src, request)
    runtime = named or "plain"
    if spec and not named and not isinstance(spec, MixSpec):
        runtime = default_runtime(spec, resolved.device, isa=machine.native, triton=machine.has_triton)
    if spec is None:
        runtime = "plain" if runtime == openvino.NAME else runtime  # floats are torch's
        return ComponentPlan(
            name=name, class_name=src.class_name, action="keep", scheme=None, mode="found", runtime=runtime,
            weights=(), kept={}, bytes=total, bytes_bf16=as_bf16, path=str(src.path),
        )  # fmt: skip
    selection_runtime = named or ("plain" if isinstance(spec, MixSpec) else spec.scheme.runtimes[0])
    weights, skipped_weights = select(
        shapes, spec, selection_runtime, request.skip, src.class_name, src.layers, src.keys
    )
    saved = sum(nbytes(*shapes[weight.name]) - weight.bytes for weight in weights)
    return ComponentPlan(
        name=name, class_name=src.class_name, action="encode", scheme=spec.scheme.name, spec=spec, runtime=runtime,
        mode="post" if request.mode == "post" else "pre", weights=weights, kept=skipped_weights,
        bytes=total - saved, bytes_bf16=as_bf16, compute=_computed_in(request, runtime, weights),
        products=_products(spec, marked), path=str(src.path),
    )  # fmt: skip


def _products(spec: QuantSpec, marked: Marked) -> int | None:
    if not isinstance(spec, RulesSpec) or not spec.products:
        return 0
    return None if marked is None else len(marked)


def _require_something(
    resolved: Resolved, components: tuple[ComponentPlan, ...], sources: Mapping[str, Checkpoint]
) -> list[str]:
    """Apply `require_something` to the components that are to be quantized now, not to those quantized on disk."""
    extents = extents_of(components, sources)
    has_scheme = any(spec is not None for spec in resolved.specs.values())
    if not extents and (not has_scheme or any(component.weights for component in components)):
        return []
    return require_something(resolved.files.path, extents, resolved.named)


def _refuse_conflict(name: str, src: Checkpoint, is_set: bool, spec: QuantSpec | None) -> None:
    scheme = scheme_of(src)
    if is_set and (spec is None or not (same_scheme(spec.scheme.name, scheme) or _chose_dtypes(src, spec))):
        # Some schemes are in files of other tools only; those of GGUF are made, but not while loading.
        is_made = spec is not None and (spec.scheme.on_the_fly or spec.scheme.backend == "gguf")
        raise ConflictError(
            f"Cannot quantize {src.path} to {spec.scheme.name}" if spec else f"Cannot load {src.path} unquantized",
            f"its weights ({name}) are already quantized to {scheme}",
            f"Remove quant to load it as {scheme}, or use "
            + (
                f"the unquantized model, or convert this one with `sdquant {'quantize' if spec else 'dequantize'}`"
                if spec is None or is_made
                else f"a file of the model in {spec.scheme.name}, which sdquant reads, and does not make"
            ),
        )
    if isinstance(spec, RulesSpec):
        refuse_other_rules(name, src, spec)


def _chose_dtypes(src: Checkpoint, spec: QuantSpec) -> bool:
    """Return whether the weights may be those that a spec with SDNQ's dynamic selection made, which is of no fewer bits
    than its scheme."""
    if "dynamic" not in spec.scheme.options or not spec["dynamic"]:
        return False
    return all(registry.scheme(row.scheme).backend == spec.scheme.backend for row in src.prequantized.values())


def _found(name: str, src: Checkpoint, resolved: Resolved, machine: Machine) -> ComponentPlan:
    """Return the plan for a component that is quantized on disk."""
    request = resolved.request
    decoded = {key: type_histogram.weights_of(src, key) for key in src.prequantized if not _of_a_layer(src, key)}
    weights = tuple(
        WeightPlan(
            name=key,
            scheme=row.scheme,
            bytes_bf16=2 * type_histogram.weights_of(src, key),
            bytes=src.prequantized_bytes(key),
        )
        for key, row in src.prequantized.items()
        if key not in decoded
    )
    counts = {row.scheme: sum(w.bytes for w in weights if w.scheme == row.scheme) for row in src.prequantized.values()}
    scheme = registry.scheme(max(counts, key=lambda name: counts[name]))
    default = default_runtime(
        scheme, resolved.device, isa=machine.native, triton=machine.has_triton, found=True, versions=machine.versions
    )
    runtime = "plain" if src.plain_only else _runtime(name, src, request) or default
    shapes = shapes_in_memory(src, resolved.dtype)
    plain = sum(nbytes(*shapes[key]) for key in src.plain)
    plain += sum(nbytes((count,), resolved.dtype or "float32") for count in decoded.values())
    plain16 = sum(nbytes(info.shape, "bfloat16") for info in src.plain.values()) + 2 * sum(decoded.values())
    return ComponentPlan(
        name=name, class_name=src.class_name, action="found", scheme=scheme.name, mode="found", runtime=runtime,
        weights=weights, kept={}, compute=_computed_in(request, runtime, weights), path=str(src.path),
        bytes=plain + sum(weight.bytes for weight in weights),
        bytes_bf16=plain16 + sum(weight.bytes_bf16 for weight in weights),
    )  # fmt: skip


def _computed_in(request: Request, runtime: str, weights: Iterable[WeightPlan]) -> str | None:
    """Return the type of a component's products, if it is not floats."""
    if request.eight_bit == "fp4" and choices.NVFP4_SCHEMES.isdisjoint(weight.scheme for weight in weights):
        return None
    return request.eight_bit if runtime == "plain" else None


def _of_a_layer(src: Checkpoint, name: str) -> bool:
    """Return whether a quantized tensor stays packed. Norms, biases and bare parameters that a GGUF file stores in
    blocks are dequantized while loading."""
    if src.container != "gguf":
        return True
    weight = src.prequantized[name]
    shape = src.tensors[weight.keys["blocks"]].shape if weight.cut is None else weight.cut.shape
    return name.endswith(".weight") and len([n for n in shape if n > 1]) > 1


def _runtime(name: str, src: Checkpoint, request: Request) -> str | None:
    """Return the requested runtime for this component; None if the request names none."""
    if request.runtime == openvino.NAME and not openvino.suits(name, src.class_name):
        return "plain"
    return request.plain_runtime


def _by_library(component: ComponentPlan, device: str, machine: Machine) -> str | None:
    """Return what is to say of a component that is to run by its format's library; None if nothing."""
    if component.scheme is None or component.action == "keep":
        return None
    if component.action == "found" and component.runtime == "plain":
        return f"runtime='library' has no effect on {component.name}: the library has no module for the file's format"
    by = library_kernels.kernels_of(component.scheme, component.runtime, device, machine)
    return f"runtime='library' of {component.name} {by}" if by else None


def _without_effect(
    resolved: Resolved, components: tuple[ComponentPlan, ...], sources: Mapping[str, Checkpoint], machine: Machine
) -> list[str]:
    """Return a warning for each setting that has no effect."""
    request = resolved.request
    lines = []
    if request.components is not None and "*" not in resolved.specs and not request.mixed:
        lines.append("components= has no effect: it needs one scheme for all of them, such as quant='nf4'")
    if request.runtime == "library":
        lines += filter(None, (_by_library(component, resolved.device, machine) for component in components))
    for component in components:
        spec = spec_for(component.name, resolved)[1] if component.action == "found" else None
        if spec is not None and has_options(sources[component.name], spec) is not True:
            lines.append(
                f"the options of quant={str(spec)!r} have no effect on {component.name}: its weights are quantized to "
                f"{component.scheme} already, and stay as they are; `sdquant quantize` converts them if its files show "
                "that they are other ones"
            )
    if request.eight_bit is not None and not any(component.weights and component.compute for component in components):
        what = "weights are in NVFP4" if request.compute == "fp4" else "quantized weights run in plain layers"
        lines.append(f"compute={request.compute!r} has no effect: no {what}")
    if request.runtime == openvino.NAME and not any(component.runtime == request.runtime for component in components):
        lines.append("runtime='openvino' has no effect: it applies to UNets and transformers, and none is quantized")
    skipped_weights = [
        (name, sources[component.name].keys)
        for component in components
        for name, reason in component.kept.items()
        if reason == SKIPPED
    ]
    for pattern in request.skip:
        if not any(name_patterns.skipped(name, (pattern,), keys) for name, keys in skipped_weights):
            lines.append(f"skip={pattern!r} has no effect: it matches no layer that would be quantized")
    return lines


def _unused_rules(
    request: Request,
    components: tuple[ComponentPlan, ...],
    sources: Mapping[str, Checkpoint],
    products: Mapping[str, Marked],
) -> list[str]:
    """Return a warning for each rule that matches nothing in the components that it is for."""
    ruled = {component.name: component.spec for component in components if isinstance(component.spec, RulesSpec)}
    if request.rules is None or not ruled:
        return []
    weights = [one for name in ruled for one in weights_in(sources[name])]
    return unused(next(iter(ruled.values())), weights, [products.get(name) for name in ruled])


def shapes_in_memory(src: Checkpoint, target: str | None) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype in memory of all tensors of a component of float weights. target: see `Resolved.dtype`."""
    in_its_class = float32_of_class(src.class_name).dtype
    return {key: (info.shape, in_its_class(key, _after_cast(info.dtype, target))) for key, info in src.tensors.items()}


def _after_cast(dtype: str, target: str | None) -> str:
    """Return the dtype of an unquantized tensor in memory, after `WeightLoader.cast`."""
    if dtype.startswith("float8"):
        return target or "bfloat16"
    return target if target is not None and dtype in FLOATS else dtype
