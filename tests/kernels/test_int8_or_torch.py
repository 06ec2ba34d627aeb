"""Products in integers by our kernels and by torch's, of a layer on a CPU: the same bits, as what is found says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sdquant import backends
from sdquant.kernels import cpu, fastest, int8_or_torch, int_matmul, verdicts
from sdquant.nn import quantized_layer
from sdquant.nn.layer_factory import set_compute

pytestmark = pytest.mark.skipif(
    cpu.extension() is None or not int_matmul.fast(torch.device("cpu")), reason="there is nothing to choose from"
)
ROWS = 200  # with AMX fewer are multiplied exactly where codes are made again


@pytest.fixture(autouse=True)
def _tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SDQUANT_SETTINGS", str(tmp_path / "settings.json"))
    monkeypatch.setenv("SDQUANT_TUNE", "1")
    monkeypatch.setattr(fastest, "_verdicts", {})
    monkeypatch.setattr(fastest, "_seen", {})
    monkeypatch.setattr(verdicts, "keep", lambda *of: None)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many columns the products of torch's had."""
    seen: list[int] = []
    whole = int_matmul.product
    monkeypatch.setattr(int_matmul, "product", lambda left, right: seen.append(len(right)) or whole(left, right))
    return seen


def layer_of(text: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    floats = nn.Linear(512, 128, dtype=dtype).requires_grad_(False)
    layer: Any = quantized_layer(floats, backends.of_scheme(text).encode(floats.weight.data, backends.parse(text)))
    set_compute(layer, "int8")
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("text", ["int8_sym", "int8", "nf4", "q4_k", "sdnq-uint4", "qint8"])
def test_a_layer_computes_by_what_was_found(
    text: str, dtype: torch.dtype, products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = layer_of(text, dtype), torch.randn(ROWS, 512, dtype=dtype)
    layer(x)
    products.clear()
    monkeypatch.setattr(fastest, "_known", lambda key: False)
    ours = layer(x)
    assert not products
    monkeypatch.setattr(fastest, "_known", lambda key: True)
    assert torch.equal(layer(x), ours) and products == [128]
    assert not int8_or_torch.may_be_torchs(layer.packed, layer._form, 16, dtype)


def test_the_first_calls_of_a_layer_find_out(products: list[int]) -> None:
    layer, x = layer_of("int8_sym"), torch.randn(ROWS, 512, dtype=torch.bfloat16)
    layer(x[:1])
    products.clear()
    results = [layer(x) for _ in range(2 * fastest.CALLS)]
    assert len(products) == fastest.CALLS and all(torch.equal(one, results[0]) for one in results)
    (verdict,) = [found for key, found in fastest._verdicts.items() if key[0] == x.device]  # type: ignore[index]
    products.clear()
    layer(x)
    assert len(products) == verdict


def test_a_rotated_weight_stays_with_our_kernels(products: list[int]) -> None:
    layer, x = layer_of("int8_convrot"), torch.randn(ROWS, 512, dtype=torch.bfloat16)
    layer(x)
    products.clear()
    for _ in range(3):
        layer(x)
    assert not products
