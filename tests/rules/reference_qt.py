"""Qwix's quantized training in numpy, written from its description: products in float64 of what the codes stand for.

What is rounded before it is quantized is rounded here too, so that codes are the same; sums are not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import reference

if TYPE_CHECKING:
    from .reference import Array

Wide = npt.NDArray[np.float64]
Rule = dict[str, Any]


class Operand:
    """A tensor quantized in rows along its last axis, and its float values.

    Attributes:
        value: float. back: what the codes stand for. unit: the same in units of the scales. scale: [rows, tiles].
        inside: whether a value lies in its range, where the method may find one that is too narrow.
    """

    def __init__(self, x: Array, qtype: str | None, dtype: str, method: str, tile: int | None, whole: bool) -> None:
        self.value, self.qtype, self.tiled = x.astype(np.float64), qtype, tile is not None and tile < x.shape[1]
        self.inside = np.ones(x.shape, bool)
        if qtype is None:
            self.back, self.unit, self.scale = self.value, self.value, np.ones((len(x), 1), np.float32)
            return
        rows = x.reshape(1, -1) if whole else x
        codes, scale, zero, back = reference.quantize(rows, qtype, tile or rows.shape[1], dtype, method)
        if zero is not None:
            codes = codes - np.repeat(zero, rows.shape[1] // zero.shape[1], 1)
        self.back, self.unit = back.reshape(x.shape).astype(np.float64), codes.reshape(x.shape).astype(np.float64)
        self.scale = np.broadcast_to(scale, (len(x), scale.shape[1]))
        name, *words = method.split(",")
        if name in ("absmax", "minmax") and (not words or float(words[0]) >= 1):
            return
        numbers = [reference.ROUNDINGS[dtype](np.array([np.float32(word)]))[0] for word in words]
        for row, start in itertools.product(range(len(rows)), range(0, rows.shape[1], tile or rows.shape[1])):
            part = (row, slice(start, start + (tile or rows.shape[1])))
            low, high = reference.limits(rows[part], name, numbers, dtype)
            self.inside.reshape(rows.shape)[part] = (rows[part] >= low) & (rows[part] <= high)


def operands(x: Array, w: Array, rule: Rule, dtype: str, tile: int | None = None) -> tuple[Operand, Operand]:
    """The input and the weight of a product, as rows of numbers that share a scale."""
    whole = rule.get("disable_channelwise_axes", False)
    return (
        Operand(x, rule.get("act_qtype"), dtype, rule.get("act_calibration_method", "absmax"), tile, whole),
        Operand(w, rule["weight_qtype"], dtype, rule.get("weight_calibration_method", "absmax"), tile, whole),
    )


def gradient(g: Array, rule: Rule, dtype: str, tile: int | None = None) -> Wide:
    """What a quantized gradient stands for: a scale for each row (and tile)."""
    rows = g.reshape(1, -1) if rule.get("disable_channelwise_axes") and tile is None else g
    method = rule.get("bwd_calibration_method", "absmax")
    codes, scale, zero, _ = reference.quantize(rows, rule["bwd_qtype"], tile or rows.shape[1], dtype, method)
    if zero is not None:
        codes = codes - np.repeat(zero, rows.shape[1] // zero.shape[1], 1)
    made = codes.astype(np.float64) * np.repeat(scale, rows.shape[1] // scale.shape[1], 1)
    return made.reshape(g.shape)


def linear(x: Array, w: Array, g: Array, rule: Rule, dtype: str) -> tuple[Wide, Wide, Wide]:
    """x [M, K], w [N, K], g [M, N]: the product and both gradients.

    rule: fields of a QtRule, tile_size and bwd_weight_grad_tile_size as numbers of elements.
    """
    rounded = reference.ROUNDINGS[dtype]
    a, b = operands(x, w, rule, dtype, rule.get("tile_size"))
    y = a.back @ b.back.T
    if rule.get("bwd_qtype") is None:
        return y, (g @ b.value) * a.inside, (g.T @ a.value) * b.inside
    keep_a, keep_b = (one.qtype is not None and not one.tiled for one in (a, b))
    for_x = rounded(g * b.scale[:, 0]) if keep_b else g
    dx = gradient(for_x, rule, dtype) @ (b.unit if keep_b else b.value)
    if rule.get("bwd_weight_grad_shards") == 0:
        return y, dx * a.inside, (g.T @ a.value) * b.inside
    for_w = rounded(g * a.scale[:, :1]) if keep_a else g
    shards = rule.get("bwd_weight_grad_shards")
    tile = len(g) // shards if shards else rule.get("bwd_weight_grad_tile_size")
    dw = gradient(np.ascontiguousarray(for_w.T), rule, dtype, tile) @ (a.unit if keep_a else a.value)
    return y, dx * a.inside, dw * b.inside


def convolution(x: Array, w: Array, g: Array, rule: Rule, dtype: str, how: Rule) -> tuple[Wide, Wide, Wide]:
    """x [batch, channels, *space], w [out, channels / groups, *kernel], g [batch, out, *places]."""
    rounded = reference.ROUNDINGS[dtype]
    a, b = operands(x.reshape(len(x), -1), w.reshape(len(w), -1), rule, dtype)
    y = products(a.back.reshape(x.shape), b.back.reshape(w.shape), how)
    if rule.get("bwd_qtype") is None:
        return y, *gradients(a.back.reshape(x.shape), b.back.reshape(w.shape), g.astype(np.float64), how)
    wide = (-1, *[1] * (x.ndim - 1))
    for_x = rounded(g * b.scale.reshape(1, -1, *wide[2:])) if b.qtype else g
    of_x = gradient(for_x.reshape(len(g), -1), rule, dtype).reshape(g.shape)
    dx = gradients(a.value.reshape(x.shape), b.unit.reshape(w.shape), of_x, how)[0]
    shards = rule.get("bwd_weight_grad_shards")
    if shards == 0:
        return y, dx, gradients(x.astype(np.float64), w.astype(np.float64), g.astype(np.float64), how)[1]
    for_w = rounded(g * a.scale.reshape(wide)) if a.qtype else g
    dw = np.zeros(w.shape)
    for part in np.split(np.arange(len(g)), shards or 1):
        turned = np.ascontiguousarray(for_w[part].swapaxes(0, 1))
        of_w = gradient(turned.reshape(len(turned), -1), rule, dtype).reshape(turned.shape).swapaxes(0, 1)
        dw += gradients(a.unit.reshape(x.shape)[part], b.unit.reshape(w.shape), of_w, how)[1]
    return y, dx, dw


def products(x: npt.NDArray[Any], w: npt.NDArray[Any], how: Rule) -> npt.NDArray[Any]:
    """A convolution, one place at a time, in the dtype of its operands."""
    places = dict(_places(x, w, how))
    sizes = [max(place[axis] for place in places) + 1 for axis in range(x.ndim - 2)]
    padded, groups = _padded(x, w, how), how.get("groups", 1)
    made = np.zeros((len(x), len(w), *sizes), x.dtype)
    for place, under in places.items():
        for channel in range(len(w)):
            part = padded[under][:, _group(channel, w, groups)]
            made[(slice(None), channel, *place)] = (part * w[channel]).reshape(len(x), -1).sum(1)
    return made


def gradients(x: Wide, w: Wide, g: Wide, how: Rule) -> tuple[Wide, Wide]:
    """The gradients of a convolution's input and weight, for g of its result."""
    padded, groups = _padded(x, w, how), how.get("groups", 1)
    of_x, of_w = np.zeros(padded.shape), np.zeros(w.shape)
    for place, under in _places(x, w, how):
        for channel in range(len(w)):
            group, one = _group(channel, w, groups), g[(slice(None), channel, *place)]
            spread = one.reshape(-1, *[1] * (w.ndim - 1))
            of_x[under][:, group] += spread * w[channel]
            of_w[channel] += (spread * padded[under][:, group]).sum(0)
    inner = tuple(slice(low, low + size) for (low, _), size in zip(_edges(w, how), x.shape[2:], strict=True))
    return of_x[(..., *inner)], of_w


