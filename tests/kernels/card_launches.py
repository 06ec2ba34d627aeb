"""A card on which everything works and nothing is computed: tensors that say they are on one, and what is launched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from sdquant.core import code_tables
from sdquant.kernels import (
    dispatch,
    fastest,
    fp8_linear,
    hadamard,
    input_gathering,
    int8_reference,
    int_matmul,
    scheme_activations,
)
from sdquant.kernels.triton import imports

# What makes another view of memory, or memory that nothing is written to.
FREE = (
    "view", "slice", "select", "detach", "t", "transpose", "expand", "alias", "_unsafe_view", "permute", "unsqueeze",
    "as_strided", "numpy_T", "split", "split_with_sizes", "device", "reshape", "flatten", "empty", "empty_like",
    "new_empty",
)  # fmt: skip


# What needs a number of the card's on the host.
WAITS = ("_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select", "_assert_async")


class Count(TorchDispatchMode):
    """The operators of torch that launch something, how often memory is asked for; nothing may wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.allocations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        assert name not in WAITS, name
        if name in ("empty", "new_empty", "empty_like"):
            self.allocations += 1
        elif name not in FREE:
            self.names.append(name)
        made = func(*args, **(kwargs or {}))
        assert not isinstance(made, Tensor) or made.device.type == "cuda", f"{name} has a result on the host"
        return made


def _item(self: Tensor, key: Any) -> Tensor:
    """Slices without torch's own way to them, which asks the card that is not there."""
    for dimension, one in enumerate(key if isinstance(key, tuple) else (key,)):
        self = torch.ops.aten.slice.Tensor(self, dimension, one.start, one.stop)
    return self


def _movedim(self: Tensor, source: int, target: int) -> Tensor:
    order = [axis for axis in range(self.ndim) if axis != source % self.ndim]
    order.insert(target % self.ndim, source % self.ndim)
    return torch.ops.aten.permute(self, order)


def _contiguous(self: Tensor) -> Tensor:
    return self if self.is_contiguous() else torch.ops.aten.clone(self, memory_format=torch.contiguous_format)


class Bound:
    """In place of a compiled kernel with its arguments: every pointer has an address among those of a call."""

    def __init__(self, launch: Any, compiled: Any, at: Mapping[str, int]) -> None:
        pointers = {name for name, value in launch.arguments.items() if isinstance(value, Tensor)}
        assert pointers - {"table", "dynamic"} <= set(at) <= set(launch.kernel.arg_names), launch.kernel.fn.__name__
        self.name, self.most = launch.kernel.fn.__name__, max(at.values())

    def __call__(self, device: int, addresses: list[int]) -> bool:
        return self.on(0, addresses)

    def on(self, stream: object, addresses: list[int]) -> bool:
        assert self.most < len(addresses), self.name
        NAMES.append(self.name)
        return True


NAMES: list[str] = []  # of kernels that were launched


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of kernels that are launched, on a card where everything works."""
    from sdquant.kernels import expansion as by_kernels
    from sdquant.kernels.triton import (
        bound_launch,
        bound_linear,
        branch,
        branch_sides,
        expansion,
        gathering,
        int8_gemm,
        launch,
        launch_config,
        rotation,
        scheme_gemm,
        scheme_scaling,
    )

    names = NAMES
    names.clear()
    monkeypatch.setenv("SDQUANT_TUNE", "0")
    monkeypatch.setattr(fastest, "_verdicts", {})
    monkeypatch.setattr(launch_config.Launch, "__call__", lambda self, device: names.append(self.kernel.fn.__name__))
    for module in (launch_config, launch):
        monkeypatch.setattr(module, "works_on", lambda device: True)
    monkeypatch.setattr(dispatch, "plain", lambda x: True)
    monkeypatch.setattr(dispatch, "_passes", lambda *of: True)
    monkeypatch.setattr(dispatch, "_ways", {})
    monkeypatch.setattr(imports, "eight", lambda device: int8_gemm)
    monkeypatch.setattr(imports, "products", lambda device: int8_gemm)
    monkeypatch.setattr(imports, "rotation", lambda device, group: rotation)
    monkeypatch.setattr(imports, "branch", lambda device: branch)
    monkeypatch.setattr(imports, "branch_sides", lambda device: branch_sides)
    monkeypatch.setattr(dispatch, "_with_branches", {})
    monkeypatch.setattr(bound_launch, "BoundLaunch", Bound)
    monkeypatch.setattr(bound_launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=int)))
    monkeypatch.setattr(bound_linear, "current_index", lambda x: 0)
    monkeypatch.setattr(fp8_linear, "_verdicts", {})
    monkeypatch.setattr(fp8_linear, "_is_right", lambda *of: True)
    monkeypatch.setattr(imports, "expansion", lambda device: expansion)
    monkeypatch.setattr(imports, "scheme_kernels", lambda device: scheme_gemm)
    monkeypatch.setattr(imports, "scaling", lambda device: scheme_scaling)
    monkeypatch.setattr(scheme_activations, "_verdicts", {})
    monkeypatch.setattr(scheme_activations, "_right", lambda *of: True)
    monkeypatch.setattr(imports, "decoder", lambda: None)  # it needs addresses
    monkeypatch.setattr(by_kernels, "plain", lambda x: True)
    monkeypatch.setattr(imports, "gathering", lambda device: gathering)
    monkeypatch.setattr(input_gathering, "plain", lambda x: True)
    monkeypatch.setattr(input_gathering, "seen", lambda x: False)
    monkeypatch.setattr(hadamard, "plain", lambda x: True)
    monkeypatch.setattr(hadamard, "seen", lambda x: False)
    monkeypatch.setattr(int8_reference.InTriton, "_agrees", lambda self, *of: True)
    monkeypatch.setattr(int8_reference, "_quantize", {})
    monkeypatch.setattr(int_matmul, "fast", lambda device: True)
    monkeypatch.setattr(fp8_linear, "way", lambda device, dtype: fp8_linear.Way(torch.bfloat16))
    monkeypatch.setattr(launch_config, "table_of", lambda name, arithmetic, device: torch.empty(256, device=device))
    monkeypatch.setattr(code_tables, "dynamic_code", lambda device: torch.empty(256, device=device))
    monkeypatch.setattr(FakeTensor, "copy_", lambda self, other: torch.ops.aten.copy_(self, other), raising=False)
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda self: 256, raising=False)
    monkeypatch.setattr(FakeTensor, "get_device", lambda self: 0, raising=False)
    monkeypatch.setattr(FakeTensor, "__getitem__", _item, raising=False)
    monkeypatch.setattr(FakeTensor, "movedim", _movedim, raising=False)
    monkeypatch.setattr(FakeTensor, "contiguous", _contiguous, raising=False)
    yield names
