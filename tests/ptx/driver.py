"""A driver for Triton whose card is this package: what is launched runs on tensors in the memory of the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

from .machine import run
from .memory import Span
from .program import parse

_SHARED = 166912  # bytes that a program of sm_80 may have


class Known:
    """Tensors by their addresses, for launches that are given these: those that were asked where they are."""

    def __init__(self) -> None:
        self._tensors: dict[int, weakref.ref[Tensor]] = {}

    def add(self, tensor: Tensor, address: int) -> None:
        """Note where a tensor is."""
        self._tensors[address] = weakref.ref(tensor)

    def span(self, address: int, name: str) -> Span | None:
        """Return the bytes of the tensor there."""
        tensor = self._tensors[address]() if address in self._tensors else None
        return None if tensor is None else span(tensor, name)


def span(tensor: Tensor, name: str) -> Span:
    """Return the bytes from a tensor's first number to its last one."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    size = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return Span(_address(tensor), size, name)


_address: Callable[[Tensor], int] = Tensor.data_ptr


class Card:
    """What Triton asks a driver for."""

    def __init__(self) -> None:
        self.utils = self
        self.known = Known()
        self.launched: list[str] = []

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Return what launches a kernel that Triton has compiled."""
        path = get_cache_manager(metadata.hash).get_file(f"{metadata.name}.ptx")
        assert path is not None, "what Triton compiles for NVIDIA's cards has PTX beside it"
        ptx, names = Path(path).read_text(), list(source.signature)
        kinds = list(source.signature.values())

        def launch(x: int, y: int, z: int, *given: Any) -> None:
            # Stream, function, metadata of the kernel and of the launch, two hooks; then the kernel's arguments.
            arguments, spans = [], []
            for name, kind, value in zip(names, kinds, given[6:], strict=True):
                if kind == "constexpr":
                    continue
                if kind.startswith("*"):
                    found = span(value, name) if isinstance(value, Tensor) else self.known.span(value, name)
                    assert found is not None, f"nothing is known of what {name} points to"
                    spans.append(found)
                    arguments.append(found.start)
                else:
                    arguments.append(float(value) if kind.startswith("fp") else int(value))
            scratch = [0] * (len(parse(ptx).parameters) - len(arguments))  # memory that kernels ask for: these do not
            self.launched.append(metadata.name)
            run(ptx, [*arguments, *scratch], spans, (x, y, z), metadata.shared)

        return launch

    def load_binary(self, *of: Any) -> tuple[None, int, int, int, int]:
        """Return no module, no function, and that it has registers, spills and threads enough."""
        return None, 1, 32, 0, 1024

    def unload_module(self, module: Any) -> None:
        """Do nothing: there is none."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return those that Triton looks at."""
        return {"max_shared_mem": _SHARED, "warpSize": 32, "multiprocessor_count": 108}

    def get_current_device(self) -> int:
        """Return a number that no device has, as Triton keeps what it compiled by it."""
        return 1080

    def get_current_stream(self, device: int = 0) -> int:
        """Return the one stream."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Return the card whose tensor cores there are operations for."""
        return GPUTarget("cuda", 80, 32)


@contextmanager
def use() -> Iterator[Card]:
    """Let Triton launch here. To kernels that are given addresses belong the tensors that were asked for theirs."""
    card, before = Card(), driver._active

    def data_ptr(tensor: Tensor) -> int:
        address = _address(tensor)
        card.known.add(tensor, address)
        return address

    driver._active = card
    torch.Tensor.data_ptr = data_ptr  # type: ignore[method-assign, assignment]
    try:
        yield card
    finally:
        driver._active = before
        del torch.Tensor.data_ptr  # its own is its base class's
