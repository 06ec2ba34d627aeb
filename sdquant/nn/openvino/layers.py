"""Quantized layers in OpenVINO's graph. In a trace each is one opaque node, so that no weight is dequantized."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import QuantizedLayer
from .library import library
from .weights import constant, decompressed, in_graph

OPERATION = "sdquant::layer"


@dataclass(frozen=True)
class Layers:
    """The quantized layers of a model; a trace refers to them by index.

    Attributes:
        kept: objects that a converted model refers to; see `weights.decompressed`.
        stopped: a Ctrl-C during the conversion of a layer, which OpenVINO's frontend turns into an error of its own.
    """

    modules: tuple[QuantizedLayer, ...]
    kept: list[Any] = field(default_factory=list)
    stopped: list[KeyboardInterrupt] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module) -> Layers:
        """Return the layers of a model, in its order."""
        layers = (part for part in model.modules() if isinstance(part, QuantizedLayer))
        return cls(tuple(part for part in layers if in_graph(part.packed)))

    @contextmanager
    def opaque(self) -> Iterator[None]:
        """Context for tracing: each layer is a node `OPERATION` of its input and its index, and computes only the
        output shape."""
        before = _TRACED.set(self.modules)
        try:
            for place, layer in enumerate(self.modules):
                layer.__dict__["forward"] = _forward(layer, torch.tensor(place, dtype=torch.int64, device="cpu"))
            yield
        finally:
            _TRACED.reset(before)
            for layer in self.modules:
                layer.__dict__.pop("forward", None)

    def extension(self) -> Any:
        """Return the extension that converts these nodes in OpenVINO's frontend. It must outlive the conversion."""
        ops = library().ops

        def build(context: Any) -> list[Any]:
            try:
                return node(context)
            except KeyboardInterrupt as stop:
                self.stopped.append(stop)
                raise

        def node(context: Any) -> list[Any]:
            x = context.get_input(0)
            place = int(context.get_values_from_const_input(1))
            layer: Any = self.modules[place]
            weight = decompressed(layer.packed, self.kept)
            if isinstance(layer, nn.Embedding):
                return [ops.gather(weight, x, 0).output(0)]
            if isinstance(layer, nn.Linear):
                y, bias_shape = ops.matmul(x, weight, False, True), None
            else:
                y, bias_shape = _convolution(layer, x, weight), (1, -1, *(1,) * len(layer.stride))
            bias = layer._parameters.get("bias")
            if bias is not None:
                values = bias.detach().float()
                y = ops.add(y, constant(values if bias_shape is None else values.view(bias_shape)))
            return [y.output(0)]

        return library().ConversionExtension(OPERATION, build)


# Place to layer, while a model is traced. The class of the nodes must not hold them: a class is freed late.
_TRACED: ContextVar[tuple[QuantizedLayer, ...]] = ContextVar("traced")


@cache
def _node() -> Any:
    """Return the function that a trace shows as one node; OpenVINO's frontend finds it by `target_extension`."""

    class Node(torch.autograd.Function):
        target_extension = library().ModuleExtension(QuantizedLayer, OPERATION)

        @staticmethod
        @torch.jit.ignore  # type: ignore[untyped-decorator]
        def forward(ctx: Any, x: Tensor, place: Tensor) -> Tensor:
            return _empty_output(_TRACED.get()[int(place)], x)

    return Node.apply


def _forward(layer: Any, place: Tensor) -> Any:
    def forward(x: Tensor) -> Any:
        if getattr(layer, "padding_mode", "zeros") != "zeros":
            x = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        return _node()(x, place)

    return forward


def _empty_output(layer: Any, x: Tensor) -> Tensor:
    """Return zeros in the shape of the layer's output."""
    dtype = layer.compute_dtype
    if isinstance(layer, nn.Embedding):
        return x.new_zeros((*x.shape, layer.embedding_dim), dtype=dtype)
    if isinstance(layer, nn.Linear):
        return x.new_zeros((*x.shape[:-1], layer.out_features))
    begin, end = _padding(layer)
    reach = [dilation * (size - 1) + 1 for dilation, size in zip(layer.dilation, layer.kernel_size, strict=True)]
    rows = zip(x.shape[-len(begin) :], begin, end, reach, layer.stride, strict=True)
    sizes = [(int(n) + low + high - far) // step + 1 for n, low, high, far, step in rows]
    return x.new_zeros((*x.shape[: -1 - len(begin)], layer.out_channels, *sizes))


def _padding(layer: Any) -> tuple[list[int], list[int]]:
    """Return the zero padding of the convolution itself, before and after; other padding modes pad x before it."""
    dims = len(layer.stride)
    if layer.padding_mode != "zeros" or layer.padding == "valid":
        return [0] * dims, [0] * dims
    if layer.padding == "same":  # torch puts the odd one at the end
        total = [step * (size - 1) for step, size in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [n // 2 for n in total], [n - n // 2 for n in total]
    return list(layer.padding), list(layer.padding)


def _convolution(layer: Any, x: Any, weight: Any) -> Any:
    ops, (begin, end) = library().ops, _padding(layer)
    stride, dilation = list(layer.stride), list(layer.dilation)
    if layer.groups == 1:
        return ops.convolution(x, weight, stride, begin, end, dilation)
    out, *rest = layer.spec.shape
    grouped = ops.reshape(weight, [layer.groups, out // layer.groups, *rest], False)
    return ops.group_convolution(x, grouped, stride, begin, end, dilation)
