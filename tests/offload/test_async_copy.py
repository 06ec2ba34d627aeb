"""Copies go on beside the computation, and what goes wrong in them is not lost."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from sdquant.offload.async_copy import ThreadTransfer


class Slow:
    """A unit whose reading waits for a sign (a stand-in for a slow or broken disk)."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.sign, self.fault = threading.Event(), fault

    def read(self, buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert self.sign.wait(10)
        if self.fault is not None:
            raise self.fault
        return buffer.fill_(7)


def test_the_caller_goes_on_while_a_unit_is_read() -> None:
    unit: Any = Slow()
    transfer = ThreadTransfer(torch.device("cpu"))
    buffer = torch.zeros(4, dtype=torch.uint8)
    ticket = transfer.start(unit, buffer)
    assert not ticket.done() and buffer.sum() == 0  # we are here, and the copy is not
    unit.sign.set()
    assert ticket.wait().sum() == 28 and ticket.done()
    transfer.close()


def test_what_is_raised_in_the_thread_is_raised_by_wait() -> None:
    unit: Any = Slow(OSError("the disk is gone"))
    transfer = ThreadTransfer(torch.device("cpu"))
    ticket = transfer.start(unit, torch.zeros(4, dtype=torch.uint8))
    unit.sign.set()
    with pytest.raises(OSError, match="the disk is gone"):
        ticket.wait()
    transfer.close()
