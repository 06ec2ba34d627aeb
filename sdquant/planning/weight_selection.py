"""Which weights of a component a scheme will hold: by name, shape and dtype alone. Pure: no torch, no files."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..core import registry
from ..core.backend import DTYPE_BITS, Unfit, layer_name
from ..core.dtypes import FLOATS
from ..core.name_patterns import skipped
from ..errors import IncompatibleError
from ..models import keep_in_fp32
from ..rules.quant_spec import LEFT, NO_RULE, RulesSpec, first, operation_of

if TYPE_CHECKING:
    from ..core.backend import QuantSpec

# Two-dimensional weights that are looked up, not multiplied: they stay as they are unless it is asked for them
# (`nf4,embeddings`). Modules by the last word of their path, as diffusers and transformers call those that are an
# `nn.Embedding`.
_TABLES = re.compile(
    r"(^|\.)((?!patch_|proj_)[a-z_]*embeddings?|shared|embed_tokens|embed_positions|relative_attention_bias|pos_embed|"
    r"embedding_table|style_embedder|wte|wpe)\.weight$"
)
# Matrices and kernels that no layer of these kinds owns: the gates of HiDream's experts, and the transposed
# convolutions of Stable Cascade's second stage.
_BARE = re.compile(r"\.ff_i\.gate\.weight$|(^|\.)up_upscalers\.\d+\.1\.weight$")
SKIPPED = "skipped as asked"


# The parts of a pipeline that draw.
_DRAWS = re.compile(r"^(unet|transformer|prior|decoder)(_\d+)?$")


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """One weight that will be quantized, or is already: its bytes as bf16 and packed."""

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
    """Which weights a scheme will hold, and which of those it could hold stay floats, with the reason.

    Args:
        shapes: shape and torch dtype name of every tensor, by name.
        skip: see `skipped`.
        class_name: of the model, whose library may want layers in floats. None where the library is not to read it.
        layers: what the model says of its layers, see `Source.layers`; None where only names and shapes tell.
        keys: other names for weights, which `skip` may mean as well: those that its file has.
    """
    backend = registry.get(spec.scheme.backend)
    weights, kept, floats = [], {}, keep_in_fp32.kept(class_name, spec)
    for name, said in candidates(shapes):
        kind, why = (layers or {}).get(name, (said, ""))
        if (kind or said) == "embedding" and not spec.embeddings:
            continue
        shape, dtype = shapes[name]
        if kind is None:
            kept[name] = why
        elif skipped(name, skip, keys):
            kept[name] = SKIPPED
        elif keep_in_fp32.matched(name.removesuffix(".weight"), floats):
            kept[name] = keep_in_fp32.why_kept(spec)
        elif kind != "embedding" and not spec.scheme.runs(runtime, kind, shape):  # tables are plain in every runtime
            layer = layer_name(kind, shape)
            kept[name] = f"{backend.title} has no module for {layer} layers; runtime=plain, named, quantizes them"
        else:
            try:
                layout = backend.layout(spec.of(name, shape), shape, dtype)
            except Unfit as reason:
                kept[name] = str(reason)
                continue
            size = sum(part.nbytes for part in layout.values())
            bf16 = nbytes(shape, "bfloat16")
            weights.append(WeightPlan(name=name, scheme=spec.scheme.name, bytes_bf16=bf16, bytes=size))
    return tuple(weights), kept


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much of one component would be quantized.

    Attributes:
        spec: in what.
        weights: how many of them. products: how many modules have products of activations quantized.
        kept: float weights of layers that stay as they are, with the reason.
        layers: names and shapes of all weights that a rule can be for, where `spec` is rules.
    """

    spec: QuantSpec
    weights: int
    products: int = 0
    kept: Mapping[str, str] = field(default_factory=dict)
    layers: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is quantized."""
        return not self.weights and not self.products

    @property
    def reason(self) -> str:
        """Why most of its weights stay as they are; "" if it has none that could be quantized."""
        reasons = Counter(self.kept.values())
        return reasons.most_common(1)[0][0] if reasons else ""


def require_something(what: str, parts: Mapping[str, Extent], named: Collection[str] = ()) -> list[str]:
    """Say in which components nothing would be quantized, or refuse to go on without a quantization.

    Args:
        what: was to be quantized, for the error.
        parts: the components that a quantization is for, by name.
        named: those of them that the user asked for by name.

    Returns:
        A sentence for each component in which nothing is quantized, and nobody asked for it by name.

    Raises:
        IncompatibleError: nothing is quantized in any component, or in one that was named; or in one that draws, for
            another reason than the user's own rules or `skip`.
    """
    empty = {name: part for name, part in parts.items() if part.is_empty}
    own = (SKIPPED, NO_RULE, LEFT)
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
        return f"{text}, and no module whose products of activations a rule names"
    return text


def _way_out(part: Extent) -> str:
    if isinstance(part.spec, RulesSpec) and part.reason in ("", NO_RULE, LEFT):
        return _near(part.spec, part) or "Change module_path and op_names, or the order of the rules"
    return "Choose other components, or skip fewer layers" if part.reason in ("", SKIPPED) else (
        "Use another scheme or runtime"
    )  # fmt: skip


def _near(spec: RulesSpec, part: Extent) -> str:
    """The likely slip: a pattern for a part of the path, where one for the whole is wanted."""
    for row in spec.rules:
        wide = f".*{row.module_path}.*"
        paths = [(name.removesuffix(".weight"), operation_of(shape)) for name, shape in part.layers]
        if row.module_path != ".*" and any(first((row.at(wide),), *one) for one in paths):
            return f"Use {wide!r}: the pattern {row.module_path!r} has to match the whole of a module's path"
    return ""


def candidates(shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> Iterator[tuple[str, str]]:
    """Names and kinds of the weights of linear, convolution and embedding layers, as far as name and shape tell."""
    for name, (shape, dtype) in shapes.items():
        if not name.endswith(".weight") or dtype not in FLOATS or len(shape) < 2 or 0 in shape or _BARE.search(name):
            continue
        if len(shape) > 2:
            yield name, "conv"
        else:
            yield name, "embedding" if _TABLES.search(name) else "linear"


def nbytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a plain tensor."""
    return math.prod(shape) * DTYPE_BITS[dtype] // 8
