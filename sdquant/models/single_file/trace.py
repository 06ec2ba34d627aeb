"""Trace a function of a state dict without its tensors: each result becomes a recipe over its source tensors.

diffusers' converters of original layouts take and return whole state dicts. Run on meta tensors that record the
operations on them, they show for each tensor of the result which tensors of the file it is built from and how, so that
each can be built alone when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...formats import Get, Recipe

if TYPE_CHECKING:
    from ...core import packed_rows


def trace_conversion(
    convert: Callable[[dict[str, Any]], Mapping[str, Any]], shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, Recipe]:
    """Run `convert` on a state dict of these shapes, and return a recipe for each tensor of its result.

    Results that do not depend on the input (constants that the converter creates) have no sources.
    """
    traced: dict[str, Any] = {name: _source(name, shape, dtype) for name, (shape, dtype) in shapes.items()}
    return {name: _recipe(value) for name, value in convert(traced).items() if isinstance(value, Tensor)}


def constant_recipe(value: Tensor) -> Recipe:
    """Return a recipe without sources, for a constant."""
    return Recipe((), None, tuple(value.shape), value.dtype, lambda get: value)


class Traced(torch.Tensor):
    """A tensor on the meta device that records how it was computed."""

    recipe: Recipe

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _SPLITS:
            args = _fitting(args)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            return _traced(result, _noted(func, args, kwargs, None, result))
        if isinstance(result, (tuple, list)) and result and all(isinstance(one, Tensor) for one in result):
            return type(result)(_traced(one, _noted(func, args, kwargs, i, result)) for i, one in enumerate(result))
        return result  # a size, a dtype


def _source(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    rows = ((0, shape[0]),) if shape else None
    recipe = Recipe((name,), rows, shape, dtype, lambda get: get(name))
    return _traced(torch.empty(shape, dtype=dtype, device="meta"), recipe)


def _traced(tensor: Tensor, recipe: Recipe) -> Tensor:
    traced = tensor.as_subclass(Traced)
    traced.recipe = recipe
    return traced


def _recipe(value: Tensor) -> Recipe:
    if isinstance(value, Traced):
        return value.recipe
    return constant_recipe(value)


def _noted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int | None, output: Any) -> Recipe:
    """Return the recipe of a result of `func`; of its `index`-th, if there are several."""
    leaves, spec = tree_flatten((args, kwargs))
    inputs = [leaf.recipe if isinstance(leaf, Traced) else leaf for leaf in leaves]
    sources = tuple(dict.fromkeys(name for one in inputs if isinstance(one, Recipe) for name in one.sources))

    def make(get: Get) -> Tensor:
        values = [one(get) if isinstance(one, Recipe) else one for one in inputs]
        again, words = tree_unflatten(values, spec)
        result = func(*again, **words)
        item: Tensor = result if index is None else result[index]
        return item

    one = output if index is None else output[index]
    rows = _rows(func, args, kwargs, index, output) if len(sources) == 1 else None
    return Recipe(sources, rows, tuple(one.shape), one.dtype, make)


_SAME = {torch.Tensor.contiguous, torch.Tensor.clone, torch.clone, torch.Tensor.detach}
_SPLITS = {torch.split, torch.Tensor.split}
_PARTS = {torch.chunk, torch.Tensor.chunk, *_SPLITS}
_JOINS = {torch.cat, torch.concat}


def _rows(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int | None, output: Any
) -> tuple[packed_rows.Range, ...] | None:
    """Return the row ranges of the source that a result consists of; None if it is anything else."""
    first = args[0] if args else None
    if func in _SAME and isinstance(first, Traced):
        return first.recipe.rows
    if func in _PARTS and isinstance(first, Traced) and _dim(args, kwargs, 2) == 0 and index is not None:
        begin = sum(part.shape[0] for part in output[:index])
        return _within(first.recipe.rows, begin, begin + output[index].shape[0])
    if func is torch.Tensor.__getitem__ and isinstance(first, Traced):
        which = args[1] if isinstance(args[1], tuple) else (args[1],)
        if all(isinstance(one, slice) and one.step in (None, 1) for one in which) and all(
            one == slice(None) for one in which[1:]
        ):
            begin, end, _ = which[0].indices(first.shape[0])
            return _within(first.recipe.rows, begin, max(begin, end))
    if func in _JOINS and isinstance(first, (list, tuple)) and _dim(args, kwargs, 1) == 0:
        each = [one.recipe.rows if isinstance(one, Traced) else None for one in first]
        if None not in each:
            return tuple(row for rows in each for row in rows or ())
    return None


def _dim(args: tuple[Any, ...], kwargs: Mapping[str, Any], at: int) -> Any:
    return kwargs.get("dim", args[at] if len(args) > at else 0)


def _within(rows: tuple[packed_rows.Range, ...] | None, begin: int, end: int) -> tuple[packed_rows.Range, ...] | None:
    """Return rows `begin` to `end` of the concatenated `rows`."""
    if rows is None:
        return None
    ranges, at = [], 0
    for first, last in rows:
        low, high = max(begin - at, 0), min(end - at, last - first)
        if low < high:
            ranges.append((first + low, first + high))
        at += last - first
    return tuple(ranges)


def _fitting(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a split, scaled to the tensor's size.

    diffusers' converter for Flux hard-codes the widths of the full model (3072 for 24 heads of 128); a smaller model is
    split in the same proportions.
    """
    tensor, sizes, *rest = args
    if not isinstance(sizes, (tuple, list)) or (rest and rest[0] != 0):
        return args
    total, rows = sum(sizes), tensor.shape[0]
    if total == rows or any(size * rows % total for size in sizes):
        return args
    return (tensor, [size * rows // total for size in sizes], *rest)
