"""What is decided about a card is decided for that card, and by trying: rows of docs/gpus.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdquant.core import PackedLayout
from sdquant.kernels import dispatch, int_matmul
from sdquant.kernels.triton import imports

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def _raises(left: Tensor, right: Tensor) -> Tensor:
    raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")


def _right(left: Tensor, right: Tensor) -> Tensor:
    return (left.double() @ right.double().T).to(torch.int32)


@pytest.mark.parametrize(
    ("product", "good"), [(_right, True), (_raises, False), (lambda left, right: _right(left, right) + 1, False)]
)
def test_the_product_of_integers_is_tried(
    product: Callable[[Tensor, Tensor], Tensor], good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cards before Turing and some of AMD's raise, which was an error at a user's first forward."""
    monkeypatch.setattr(int_matmul, "_on_cuda", product)
    assert int_matmul._good_on_cuda.__wrapped__(CPU) == good


@pytest.mark.parametrize(("capability", "used"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_cards_whose_tensor_cores_triton_leaves_alone_multiply_no_codes(
    capability: tuple[int, int], used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemm = pytest.importorskip("sdquant.kernels.triton.int8_gemm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(imports, "eight", lambda device: gemm)
    monkeypatch.setattr(imports, "_checked", lambda device, what, check: gemm)
    assert imports.products.__wrapped__(torch.device("cuda", 0)) is (gemm if used else None)


def test_one_card_has_no_say_about_another(monkeypatch: pytest.MonkeyPatch) -> None:
    form = PackedLayout(rows=4, columns=64, codes="codes", packing="int8", group=64)

    def of(index: int) -> Any:
        part = SimpleNamespace(device=torch.device("cuda", index), dtype=torch.int8)
        return SimpleNamespace(parts={"codes": part})

    monkeypatch.setattr(dispatch, "plain", lambda part: True)
    monkeypatch.setattr(dispatch, "_ways", {})
    monkeypatch.setattr(
        dispatch, "_chosen", lambda backend, packed, form, dtype, device: dispatch.Way(few=device.index)
    )
    backend: Any = None
    assert [dispatch.way(backend, of(index), form, torch.bfloat16).few for index in (0, 1, 0)] == [0, 1, 0]


def test_the_tests_that_the_documentation_names_are_there() -> None:
    text = (ROOT / "docs" / "gpus.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (A\d+b?|B\d+) \|", text, re.M)
    assert rows == ["A1", "A2", "A2b", *(f"A{n}" for n in range(3, 11)), *(f"B{n}" for n in range(1, 22))]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 30
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"
