"""Select the weights of a component to quantize, by name, shape and dtype only. Pure: no torch, no files."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from ..core import DTYPE_BITS, FLOATS, QuantSpec, Unfit, layer_name, name_patterns
from ..errors import IncompatibleError
from ..models import keep_in_fp32
from ..rules import RulesSpec, operation_of, quant_spec

# Weights that do not belong to a linear or convolution layer: the gates of HiDream's experts, and the transposed
# convolutions of Stable Cascade's second stage.
_BARE = re.compile(r"\.ff_i\.gate\.weight$|(^|\.)up_upscalers\.\d+\.1\.weight$")
SKIPPED = "skipped as asked"


# The components of a pipeline that denoise.
_DRAWS = re.compile(r"^(unet|transformer|prior|decoder)(_\d+)?$")


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """One weight that is or will be quantized, with its size in bytes as bf16 and packed."""

    name: str
    scheme: str
    bytes_bf16: int
    bytes: int


def select(
    shapes: Mapping[str, tuple[tuple[int, ...], str]],
    spec: QuantSpec,
    runtime: str,
    skip: tuple[str, ...],
    class_name: str | None = None,
    layers: Mapping[str, tuple[str | None, str]] | None = None,
    keys: Mapping[str, str] | None = None,
) -> tuple[tuple[WeightPlan, ...], dict[str, str]]:
    """Return the weights that the scheme quantizes, and the weights that stay floats, with the reason.

    Args:
        shapes: shape and torch dtype name of every tensor, by name.
        skip: see `skipped`.
        class_name: of the model, whose library may keep layers in floats. None if the library is not to read it.
        layers: layer types from the model, see `Checkpoint.layers`; None if only names and shapes are known.
        keys: names of the weights in their file, which `skip` may match as well.
    """
    backend = spec.scheme.codec
    weights, skipped_weights, floats = [], {}, keep_in_fp32.kept(class_name, spec)
    alike: dict[object, tuple[str, int] | str] = {}  # a network has many weights, and few shapes
    for name, guess in candidates(shapes):
        kind, why = (layers or {}).get(name, (guess, ""))
        if (kind or guess) == "embedding" and not spec.embeddings:
            continue
        shape, dtype = shapes[name]
        if kind is None:
            skipped_weights[name] = why
        elif name_patterns.skipped(name, skip, keys):
            skipped_weights[name] = SKIPPED
        elif keep_in_fp32.matched(name.removesuffix(".weight"), floats):
            skipped_weights[name] = keep_in_fp32.why_kept(spec)
        elif kind != "embedding" and not spec.scheme.runs(runtime, kind, shape):  # embeddings are plain everywhere
            layer = layer_name(kind, shape)
            skipped_weights[name] = f"{backend.title} has no module for {layer} layers; runtime=plain quantizes them"
        else:
            packed = alike.get((shape, dtype))
            if packed is None:
                packed = _packed(spec, name, shape, dtype)
                if type(spec).of is QuantSpec.of:
                    alike[shape, dtype] = packed
            if isinstance(packed, str):
                skipped_weights[name] = packed
                continue
            scheme, size = packed
            bf16 = nbytes(shape, "bfloat16")
            weights.append(WeightPlan(name=name, scheme=scheme, bytes_bf16=bf16, bytes=size))
    return tuple(weights), skipped_weights


def _packed(spec: QuantSpec, name: str, shape: tuple[int, ...], dtype: str) -> tuple[str, int] | str:
    """Return the scheme of a weight and its size in bytes, or why it is not quantized."""
    try:
        one = spec.of(name, shape)
        layout = one.scheme.codec.layout(one, shape, dtype)
    except Unfit as reason:
        return str(reason)
    return one.scheme.name, sum(part.nbytes for part in layout.values())


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The amount of one component that would be quantized.

    Attributes:
        spec: the scheme.
        weights: number of quantized weights. products: number of modules with quantized activation products.
        kept: float weights of layers that stay as they are, with the reason.
        layers: names and shapes of all weights that a rule can apply to, if `spec` is rules.
    """

    spec: QuantSpec
    weights: int
    products: int = 0
    kept: Mapping[str, str] = field(default_factory=dict)
    layers: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if nothing is quantized."""
        return not self.weights and not self.products

    @property
    def reason(self) -> str:
        """Most common reason why weights stay as they are; "" if none could be quantized."""
        reasons = Counter(self.kept.values())
        return reasons.most_common(1)[0][0] if reasons else ""


def require_something(what: str, parts: Mapping[str, Extent], named: Collection[str] = ()) -> list[str]:
    """Return warnings for components in which nothing would be quantized, or raise if that cannot be intended.

    Args:
        what: name of the model, for the error.
        parts: the components to quantize, by name.
        named: those of them that the user named.

    Returns:
        A sentence for each component in which nothing is quantized and which the user did not name.

    Raises:
        IncompatibleError: nothing is quantized in any component, or in one that the user named; or in one that
            denoises, for a reason other than the user's own rules or `skip`.
    """
    empty = {name: part for name, part in parts.items() if part.is_empty}
    own = (SKIPPED, quant_spec.NO_RULE, quant_spec.LEFT)
    refused = {
        name: part
        for name, part in empty.items()
        if len(empty) == len(parts) or name in named or (_DRAWS.match(name) and part.reason not in own)
    }
    if not refused and parts:
        return [f"Nothing in {name} would be quantized: {_why(part)}" for name, part in empty.items()]
    most = max(refused.values(), key=lambda part: len(part.kept), default=None)
    where = f" {' and '.join(refused)}" if parts.keys() - refused.keys() else ""
    raise IncompatibleError(
        f"Cannot quantize{where or ''}{' of' if where else ''} {what}",
        "it has no weight that would be quantized" if most is None else _why(most),
        "Choose other components" if most is None else _way_out(most),
    )


def _why(part: Extent) -> str:
    text = "it has no weight that would be quantized" + (f": {part.reason}" if part.reason else "")
    if isinstance(part.spec, RulesSpec) and part.spec.products:
        return f"{text}, and no module whose activation products match a rule"
    return text


def _way_out(part: Extent) -> str:
    if isinstance(part.spec, RulesSpec) and part.reason in ("", quant_spec.NO_RULE, quant_spec.LEFT):
        return _near(part.spec, part) or "Change module_path and op_names, or the order of the rules"
    return "Choose other components, or skip fewer layers" if part.reason in ("", SKIPPED) else (
        "Use another scheme or runtime"
    )  # fmt: skip


def _near(spec: RulesSpec, part: Extent) -> str:
    """Suggest a pattern for the likely mistake: one that matches only a part of a module path."""
    for row in spec.rules:
        wide = f".*{row.module_path}.*"
        paths = [(name.removesuffix(".weight"), operation_of(shape)) for name, shape in part.layers]
        if row.module_path != ".*" and any(quant_spec.first((row.at(wide),), *one) for one in paths):
            return f"Use {wide!r}, since the pattern {row.module_path!r} has to match the whole of a module's path"
    return ""


def candidates(shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> Iterator[tuple[str, str]]:
    """Yield names and layer types ("linear", "conv", "embedding") of weights, judged by name and shape."""
    for name, (shape, dtype) in shapes.items():
        if not name.endswith(".weight") or dtype not in FLOATS or len(shape) < 2 or 0 in shape or _BARE.search(name):
            continue
        if len(shape) > 2:
            yield name, "conv"
        else:
            yield name, "embedding" if name_patterns.is_table(name) else "linear"


def nbytes(shape: tuple[int, ...], dtype: str) -> int:
    """Return the size of an unquantized tensor in bytes."""
    return math.prod(shape) * DTYPE_BITS[dtype] // 8
