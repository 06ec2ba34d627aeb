"""Trace a call of a model as a graph of torch operations, and compare the graphs of two calls.

Python's control flow is fixed in a trace. Sizes that flow through operations stay dynamic, so one graph is valid for
many shapes; a second trace shows whether it is valid for a new one (`Trace.same`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning

from ...utils.buffers import dense
from .. import QuantizedLayer
from ..state_dict import PREFIX
from .layers import Layers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class GraphTrace:
    """A traced call.

    Attributes:
        module: the result of `torch.jit.trace`.
        layers: those that its opaque nodes refer to.
        form: the graph's nodes, without the shapes at which it was traced.
    """

    module: Any
    layers: Layers
    form: tuple[Any, ...]

    def same(self, other: GraphTrace) -> bool:
        """Return whether the other is the same graph with the same constants, so that either serves both shapes."""
        return self.form == other.form


class _Call(nn.Module):
    """A model as a function of tensors alone."""

    def __init__(self, model: nn.Module, call: Callable[[Sequence[Tensor]], Any]) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, *tensors: Tensor) -> Any:
        return self.call(tensors)


def trace(model: nn.Module, call: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor]) -> GraphTrace:
    """Trace `call(tensors)`, which calls `model`. The model's floats must be in float32 (`in_float32`).

    The quantized layers compute nothing; attention and norms do, on zeros mostly.
    """
    layers = Layers.of(model)
    training = {part: part.training for part in model.modules()}
    try:
        with layers.opaque(), torch.no_grad(), warnings.catch_warnings():
            # TorchScript is deprecated, and OpenVINO's way in; its warnings of what a trace fixes are for people who
            # would use the graph for other shapes without a look, which nothing here does.
            warnings.filterwarnings("ignore", "`torch.jit.trace")  # a FutureWarning from torch 2.15 on
            warnings.simplefilter("ignore", TracerWarning)
            jit: Any = torch.jit
            module = jit.trace(_Call(model, call).eval(), tuple(tensors), strict=False, check_trace=False)
            return GraphTrace(module, layers, _form(module.inlined_graph))
    finally:
        for part, was in training.items():
            part.training = was


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Context with the model's 16-bit floats in float32, except packed weights; afterwards the same tensors are back.

    OpenVINO's patterns match float32 models; its inference precision is set in `compile`.
    """
    originals: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for part in model.modules():
            own: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
            packed = isinstance(part, QuantizedLayer)
            for tensors in own:
                for name, tensor in list(tensors.items()):
                    if tensor is None or tensor.dtype not in (torch.bfloat16, torch.float16):
                        continue
                    if packed and name.startswith(PREFIX):
                        continue
                    originals.append((tensors, name, tensor))
                    floats = tensor.detach().float()
                    tensors[name] = nn.Parameter(floats, False) if tensors is part._parameters else floats
        yield
    finally:
        for tensors, name, tensor in originals:
            tensors[name] = tensor


def _form(graph: Any) -> tuple[Any, ...]:
    """Return each node's kind, inputs (numbered by first appearance) and attributes."""
    numbers: dict[str, int] = {}

    def number(value: Any) -> int:
        return numbers.setdefault(value.debugName(), len(numbers))

    rows: list[Any] = [tuple(number(value) for value in graph.inputs())]
    for node in graph.nodes():
        # A layer's node is told by its inputs; its attributes hold what happened in it, with shapes.
        names = node.attributeNames() if node.kind() != "prim::PythonOp" else ()
        attributes = tuple((name, _value(getattr(node, node.kindOf(name))(name))) for name in names)
        inputs, outputs = (tuple(number(value) for value in side) for side in (node.inputs(), node.outputs()))
        rows.append((node.kind(), inputs, outputs, attributes))
    rows.append(tuple(number(value) for value in graph.outputs()))
    return tuple(rows)


def _value(value: Any) -> Any:
    """Return an attribute in a comparable form."""
    if isinstance(value, Tensor):
        flat = dense(value.detach().reshape(-1))
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, list | tuple):
        return tuple(_value(one) for one in value)
    return repr(value) if isinstance(value, float) else value  # nan is not itself
