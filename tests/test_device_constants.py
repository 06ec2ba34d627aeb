"""Tables that are kept for a device: made once, and never a fake tensor."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sdquant.utils.device_constants import constant

if TYPE_CHECKING:
    import pytest

CPU = torch.device("cpu")


def test_made_once_and_an_ordinary_tensor() -> None:
    calls: list[str] = []

    @constant
    def values(name: str, device: torch.device) -> torch.Tensor:
        calls.append(name)
        return torch.arange(3.0, device=device)

    with torch.inference_mode():
        first = values("one", CPU)
    assert values("one", CPU) is first and not first.is_inference()
    assert values("two", CPU) is not first and calls == ["one", "two"]


def test_a_fake_tensor_is_not_kept() -> None:
    @constant
    def values(device: torch.device) -> torch.Tensor:
        return torch.arange(3.0, device=device)

    with FakeTensorMode():
        assert type(values(CPU)) is not torch.Tensor
    assert values(CPU).tolist() == [0.0, 1.0, 2.0]


def test_on_a_card_another_thread_on_a_stream_of_its_own_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no graph's pool is. torch's card is a stand-in here; `tests/kernels/test_on_card.py` has a real one."""
    seen: list[tuple[object, ...]] = []
    current = threading.local()

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.waited = False

        def synchronize(self) -> None:
            self.waited = True

    class Using:
        def __init__(self, value: object) -> None:
            self.value = value

        def __enter__(self) -> None:
            current.values = [*getattr(current, "values", []), self.value]

        def __exit__(self, *_: object) -> None:
            current.values.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", Using)
    monkeypatch.setattr(torch.cuda, "device", Using)

    @constant
    def values(device: torch.device) -> torch.Tensor:
        seen.append((threading.get_ident(), *current.values))
        return torch.arange(3.0)

    card = torch.device("cuda", 1)
    assert values(card).tolist() == [0.0, 1.0, 2.0]
    ((thread, device, stream),) = seen
    assert thread != threading.get_ident() and device == card
    assert isinstance(stream, Stream) and stream.waited
