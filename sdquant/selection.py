"""Which weights of a component a scheme will hold: by name, shape and dtype alone. Pure: no torch, no files."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import backends, library_floats
from .backends.base import DTYPE_BITS, Unfit

if TYPE_CHECKING:
    from .backends.base import QuantSpec

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
FLOATS = ("float64", "float32", "float16", "bfloat16")


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
) -> tuple[tuple[WeightPlan, ...], dict[str, str]]:
    """Which weights a scheme will hold, and which of those it could hold stay floats, with the reason.

    Args:
        shapes: shape and torch dtype name of every tensor, by name.
        skip: see `skipped`.
        class_name: of the model, whose library may want layers in floats. None where the library is not to read it.
    """
    backend = backends.get(spec.scheme.backend)
    kinds = spec.scheme.kinds(runtime)
    weights, kept, floats = [], {}, library_floats.kept(class_name, spec)
    for name, kind in candidates(shapes):
        if kind == "embedding" and not spec.embeddings:
            continue
        shape, dtype = shapes[name]
        if skipped(name, skip):
            kept[name] = SKIPPED
        elif library_floats.matched(name.removesuffix(".weight"), floats):
            kept[name] = library_floats.why_kept(spec)
        elif kind != "embedding" and kind not in kinds:  # tables are plain layers in every runtime
            kept[name] = f"{backend.title} has no module for {kind} layers; runtime=plain, named, quantizes them"
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


def candidates(shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> Iterator[tuple[str, str]]:
    """Names and kinds of the weights of linear, convolution and embedding layers, as far as name and shape tell."""
    for name, (shape, dtype) in shapes.items():
        if not name.endswith(".weight") or dtype not in FLOATS or len(shape) < 2 or 0 in shape or _BARE.search(name):
            continue
        if len(shape) > 2:
            yield name, "conv"
        else:
            yield name, "embedding" if _TABLES.search(name) else "linear"


def skipped(name: str, skip: tuple[str, ...]) -> bool:
    """Whether a pattern of `skip` means this weight: a run of whole parts of its module's path ("mid_block",
    "attn.to_q"), or a pattern with * or ? for the whole path."""
    module = name.removesuffix(".weight")
    return any(
        fnmatch.fnmatchcase(module, pattern) if set(pattern) & set("*?[") else f".{pattern}." in f".{module}."
        for pattern in skip
    )


def nbytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a plain tensor."""
    return math.prod(shape) * DTYPE_BITS[dtype] // 8
