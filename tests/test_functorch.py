"""Derivatives and batches that torch carries along with values: torch.func's transforms, forward-mode AD. Each is that
of the layer with the decoded weight, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap
from torch.nn import functional as F

from sdquant import backends, offload
from sdquant.errors import IncompatibleError
from sdquant.nn import quantized_layer
from sdquant.nn.layer_factory import float_layer

from .offload.test_balanced import REST, Net, Pipe
from .offload.test_threads import MOVING, offloaded

# Of torch's own decompositions, at the first forward-mode derivative of a process; a FutureWarning from torch 2.15 on.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(64, 48), (5, 64)),
    "convolution": (lambda: nn.Conv2d(64, 48, 3, padding=1), (2, 64, 6, 6)),
    "padded": (lambda: nn.Conv2d(64, 48, 3, padding=1, padding_mode="reflect"), (2, 64, 6, 6)),
}
SCHEMES = ("int8", "nf4", "q8_0", "sdnq-uint4", "bnb-int8", "qint4")


def pair(kind: str, scheme: str, *, library: bool = False) -> tuple[Any, Any, Tensor, Tensor]:
    """A quantized layer, the same with its decoded weight, and two inputs."""
    make, shape = KINDS[kind]
    torch.manual_seed(0)
    floats = make().requires_grad_(False)
    spec, backend = backends.parse(scheme), backends.of_scheme(scheme)
    packed = backend.encode(floats.weight, spec)
    layer = quantized_layer(floats, packed)
    return backend.to_library(floats, packed, spec) if library else layer, float_layer(layer), *torch.randn(2, *shape)


def by_dual(layer: Any, x: Tensor, v: Tensor) -> Tensor:
    with forward_ad.dual_level():
        tangent: Tensor | None = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, v))).tangent
    assert tangent is not None
    return tangent


WAYS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "jvp": lambda layer, x, v: jvp(layer, (x,), (v,))[1],
    "dual": by_dual,
    "vmap": lambda layer, x, v: vmap(layer)(torch.stack([x, v])),
    "grad": lambda layer, x, v: grad(lambda z: layer(z).square().sum())(x),
    "grad of jvp": lambda layer, x, v: grad(lambda z: jvp(layer, (z.sin(),), (v * z,))[1].square().sum())(x),
}


def same(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= 1e-5 * other.norm()) and bool(other.norm() > 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_layers(kind: str, scheme: str, way: str) -> None:
    layer, floats, x, v = pair(kind, scheme)
    assert same(WAYS[way](layer, x, v), WAYS[way](floats, x, v))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scheme", ["nf4", "fp4"])
def test_bitsandbytes_own_fourbit_layers(scheme: str, way: str) -> None:
    layer, floats, x, v = pair("linear", scheme, library=True)
    assert same(WAYS[way](layer, x, v), WAYS[way](floats, x, v))


def test_tables() -> None:
    torch.manual_seed(0)
    floats = nn.Embedding(32, 64).requires_grad_(False)
    layer = quantized_layer(floats, backends.get("nncf").encode(floats.weight, backends.parse("int8")))
    rows = torch.arange(8).view(2, 4)
    assert torch.equal(vmap(layer)(rows), layer(rows))


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_compiled_jvp(scheme: str) -> None:
    torch._dynamo.reset()
    layer, floats, x, v = pair("linear", scheme)
    fast: Any = torch.compile(lambda x, v: jvp(layer, (x,), (v,))[1], backend="aot_eager")
    assert same(fast(x, v), F.linear(v, floats.weight))
    torch._dynamo.reset()
    alone: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(alone(x), layer(x))


def test_quantized_activations_are_refused() -> None:
    spec = backends.parse("rules,weight_qtype=int8,act_qtype=int8")
    floats = nn.Linear(64, 48).requires_grad_(False)
    layer = quantized_layer(floats, backends.of_scheme("rules").encode(floats.weight, spec), path="proj")
    x = torch.randn(5, 64)
    with pytest.raises(IncompatibleError, match=r"^Cannot transform 'proj' in rules"):
        jvp(layer, (x,), (x,))


@pytest.mark.parametrize("mode", MOVING)
def test_offloaded(mode: str, tmp_path: Path) -> None:
    net, x = Net().requires_grad_(False), torch.ones(1, 64)
    wanted, many = jvp(net, (x,), (x,))[1], vmap(net)(torch.stack([x, 2 * x]))
    handle: offload.OffloadHandle = offloaded(mode, Pipe(net=net), tmp_path, 4 * REST)
    for way in ("jvp", "grad"):
        with pytest.raises(
            IncompatibleError, match=r"^Cannot take derivatives of the Net with torch\.func and offload="
        ):
            WAYS[way](net, x, x)
    assert torch.allclose(vmap(net)(torch.stack([x, 2 * x])), many)
    assert torch.allclose(by_dual(net, x, x), wanted, rtol=1e-5, atol=1e-6)
    handle.remove()
    assert torch.equal(jvp(net, (x,), (x,))[1], wanted)
