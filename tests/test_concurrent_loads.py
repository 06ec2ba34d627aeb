"""What belongs to the whole process while a library loads a model in another thread must not reach sdquant's work:
accelerate's exchanged `register_parameter`, and torch's default dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from torch import nn

import sdquant
from sdquant import backends
from sdquant.nn.layer_factory import float_layer
from sdquant.nn.quantized_layers import QuantizedLayer

SCHEMES = ("nf4", "nf4,double_quant", "fp4", "fp8", "bnb-int8", "qint8", "qint4", "qint3", "qfloat8", "int8", "int4",
           "q8_0", "q4_k", "iq4_nl", "sdnq-int8", "sdnq-uint4")  # fmt: skip


@contextmanager
def somebody_loads() -> Iterator[None]:
    """As diffusers' from_pretrained with torch_dtype=bfloat16 has it while it makes a model, seen by other threads."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with init_empty_weights():
            assert nn.Linear(2, 2).weight.is_meta  # which is what reaches other threads' modules
            yield
    finally:
        torch.set_default_dtype(before)


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 64), nn.SiLU(), nn.Linear(64, 64))


def images(model: Any) -> torch.Tensor:
    with torch.no_grad():
        y: torch.Tensor = model(torch.randn(3, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float32))
    return y


@pytest.mark.parametrize("runtime", ["plain", "library"])
@pytest.mark.parametrize("scheme", ["nf4", "nf4,double_quant", "bnb-int8", "qint8", "qfloat8", "int8", "sdnq-uint4"])
def test_quantizing_and_computing(scheme: str, runtime: str) -> None:
    if runtime not in backends.parse(scheme).scheme.runtimes:
        runtime = "plain"
    wanted = images(sdquant.quantize(net(), scheme, runtime=runtime))
    model = net()
    with somebody_loads():
        sdquant.quantize(model, scheme, runtime=runtime)
        got = images(model)
        floats = [float_layer(one) for one in model if isinstance(one, QuantizedLayer)]
    assert torch.equal(got, wanted) and torch.equal(images(model), wanted)
    assert not any(one.is_meta for layer in (model, *floats) for one in layer.parameters())


@pytest.mark.parametrize("quant", [None, "int8", "nf4", "qint8"])
def test_loading(quant: str | None, sd: Path) -> None:
    def state(model: Any) -> dict[str, torch.Tensor]:
        return {name: one.detach() for name, one in model.state_dict().items() if type(one.detach()) is torch.Tensor}

    wanted = state(sdquant.load_model(sd / "unet", quant, runtime="plain" if quant else None, progress=False))
    with somebody_loads():
        model = sdquant.load_model(sd / "unet", quant, runtime="plain" if quant else None, progress=False)
    got = state(model)
    assert got.keys() == wanted.keys()
    assert all(got[name].dtype == one.dtype and torch.equal(got[name], one) for name, one in wanted.items())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_codec_has_dtypes_of_its_own(scheme: str) -> None:
    torch.manual_seed(0)
    weight, spec = torch.randn(64, 256), backends.parse(scheme)
    backend = backends.get(spec.scheme.backend)
    packed = backend.encode(weight, spec)
    wanted = {dtype: backend.decode(packed, dtype) for dtype in (torch.float32, torch.bfloat16)}
    with somebody_loads():
        again = backend.encode(weight, spec)
        decoded = {dtype: backend.decode(packed, dtype) for dtype in wanted}
    assert again.spec == packed.spec
    for name, part in packed.parts.items():
        assert again.parts[name].dtype == part.dtype and torch.equal(again.parts[name], part), name
    assert all(torch.equal(decoded[dtype], wanted[dtype]) for dtype in wanted)
