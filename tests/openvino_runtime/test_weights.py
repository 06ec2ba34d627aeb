"""A packed weight in OpenVINO's graph: NNCF's codes, bit for bit, and the values that they decode to."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sdquant import backends
from sdquant.nn import quantized_layer
from sdquant.nn.openvino.compile import compiled, convert, run
from sdquant.nn.openvino.library import library
from sdquant.nn.openvino.trace import trace
from sdquant.nn.openvino.weights import decompressed

BACKEND = backends.get("nncf")
TYPES = {"int8": "u8", "int8_sym": "i8", "int4": "u4", "int4_sym": "u4"}


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(48, 128), (3, 64), (16, 32, 3, 3)], ids=str)
@pytest.mark.parametrize("scheme", [*TYPES, "int4,group_size=-1", "int4_sym,group_size=32"])
def test_codes_and_values(scheme: str, shape: tuple[int, ...]) -> None:
    packed, kept = BACKEND.encode(_random(*shape), backends.parse(scheme)), list[Any]()
    node = decompressed(packed, kept)
    model = library().ov.Model([node], [])
    codes = [op for op in model.get_ops() if op.get_type_name() == "Constant" and op.get_output_size() == 1]
    codes = [op for op in codes if op.get_element_type().get_type_name() == TYPES[packed.spec.scheme.name]]
    most = max(codes, key=lambda op: op.get_byte_size())
    bits = 4 if packed.spec.scheme.name.startswith("int4") else 8
    assert most.get_byte_size() == np.prod(shape) * bits // 8
    assert np.array_equal(np.array(most.data).reshape(-1), packed.parts["codes"].numpy().reshape(-1))
    (values,) = run(compiled(model, torch.float32).create_infer_request(), [])
    # The plain runtime rounds to float16 on the way, which OpenVINO need not.
    assert torch.allclose(values, BACKEND.decode(packed, torch.float32), rtol=2**-10, atol=2**-14)


CONVOLUTIONS = [
    {"stride": 2, "padding": 1},
    {"padding": "same", "dilation": 2, "kernel_size": 4},
    {"padding": "valid", "groups": 4},
    {"padding": 2, "padding_mode": "circular", "stride": 2},
]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("how", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_every_kind_of_convolution(dims: int, how: dict[str, Any], bias: bool) -> None:
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    layer = kind(16, 32, **{"kernel_size": 3, **how}, bias=bias)
    _same_output(layer, _random(2, 16, *(9,) * dims))


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_and_a_table(bias: bool) -> None:
    _same_output(nn.Linear(64, 48, bias=bias), _random(2, 5, 64))
    _same_output(nn.Embedding(40, 64), torch.tensor([[3, 39, 0], [7, 7, 1]]))


def _same_output(layer: nn.Module, x: torch.Tensor) -> None:
    """The outputs of the layer, quantized, in OpenVINO and in plain torch; and so for another batch."""
    torch.manual_seed(0)
    packed = BACKEND.encode(layer.weight.detach(), backends.parse("int8"))  # type: ignore[arg-type]
    model = nn.Sequential(quantized_layer(layer, packed))
    made = trace(model, lambda tensors: model(*tensors), [x])
    request = compiled(convert(made), torch.float32).create_infer_request()
    assert not any("forward" in part.__dict__ for part in model.modules())
    for batch in (x, torch.cat([x, x.flip(0)])):
        (found,) = run(request, [batch])
        with torch.no_grad():
            wanted = model(batch)
        assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


def test_traces_are_the_same_if_nothing_but_sizes_differs() -> None:
    def of(x: torch.Tensor, value: float = 2.0) -> torch.Tensor:
        x = x.reshape(x.shape[0], -1) * torch.tensor([value])
        return x if x.shape[1] > 10 else -x

    shapes = [(2, 4, 4), (3, 5, 4), (2, 3, 3)]
    made = [trace(nn.Identity(), lambda tensors: of(*tensors), [torch.zeros(shape)]) for shape in shapes]
    other = trace(nn.Identity(), lambda tensors: of(*tensors, value=3.0), [torch.zeros(shapes[0])])
    assert made[0].same(made[1])
    assert not made[0].same(made[2])  # 9 is not above 10
    assert not any(other.same(one) for one in made)
    assert len({one.form for one in (*made, other)}) == 3
    assert all(a.same(b) == b.same(a) for a, b in itertools.product(made, made))