def _group(channel: int, w: npt.NDArray[Any], groups: int) -> slice:
    start = channel * groups // len(w) * w.shape[1]
    return slice(start, start + w.shape[1])


def _each(value: Any, space: int) -> Sequence[int]:
    return [value] * space if isinstance(value, int) else value


def _edges(w: npt.NDArray[Any], how: Rule) -> list[tuple[int, int]]:
    space, padding = w.ndim - 2, how.get("padding", 0)
    if padding == "same":
        spans = [(size - 1) * gap for size, gap in zip(w.shape[2:], _each(how.get("dilation", 1), space), strict=True)]
        return [(span // 2, span - span // 2) for span in spans]
    return [(size, size) for size in _each(0 if padding == "valid" else padding, space)]


def _padded(x: npt.NDArray[Any], w: npt.NDArray[Any], how: Rule) -> npt.NDArray[Any]:
    return np.pad(x, [(0, 0), (0, 0), *_edges(w, how)])


def _places(x: npt.NDArray[Any], w: npt.NDArray[Any], how: Rule) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Each place of the result, and what of the padded input lies under the kernel there."""
    space = w.ndim - 2
    steps, gaps = _each(how.get("stride", 1), space), _each(how.get("dilation", 1), space)
    sizes = [size + sum(edge) for size, edge in zip(x.shape[2:], _edges(w, how), strict=True)]
    spans = [(kernel - 1) * gap + 1 for kernel, gap in zip(w.shape[2:], gaps, strict=True)]
    counts = [(size - span) // step + 1 for size, span, step in zip(sizes, spans, steps, strict=True)]
    for place in itertools.product(*map(range, counts)):
        under = tuple(slice(p * s, p * s + n, d) for p, s, n, d in zip(place, steps, spans, gaps, strict=True))
        yield place, (slice(None), slice(None), *under)
