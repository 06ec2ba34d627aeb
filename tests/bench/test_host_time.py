"""The processor's time for a call on a card, relative to torch's own layer without its product: `bench.host_time`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bench import host_time

MOST = 9  # one launch takes 3, three in 8-bit floats take 6


@pytest.mark.slow
def test_a_call_takes_a_few_times_what_torchs_own_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_time, "TURNS", 9)
    torch.set_num_threads(1)
    (_, own), *others = host_time.times(min).items()
    assert len(others) == 23 and {name: seconds for name, seconds in others if seconds > MOST * own} == {}
