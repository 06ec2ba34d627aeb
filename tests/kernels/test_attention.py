"""Attention by own kernels, against exact numbers; and where it is asked."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor
from torch.nn import functional as F

import sdquant
from sdquant import demo
from sdquant.kernels import cpu, sdpa
from sdquant.models.generate import draw
from sdquant.models.pipelines import main_part
from sdquant.nn import sdpa_hook as asking

# batch, heads, queries, keys, width: whole blocks and what is left over, of each.
SIZES = (
    (1, 2, 64, 64, 64), (2, 3, 33, 77, 40), (1, 2, 1, 1, 8), (1, 1, 31, 300, 160), (2, 1, 100, 513, 72),
    (1, 2, 5, 255, 128), (1, 1, 32, 258, 256), (1, 3, 17, 2, 20),
)  # fmt: skip


@pytest.fixture
def own() -> None:
    if cpu.isa() not in ("amx", "avx512bf16"):
        pytest.skip("there is no kernel for this processor")


def random(*shape: int) -> Tensor:
    """[batch, heads, n, width], in memory as projections leave it."""
    batch, heads, n, width = shape
    return torch.randn(batch, n, heads, width).bfloat16().transpose(1, 2)


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double())


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("spread", [1, 30])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_errors_are_those_of_torch(size: tuple[int, ...], spread: int) -> None:
    """`spread`: of scores. Where they are far apart the largest so far changes from block to block."""
    torch.manual_seed(0)
    batch, heads, queries, keys, width = size
    q, k, v = random(batch, heads, queries, width), random(batch, heads, keys, width), random(batch, heads, keys, width)
    q = q * spread
    got = sdpa.attended(q, k, v)
    assert got is not None
    assert got.shape == q.shape
    wanted = exact(q, k, v)
    by_torch = F.scaled_dot_product_attention(q, k, v)
    own, theirs = ((y.double() - wanted).square().mean().sqrt() for y in (got, by_torch))
    assert own <= 1.2 * theirs + 2**-12


@pytest.mark.usefixtures("own")
def test_tensors_in_any_order_of_memory_and_any_number_of_threads() -> None:
    torch.manual_seed(0)
    q, k, v = (random(2, 4, 130, 64) for _ in range(3))
    wanted = sdpa.attended(q, k, v)
    assert wanted is not None
    contiguous = sdpa.attended(q.contiguous(), k.contiguous(), v.contiguous())
    wide = torch.cat([k, v], -1)
    together = sdpa.attended(q, wide[..., :64], wide[..., 64:])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if before > 1 else 2)
        other = sdpa.attended(q, k, v)
    finally:
        torch.set_num_threads(before)
    for found in (contiguous, together, other):
        assert found is not None
        assert torch.equal(found, wanted)
    one = sdpa.attended(q[:1].expand(2, 4, 130, 64), k, v)
    assert one is not None
    assert torch.equal(one[0], wanted[0])


@pytest.mark.usefixtures("own")
def test_scores_that_are_no_numbers_are_not_hidden() -> None:
    q, k, v = (random(1, 1, 40, 32) for _ in range(3))
    k[0, 0, 35, 3] = torch.nan
    found = sdpa.attended(q, k, v)
    assert found is not None
    assert bool(found.isnan().all())
    k[0, 0, 35, 3] = 0
    v[0, 0, 7, 5] = torch.nan
    found = sdpa.attended(q, k, v)
    assert found is not None
    assert found.isnan().any(2).nonzero().tolist() == [[0, 0, 5]]


@pytest.mark.usefixtures("own")
def test_what_is_left_to_torch() -> None:
    q, k, v = (random(1, 2, 40, 32) for _ in range(3))
    assert sdpa.attended(q, k, v) is not None
    assert sdpa.attended(q, k, v, torch.zeros(40, 40)) is None
    assert sdpa.attended(q, k, v, dropout_p=0.1) is None
    assert sdpa.attended(q, k, v, is_causal=True) is None
    assert sdpa.attended(q, k, v, scale=-0.1) is None
    assert sdpa.attended(q, k[:, :1], v[:, :1], enable_gqa=True) is None
    assert sdpa.attended(q, k[:, :1], v[:, :1]) is None
    assert sdpa.attended(q.float(), k.float(), v.float()) is None
    assert sdpa.attended(q, k, v[..., :16]) is None
    assert sdpa.attended(q[:, :, :0], k, v) is None
    assert sdpa.attended(*(x.mT.contiguous().mT for x in (q, k, v))) is None
    assert sdpa.attended(*(x[0] for x in (q, k, v))) is None
    assert sdpa.attended(q.requires_grad_(), k, v) is None
    with torch.no_grad():
        assert sdpa.attended(q, k, v) is not None
        with torch.autocast("cpu", torch.bfloat16):
            assert sdpa.attended(q, k, v) is None


@pytest.mark.usefixtures("own")
def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    right = sdpa.attend
    monkeypatch.setattr(sdpa, "attend", lambda q, k, v, scale: right(q, k, v, 0.9 * scale))
    sdpa._sound.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert sdpa.attended(*(random(1, 2, 40, 32) for _ in range(3))) is None
    finally:
        sdpa._sound.cache_clear()
    assert "is not used" in caplog.text


class Counted:
    """Stands for the faster attention: torch's own, with a count."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, func: Any) -> Any:
        return self.run if func is F.scaled_dot_product_attention else None

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return F.scaled_dot_product_attention(*args, **kwargs)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    found = Counted()
    monkeypatch.setattr(asking.sdpa, "replacement", found)
    monkeypatch.setattr(asking, "LEAST", 0)
    yield found
    assert torch._C._len_torch_function_stack() == 0


