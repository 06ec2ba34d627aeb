"""The `forward` of a model that OpenVINO runs.

One compiled model serves every shape with the same trace, so another resolution, batch or prompt length costs a trace
(no product with a packed weight is computed in it) and no second copy of the weights. If the trace of a new shape
differs, as for a UNet at sizes that its factor does not divide, another model is compiled.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from ...errors import IncompatibleError
from .arguments import Arguments, OutputStructure
from .compile import compiled, convert, run
from .trace import GraphTrace, in_float32, trace

# Compiled models kept for one component: a pipeline may call it in two ways in turn. Each holds a copy of the weights.
KEPT = 2
_not_compiled: Any = torch.compiler.disable  # OpenVINO runs the model
_PLAIN = 'Load it with runtime="plain"'


@dataclass
class Ready:
    """A compiled model.

    Attributes:
        form: of the graph that it was compiled from; see `trace.GraphTrace`.
        request: OpenVINO's inference request, which owns the model.
        answer: structure of the outputs.
        kept: objects that the model refers to but does not own.
        shapes: input shapes that it is known to be valid for.
    """

    form: tuple[Any, ...]
    request: Any
    answer: OutputStructure
    kept: list[Any]
    shapes: set[tuple[torch.Size, ...]] = field(default_factory=set)


class Served:
    """Called like the model's own forward, run by OpenVINO; refers to its model weakly.

    Attributes:
        ready: the compiled models by call form and model state, the most recently used last.
    """

    runs_in: ClassVar[str] = "openvino"

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._lock = threading.RLock()
        self.ready: list[tuple[Any, Ready]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Served:
        """Return a forward for the copied model, which is in `memo` before its attributes are copied."""
        model = self._owner()
        return Served(memo.get(id(model), model))

    def __reduce__(self) -> Any:
        return Served, (self._owner(),)

    @_not_compiled  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._owner()
        call = Arguments.of(model, args, kwargs)
        _refuse(model, call)
        with self._lock:
            ready = self._ready_for(model, call)
            outputs = run(ready.request, call.tensors)
        dtype = _dtype(model)
        return ready.answer.of([one.to(dtype) if one.is_floating_point() else one for one in outputs])

    def _owner(self) -> nn.Module:
        model = self._model()
        assert model is not None  # whose forward this is
        return model

    def _ready_for(self, model: nn.Module, call: Arguments) -> Ready:
        """Return a compiled model for this call; compile one if there is none."""
        state = _state(model)
        self.ready = [row for row in self.ready if row[0][1] == state]  # the others have weights of before
        key = (call.form, state)
        for row in self.ready:
            if row[0] == key and call.shapes in row[1].shapes:
                self.ready.remove(row)
                self.ready.append(row)
                return row[1]
        answer, dtype = OutputStructure(), _dtype(model)
        with _own_forward(model), in_float32(model):
            traced = trace(model, lambda tensors: answer.take(call.call(model, tensors)), call.tensors)
            for known, ready in self.ready:
                if ready.form == traced.form:
                    if known == key:
                        ready.shapes.add(call.shapes)
                        return ready
                    return self._keep(key, Ready(traced.form, ready.request, answer, ready.kept, {call.shapes}))
            del self.ready[: max(0, len(self.ready) - KEPT + 1)]  # before there is another
            request = _request(model, traced, dtype)
        return self._keep(key, Ready(traced.form, request, answer, traced.layers.kept, {call.shapes}))

    def _keep(self, key: Any, ready: Ready) -> Ready:
        self.ready.append((key, ready))
        return ready


@contextmanager
def _own_forward(model: nn.Module) -> Iterator[None]:
    """Take the served forward off the model for the block, so that its class's own is called."""
    served = model.__dict__.pop("forward")
    try:
        yield
    finally:
        model.__dict__["forward"] = served


def _request(model: nn.Module, traced: GraphTrace, dtype: torch.dtype) -> Any:
    try:
        return compiled(convert(traced), dtype).create_infer_request()
    except Exception as error:  # see `convert`
        reason = str(error).strip().splitlines()
        raise IncompatibleError(
            f"Cannot run {type(model).__name__} with OpenVINO",
            f"it could not be converted: {reason[-1] if reason else type(error).__name__}",
            _PLAIN,
        ) from error


def _dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype in which the model computes and returns its outputs."""
    dtype: torch.dtype = getattr(model, "dtype", torch.float32)
    return dtype


def _state(model: nn.Module) -> Any:
    """Return a key for the model's current weights: its tensors with their versions, and its adapters with strengths.

    A write changes a tensor's version; a replaced tensor has another address.
    """
    tensors = tuple(
        (name, one.data_ptr(), one.dtype, 0 if one.is_inference() else one._version)
        for name, one in model.named_parameters()
    )
    adapters = tuple(
        (path, *(repr(getattr(part, name, None)) for name in ("active_adapters", "disable_adapters", "scaling")))
        for path, part in model.named_modules()
        if "base_layer" in part._modules
    )
    return tensors, adapters


def _refuse(model: nn.Module, call: Arguments) -> None:
    """Raise IncompatibleError for what OpenVINO's CPU plugin cannot do."""
    what = f"Cannot run {type(model).__name__} with OpenVINO"
    for one in call.tensors:
        if one.device.type != "cpu":
            raise IncompatibleError(what, f"it runs on the CPU, but its inputs are on {one.device}", _PLAIN)
    if torch.is_grad_enabled() and any(one.requires_grad for one in (*call.tensors, *model.parameters())):
        raise IncompatibleError(
            what,
            "gradients are enabled, but OpenVINO computes none",
            f"{_PLAIN} to train, or call it in torch.no_grad()",
        )
