"""torch.compile takes quantized layers whole: no graph break, the same numbers, and a LoRA beside them learns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sdquant import backends
from sdquant.nn import quantized_layer

SCHEMES = (
    "nf4", "nf4,double_quant", "fp8", "bnb-int8", "qint8", "qint4", "qint3", "int8", "int4", "q8_0", "q4_k",
    "sdnq-uint4",
)  # fmt: skip


class Both(nn.Module):
    """A linear layer and a convolution, with something between them."""

    def __init__(self, text: str, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        spec = backends.parse(text)
        backend = backends.get(spec.scheme.backend)
        floats = nn.Linear(64, 256, dtype=dtype), nn.Conv2d(64, 96, 3, padding=1, dtype=dtype)
        self.linear, self.conv = (quantized_layer(one, backend.encode(one.weight.data, spec)) for one in floats)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, n, 64]."""
        y = torch.nn.functional.silu(self.linear(x))
        return self.conv(y.reshape(x.shape[0], -1, 64).transpose(1, 2).reshape(x.shape[0], 64, 4, -1))


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("text", SCHEMES)
def test_a_compiled_model_has_no_graph_break_and_the_same_numbers(text: str) -> None:
    model = Both(text, torch.bfloat16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for rows in (4, 12):  # the second is another number of rows
            x = torch.randn(2, rows, 64, dtype=torch.bfloat16)
            assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("text", ["nf4", "qint4", "q4_k"])
def test_gradients_through_a_compiled_model_are_those_without(text: str) -> None:
    model = Both(text, torch.float32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    grads = []
    for run in (model, compiled):
        x = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        run(x).square().mean().backward()
        grads.append((x.grad, model.linear.bias.grad))
        model.linear.bias.grad = None
    for ours, wanted in zip(grads[1], grads[0], strict=True):
        assert ours is not None and wanted is not None
        torch.testing.assert_close(ours, wanted)


# Of torch's own checks, from 2.15 on: they make a fake of each tensor that autograd knows.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_operators_are_declared_truly() -> None:
    """torch's own checks: schema, fake tensors, autograd."""
    from sdquant.kernels import ops

    spec = backends.parse("nf4")
    packed = backends.get("bnb").encode(torch.randn(32, 64), spec)
    text = ops.described(packed.spec, tuple(packed.parts))
    x, bias = torch.randn(3, 64, requires_grad=True), torch.randn(32, requires_grad=True)
    torch.library.opcheck(ops.linear, (x, list(packed.parts.values()), bias, text, ""))
    torch.library.opcheck(ops.linear, (x, list(packed.parts.values()), None, text, "int8"))
    torch.library.opcheck(ops.weight, (list(packed.parts.values()), text, torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("text", ["nf4", "q4_k"])
def test_inductor_takes_it(text: str) -> None:
    model = Both(text, torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(2, 4, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("text", ["rules,act_qtype=int8", "rules,weight_qtype=float8_e4m3fn,act_qtype=float8_e4m3fn"])
def test_a_scheme_that_quantizes_activations_is_one_operator(text: str) -> None:
    """The same numbers as without torch.compile, with no break and nothing compiled anew for another layer."""
    torch.manual_seed(0)
    spec = backends.parse(text)

    def layer(module: nn.Module) -> nn.Module:
        weight = module.get_parameter("weight").data
        return quantized_layer(module.requires_grad_(False), backends.get(spec.scheme.backend).encode(weight, spec))

    model = nn.Sequential(layer(nn.Conv2d(16, 32, 3, padding=1)), nn.Flatten(2), layer(nn.Linear(64, 48)))
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(2, 16, 8, 8)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    own = [torch.randn(2, 5, 64).requires_grad_() for _ in range(2)]
    own[1].data.copy_(own[0].data)
    linear = model[2]
    y = torch.compile(linear, fullgraph=True)(own[0])
    torch.testing.assert_close(y, linear(own[1]))  # products of float8 may be summed in another order for a gradient
    y.sum().backward()
    linear(own[1]).sum().backward()
    assert own[0].grad is not None and own[1].grad is not None
    torch.testing.assert_close(own[0].grad, own[1].grad)


def test_a_convolution_is_compiled_once_whatever_is_prepared() -> None:
    spec, graphs = backends.parse("int8_sym"), []
    floats = nn.Conv2d(8, 8, 3).requires_grad_(False)
    layer = quantized_layer(floats, spec.scheme.codec.encode(floats.weight.data, spec))

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    compiled, x = torch.compile(layer, backend=backend), torch.randn(1, 8, 5, 5)
    with torch.no_grad():
        compiled(x)
        layer._prepared = lambda x, layer: None  # by a call that is not compiled, on a card
        compiled(x)
    assert len(graphs) == 1