def module() -> Any:
    torch.manual_seed(0)
    return Attention(query_dim=32, heads=2, dim_head=16).eval()


def test_a_module_asks_and_so_do_its_copies(counted: Counted) -> None:
    net = torch.nn.Sequential(module())
    x = torch.randn(1, 9, 32)
    wanted = net(x)
    asking.ask(net, True)
    asking.ask(net, True)
    for one in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        before = counted.calls
        assert torch.equal(one(x), wanted)
        assert counted.calls == before + 1
        assert one[0].__dict__["forward"].module is one[0]
    asking.ask(net, False)
    assert "forward" not in net[0].__dict__
    assert torch.equal(net(x), wanted)
    assert counted.calls == 3


def test_small_inputs_and_compiled_graphs_have_torchs(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = module(), torch.randn(1, 9, 32)
    wanted = net(x)
    asking.ask(net, True)
    torch.compiler.reset()
    assert torch.allclose(torch.compile(net, backend="aot_eager", fullgraph=True)(x), wanted, atol=1e-6)
    monkeypatch.setattr(asking, "LEAST", x.numel() + 1)
    assert torch.equal(net(x), wanted)
    assert torch.equal(net(hidden_states=x), wanted)
    assert counted.calls == 0


def test_ctrl_c_in_a_forward_leaves_nothing_behind(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any, **kwargs: Any) -> Tensor:
        raise KeyboardInterrupt

    net = module()
    asking.ask(net, True)
    monkeypatch.setattr(counted, "run", stop)
    with pytest.raises(KeyboardInterrupt):
        net(torch.randn(1, 9, 32))
    assert torch._C._len_torch_function_stack() == 0


def test_a_forward_that_a_class_gets_later_is_used(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    net = module()
    asking.ask(net, True)
    monkeypatch.setattr(Attention, "forward", lambda self, x: F.scaled_dot_product_attention(x, x, x) + 1)
    x = torch.randn(1, 9, 32)
    assert torch.equal(net(x), F.scaled_dot_product_attention(x, x, x) + 1)
    assert counted.calls == 1


def test_a_forward_that_is_somebody_elses_is_left_alone() -> None:
    net = module()
    theirs = net.__dict__["forward"] = lambda x: x
    asking.ask(net, True)
    asking.ask(net, False)
    assert net.__dict__["forward"] is theirs


@pytest.mark.parametrize("name", demo.MODELS)
def test_models_that_compute_in_int8_ask(name: str, counted: Counted) -> None:
    pipe = sdquant.load_model(demo.path(name), quant="int8_sym", compute="int8", device="cpu", progress=False)
    draw(pipe, ["a three"], seeds=[0], steps=1)
    assert counted.calls > 0
    before = counted.calls
    pipe = sdquant.load_model(demo.path(name), quant="int8_sym", device="cpu", progress=False)
    draw(pipe, ["a three"], seeds=[0], steps=1)
    assert counted.calls == before
    assert not any(isinstance(m.__dict__.get("forward"), asking._Forward) for m in main_part(pipe).modules())


@pytest.mark.usefixtures("own")
def test_a_model_draws_the_same_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped UNet, whose inputs are small: as if they were large."""
    pipe = sdquant.load_model(
        demo.path("digits-sd"),
        quant="int8_sym",
        compute="int8",
        device="cpu",
        dtype="bfloat16",
        progress=False,
    )
    wanted = draw(pipe, ["a three"], seeds=[0], steps=4)
    monkeypatch.setattr(asking, "LEAST", 0)
    calls = []
    monkeypatch.setattr(sdpa, "attend", lambda *args, run=sdpa.attend: calls.append(args) or run(*args))
    found = draw(pipe, ["a three"], seeds=[0], steps=4)
    assert calls
    import numpy as np

    off = np.abs(np.asarray(found[0], dtype=float) - np.asarray(wanted[0], dtype=float))
    assert off.mean() < 4  # of 255
