"""Sizes of a model, each worked out from the shapes of some of its tensors: the words of `sized_configs`' rows.

Each function returns one of the shapes by name, which raises one of `ERRORS` if the tensors that tell are not there;
its docstring says what that returns. Where blocks agree on a size, most of them decide: one may be damaged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]
Size = Callable[[Shapes], Any]
Row = Mapping[str, Any]  # keys of a config: constants, and sizes
ERRORS = (KeyError, IndexError, StopIteration, ValueError, ZeroDivisionError)


def shape(shapes: Shapes, names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the shape of the first of the tensors that is there."""
    return next(shapes[name] for name in names if name in shapes)


def rows(*names: str, over: int = 1) -> Size:
    """Return the rows of the first tensor that is there."""
    return lambda shapes: shape(shapes, names)[0] // over


def columns(*names: str, over: int = 1) -> Size:
    """Return the columns of the first tensor that is there."""
    return lambda shapes: shape(shapes, names)[1] // over


def either(one: Size, other: Size) -> Size:
    """Return the first size, or the second if the tensors that tell the first are not there."""

    def size(shapes: Shapes) -> Any:
        try:
            return one(shapes)
        except ERRORS:
            return other(shapes)

    return size


def widest(*names: str) -> Size:
    """Return the most columns of tensors that have the same number, of which one may be damaged."""
    return lambda shapes: max(shapes[name][1] for name in names if len(shapes.get(name, ())) > 1)


def majority(*endings: str, at: int = 0, over: int = 1, within: tuple[str, ...] = ("",)) -> Size:
    """Return the size of a dimension that most of the tensors have whose names begin and end so, one in each block."""
    return lambda shapes: Counter(
        size[at]
        for name, size in shapes.items()
        if name.endswith(endings) and name.startswith(within) and len(size) > at
    ).most_common(1)[0][0] // over  # fmt: skip


def ratio(one: Size, other: Size) -> Size:
    """Return how often a size has another in it."""
    return lambda shapes: one(shapes) // other(shapes)


def factor(one: Size, other: Size) -> Size:
    """Return the number that a constructor multiplies a size by to get another, and rounds down."""
    return lambda shapes: (one(shapes) + 0.5) / other(shapes)


def blocks(*prefixes: str) -> Size:
    """Return the number of blocks of a list."""
    return lambda shapes: max(
        len({name.removeprefix(prefix).partition(".")[0] for name in shapes if name.startswith(prefix)})
        for prefix in prefixes
    )


def is_there(*names: str) -> Size:
    """Return whether one of the tensors is there."""
    return lambda shapes: any(name in shapes for name in names)


def if_has(size: Size, *names: str) -> Size:
    """Return a size if one of the tensors is there; else None."""
    return lambda shapes: size(shapes) if any(name in shapes for name in names) else None


def has_ending(*endings: str) -> Size:
    """Return whether there is a tensor whose name ends so."""
    return lambda shapes: any(name.endswith(endings) for name in shapes)


def head(width: Size, common: int) -> Size:
    """Return the size of a head of a model whose tensors do not show it: the usual one, if several make the width."""
    return lambda shapes: common if width(shapes) % common == 0 else width(shapes)


def heads(width: Size, common: int) -> dict[str, Size]:
    """Return the rows of such a model's heads."""
    return {"attention_head_dim": head(width, common), "num_attention_heads": ratio(width, head(width, common))}


HEAD = majority(  # of models whose norms of queries and keys show it
    "query_norm.scale", "key_norm.scale", "query_norm.weight", "key_norm.weight", "norm_q.weight", "norm_k.weight",
    "norm_added_q.weight", "norm_added_k.weight", "q_norm.weight", "k_norm.weight", "ln_q.weight", "ln_k.weight",
    "q_norm_x.weight", "k_norm_x.weight", "q_norm_y.weight", "k_norm_y.weight", "to_q.1.weight", "to_k.1.weight",
)  # fmt: skip
IMAGE = ("img_in.weight", "x_embedder.weight")
TEXT = ("txt_in.weight", "context_embedder.weight")
LAST = ("final_layer.linear.weight", "proj_out.weight")
LAST_BIAS = ("final_layer.linear.bias", "proj_out.bias", *LAST)
