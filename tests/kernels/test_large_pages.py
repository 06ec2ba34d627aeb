"""Pages of 2 MB for large results: where they were found to be faster."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from sdquant.kernels import cpu, fastest, large_pages, verdicts

pytestmark = pytest.mark.skipif(cpu.extension() is None, reason="only the C kernels ask for such pages")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The results for which they were asked for."""
    seen: list[int] = []
    ask = large_pages._asked
    monkeypatch.setenv("SDQUANT_SETTINGS", str(tmp_path / "settings.json"))
    monkeypatch.setenv("SDQUANT_TUNE", "1")
    monkeypatch.setattr(fastest, "_verdicts", {})
    monkeypatch.setattr(fastest, "_seen", {})
    monkeypatch.setattr(fastest, "_LONG", math.inf)  # a busy machine may take so long for a few
    monkeypatch.setattr(verdicts, "keep", lambda *of: None)
    monkeypatch.setattr(large_pages, "_asked", lambda out: (seen.append(out.nbytes), ask(out))[1])
    return seen


def test_the_first_results_find_out(asked: list[int]) -> None:
    for channels_last in (False, True):
        for _ in range(fastest.CALLS):
            order = torch.channels_last if channels_last else torch.contiguous_format
            out = torch.empty(2, 8, 1024, 1100, memory_format=order)
            assert large_pages.in_large_pages(out) is out
    assert asked == [2 * 8 * 1024 * 1100 * 4] * fastest.CALLS
    (verdict,) = fastest._verdicts.values()
    large_pages.in_large_pages(out)
    assert len(asked) == fastest.CALLS + verdict
    assert large_pages.in_large_pages(torch.empty(1 << 20)) is not None and len(asked) == fastest.CALLS + verdict


def test_what_is_not_to_be_measured_asks(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDQUANT_TUNE", "0")
    large_pages.in_large_pages(torch.empty(1 << 23))
    assert asked == [1 << 25] and not fastest._verdicts
