"""Attention with quantized products: the arithmetic, the modules it reaches, and what it does to pictures."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sdquant
from sdquant.errors import SettingsError
from sdquant.models.components import quiet
from sdquant.models.generate import draw
from sdquant.rules.core import attention as attentions
from sdquant.rules.core.attention import attention
from sdquant.rules.interception import Marked, UnusedRuleWarning, mark, unmark, unused
from sdquant.rules.providers.product import product
from sdquant.rules.qconfig import QtRule, QuantizationRule, Rules
from sdquant.training import digits

from . import reference
from .test_products import quantized, scaled, tensor, wanted

Array = reference.Array
INT8 = QuantizationRule(op_names=("sdpa",), act_qtype="int8")
SHAPE = (2, 4, 12, 16)


def inputs(dtype: str = "float32") -> list[Array]:
    random = np.random.default_rng(5)
    return [reference.ROUNDINGS[dtype](random.normal(size=SHAPE).astype(np.float32)) for _ in range(3)]


def decibels(exact: Array, other: Array) -> float:
    """Signal over noise."""
    noise = ((exact - other).astype(np.float64) ** 2).sum()
    return float(10 * np.log10((exact.astype(np.float64) ** 2).sum() / noise)) if noise else float("inf")


def in_numpy(q: Array, k: Array, v: Array, bias: Array, qtype: str, dtype: str, scale: float) -> Array:
    def multiplied(left: Array, right: Array) -> Array:
        # Of the transposed ones: an einsum is scaled by its right operand first.
        a, b = right.swapaxes(-1, -2), left.swapaxes(-1, -2)
        return product_of(a, b).swapaxes(-1, -2)

    def product_of(a: Array, b: Array) -> Array:
        if qtype.startswith("int"):
            return wanted(a, b, qtype, a.shape[-1], dtype)
        left, right = (quantized(x, qtype, x.shape[-1], dtype) for x in (a, b.swapaxes(-1, -2)))
        return scaled(left[0] @ right[0].swapaxes(-1, -2), left[1][..., 0], right[1][..., 0], dtype)

    scores = multiplied(q, k.swapaxes(-1, -2)) * np.float32(scale) + bias
    odds = np.exp(scores - scores.max(-1, keepdims=True))
    return multiplied(reference.ROUNDINGS[dtype](odds / odds.sum(-1, keepdims=True)), v)


def masks() -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    kept = torch.rand(2, 1, 12, 12, generator=generator) > 0.4
    kept[..., 0] = True
    return {
        "none": {},
        "boolean": {"attn_mask": kept},
        "one row": {"attn_mask": kept[:, :, :1]},
        "float": {"attn_mask": torch.randn(12, 12, generator=generator)},
        "causal": {"is_causal": True},
        "scale": {"scale": 0.7},
    }


@pytest.mark.parametrize("mask", list(masks()))
@pytest.mark.parametrize(("qtype", "least"), [("int8", 35), ("int4", 10), ("float8_e4m3fn", 25)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_as_numpy_computes_it(dtype: str, qtype: str, least: float, mask: str) -> None:
    arrays, more = inputs(dtype), masks()[mask]
    q, k, v = (tensor(x, dtype) for x in arrays)
    given = more.get("attn_mask", torch.ones(12, 12, dtype=torch.bool).tril() if mask == "causal" else torch.zeros(1))
    bias = torch.zeros(given.shape).masked_fill(~given, -1e30) if given.dtype == torch.bool else given
    done = attention(q, k, v, rule=QuantizationRule(op_names=("sdpa",), act_qtype=qtype), **more)
    exact = in_numpy(*arrays, bias.numpy(), qtype, dtype, more.get("scale", 0.25))
    # An exponential that is rounded otherwise moves a code now and then.
    assert done.dtype == q.dtype and decibels(exact, done.float().numpy()) > least + 30
    whole = F.scaled_dot_product_attention(*(torch.from_numpy(x) for x in arrays), **more).numpy()
    assert least < decibels(whole, done.float().numpy()) < least + 15


def test_rows_in_blocks_are_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (tensor(x, "float32") for x in inputs())
    for more in masks().values():
        whole = attention(q, k, v, rule=INT8, **more)
        with monkeypatch.context() as patch:
            patch.setattr(attentions, "CPU_BLOCK", 5 * 8 * 12)
            assert torch.equal(attention(q, k, v, rule=INT8, **more), whole)


def test_heads_that_share_keys() -> None:
    q, k, v = (tensor(x, "float32") for x in inputs())
    k, v = k[:, :2], v[:, :2]
    wide = [x.repeat_interleave(2, 1) for x in (k, v)]
    assert torch.equal(attention(q, k, v, enable_gqa=True, rule=INT8), attention(q, *wide, rule=INT8))


def test_a_row_without_keys_is_zero_and_dropout_drops() -> None:
    q, k, v = (tensor(x, "float32") for x in inputs())
    kept = torch.ones(12, 12, dtype=torch.bool)
    kept[3] = False
    done = attention(q, k, v, attn_mask=kept, rule=INT8)
    assert torch.equal(done[:, :, 3], torch.zeros(2, 4, 16)) and done.isfinite().all()
    assert torch.equal(attention(q, k, v, dropout_p=1.0, rule=INT8), torch.zeros(SHAPE))
    with pytest.raises(SettingsError, match="mask and is_causal"):
        attention(q, k, v, attn_mask=kept, is_causal=True, rule=INT8)


@pytest.mark.parametrize("rule", [INT8, QtRule(op_names=("sdpa",), act_qtype="int8", bwd_qtype="int8")])
def test_gradients_are_near_the_float_ones(rule: QuantizationRule) -> None:
    ours, floats = ([tensor(x, "float32", True) for x in inputs()] for _ in range(2))
    done = attention(*ours, rule=rule)
    with torch.no_grad():
        assert torch.equal(done, attention(*ours, rule=rule))
    for out in (done, F.scaled_dot_product_attention(*floats)):
        out.square().sum().backward()
    for one, other in zip(ours, floats, strict=True):
        assert one.grad is not None and other.grad is not None
        assert decibels(other.grad.numpy(), one.grad.numpy()) > 25


class Inner(nn.Module):
    """Attention with projections; `way` is how it multiplies."""

    def __init__(self, way: str = "sdpa") -> None:
        super().__init__()
        self.way = way
        self.to_q, self.to_k = nn.Linear(16, 16), nn.Linear(16, 16)
        self.mix = nn.Parameter(torch.eye(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.to_q(x), self.to_k(x), x @ self.mix
        if self.way == "sdpa":
            return F.scaled_dot_product_attention(query=q, key=k, value=v)
        if self.way == "einsum":
            odds = (torch.einsum("bqd,bkd->bqk", q, k) / 4).softmax(-1)
            return torch.einsum("bqk,bkd->bqd", odds, v)
        if self.way == "bmm":
            odds = torch.baddbmm(torch.empty(2, 9, 9), q, k.mT, beta=0, alpha=0.25).softmax(-1)
            return torch.bmm(odds, v)
        if self.way == "fails":
            raise KeyboardInterrupt
        return ((q @ k.mT) / 4).softmax(-1) @ v


class Weighty(nn.Module):
    """A layer that multiplies by a weight it unpacks, as quantized layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.eye(16, dtype=torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.codes.float()


class Outer(nn.Module):
    def __init__(self, way: str = "sdpa") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Inner(way), Inner(way)
        self.first.to_out = Weighty()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first.to_out(self.first(x))) + x


X = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(3))


def rules(path: str, *names: str, **more: Any) -> Rules:
    return Rules([QuantizationRule(module_path=path, op_names=names, act_qtype="int8", **more)])


@pytest.mark.parametrize(
    ("way", "name"),
    [("sdpa", "sdpa"), ("sdpa", "einsum"), ("einsum", "einsum"), ("bmm", "bmm"), ("bmm", "matmul"), ("matmul", "bmm")],
)
def test_products_in_modules_that_a_rule_names(way: str, name: str) -> None:
    model = Outer(way)
    exact = model(X)
    assert mark(model, rules("second", name)) == 1
    done = model(X)
    assert not unused(model) and not torch.equal(done, exact)
    assert 30 < decibels(*((one - X).detach().numpy() for one in (exact, done))) < 60
    assert torch.equal(model.first(X), Outer(way).first(X))  # the other one
    rule = next(iter(model.second._sdquant_mark.rules.values()))
    assert model.second._sdquant_mark.report.done[rule] == (1 if way == "sdpa" else 2)
    unmark(model)
    assert torch.equal(model(X), exact) and type(model) is Outer and type(model.second) is Inner


def test_what_replaces_them_is_the_same_arithmetic() -> None:
    model, rule = Outer("matmul").second, QuantizationRule(op_names=("matmul",), act_qtype="int8")
    q, k, v = model.to_q(X), model.to_k(X), X @ model.mix
    wanted = product((product(q, k.mT, rule) / 4).softmax(-1), v, rule)
    mark(model, Rules([rule]))
    assert torch.equal(model(X), wanted)


def test_rules_that_are_for_weights_leave_products_alone() -> None:
    for names in ((), ("dot_general",), ("linear",)):
        model = Outer()
        assert mark(model, rules(".*", *names)) == 0
        assert all(type(one).__mro__[1] is not Marked and not one._forward_pre_hooks for one in model.modules())
    assert mark(Outer(), Rules([QuantizationRule(op_names=("sdpa",), weight_qtype="int8")])) == 0
    both = Rules([QuantizationRule(module_path="first"), *rules(".*", "sdpa").rules])
    model = Outer()
    mark(model, both)
    assert torch.equal(model.first(X), Outer().first(X)) and not torch.equal(model.second(X), Outer().second(X))
    assert [row.module_path for row in both.unused()] == ["first"]


def test_a_name_of_torchs_means_only_that() -> None:
    """A rule for products must not take linear layers away from the rules after it."""
    assert not QuantizationRule(op_names=("matmul",)).matches("any", "linear")
    assert not QuantizationRule(op_names=("conv2d",)).matches("any", "conv3d")
    assert QuantizationRule(op_names=("bmm",)).matches("any", "matmul")


def test_only_the_module_that_calls_counts() -> None:
    """A rule is looked up for the innermost module, and weights are no activations."""
    model = Outer("matmul")
    assert mark(model, rules("first|", "matmul")) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X)
    assert sum(model._sdquant_products.done.values()) == 2  # not second, not first.to_out, not x @ mix
    assert torch.equal(model.second(X), Outer("matmul").second(X))


def test_rules_that_quantized_nothing_are_named() -> None:
    model = Outer("einsum")
    row = Rules([*rules("first", "sdpa").rules, *rules("third", "sdpa").rules, *rules("second", "einsum").rules])
    mark(model, row)
    with pytest.warns(UnusedRuleWarning) as seen:
        model(X)
    texts = [str(one.message) for one in seen]
    assert len(texts) == 2 and "'first'" in texts[0] and "none of the 1 modules" in texts[0]
    assert "'third'" in texts[1] and "no module path matches it" in texts[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X)  # said once
    assert [one.rule.module_path for one in unused(model)] == ["first", "third"]
    assert [one.module_path for one in row.unused()] == ["first", "third"]


def test_copies_pickles_and_state_dicts() -> None:
    model = Outer()
    names = list(model.state_dict())
    mark(model, rules("first|second", "sdpa"))
    done = model(X)
    assert list(model.state_dict()) == names and repr(model) == repr(Outer())
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (twin, pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert torch.equal(other(X), done) and isinstance(other.first, Inner)
        other.first._sdquant_mark.rules.clear()
        assert torch.equal(model(X), done)
        unmark(other)
        assert type(other) is Outer and torch.equal(other(X), Outer()(X))
    assert mark(model, rules("first", "sdpa")) == 1  # anew
    assert torch.equal(model.second(X), Outer().second(X))


def test_nothing_stays_behind() -> None:
    """Not after Ctrl-C, not in another thread, not outside."""
    model = Outer("fails")
    mark(model, rules("second|first.*", "matmul"))
    model.first.way = "matmul"
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model(X)
    exact = X @ X.mT
    model.second.way = "matmul"
    other: list[torch.Tensor] = []

    class Watching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=lambda: other.append(x @ x.mT))
            thread.start()
            thread.join()
            return x @ x.mT

    watching = Watching()
    mark(watching, rules("", "matmul"))
    assert not torch.equal(watching(X), exact)
    assert torch.equal(other[0], exact) and torch.equal(X @ X.mT, exact)


def test_a_tile_that_does_not_fit_names_the_module() -> None:
    model = Outer()
    mark(model, rules("second", "sdpa", tile_size=5))
    with pytest.raises(SettingsError, match=r"tiles of 5 .*scaled_dot_product_attention in 'second'"):
        model(X)


def test_rules_that_cannot_be_followed_are_refused_at_once() -> None:
    model = Outer()
    with pytest.raises(SettingsError, match="second"):
        mark(model, rules("second", "sdpa", act_calibration_method="minmax"))
    assert type(model.second) is Inner


def test_training_with_checkpoints_and_autocast() -> None:
    grads = []
    for through in (lambda module, x: module(x), lambda module, x: checkpoint(module, x, use_reentrant=False)):
        model = Outer("matmul")
        mark(model, rules(".*", "matmul"))
        through(model, X).square().sum().backward()
        grads.append(model.first.to_q.weight.grad)
    assert grads[0] is not None and torch.equal(*grads) and grads[0].abs().sum() > 0
    half, exact = Outer(), Outer()
    mark(half, rules("first|second", "sdpa"))
    with torch.autocast("cpu", torch.bfloat16):
        assert half.first(X).dtype == torch.bfloat16
        assert decibels(exact(X).detach().numpy(), half(X).detach().numpy()) > 30


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_models_compute_the_same(backend: str) -> None:
    """Marked modules stay out of the graphs, also those that were compiled by themselves."""
    for way in ("sdpa", "matmul"):
        model = Outer(way)
        mark(model, rules("first|second", way))
        with torch.no_grad():
            done = model(X)
            explained = torch._dynamo.explain(model)(X)
            assert explained.graph_break_count == 1  # then there is nothing more to compile
            torch._dynamo.reset()
            compiled = torch.compile(model, backend=backend)
            model.second.compile(backend=backend)
            for _ in range(2):
                assert torch.allclose(compiled(X), done, atol=1e-6)
        torch._dynamo.reset()


def pictures(pipe: Any, steps: int) -> list[Any]:
    return draw(pipe, [digits.prompt(digit) for digit in (3, 7)], seeds=(0, 1), steps=steps)


@pytest.fixture
def pipe(request: pytest.FixtureRequest) -> Iterator[Any]:
    with quiet():
        yield sdquant.load_model(sdquant.demo.path(request.param), progress=False)


def outputs(pipe: Any, modules: list[nn.Module]) -> list[Array]:
    """What modules give in one step."""
    found: list[Array] = []
    handles = [
        module.register_forward_hook(lambda _, __, made: found.append(make(made))) for module in modules
    ]  # fmt: skip
    pictures(pipe, 1)
    for handle in handles:
        handle.remove()
    return found


def make(made: Any) -> Array:
    x: Array = (made[0] if isinstance(made, tuple) else made).float().numpy()
    return x


@pytest.mark.parametrize(
    ("pipe", "path", "steps"),
    [("digits-sd", r".*\.attn[12]", 10), ("digits-flux", ".*/attn", 4)],
    indirect=["pipe"],
    ids=["digits-sd", "digits-flux"],
)
def test_pictures(pipe: Any, path: str, steps: int, tmp_path: Path) -> None:
    model = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    exact = pictures(pipe, steps)
    assert mark(model, rules(path, "sdpa")) > 1
    made = pictures(pipe, steps)
    assert digits.judge().read(made) == digits.judge().read(exact) == [3, 7]
    assert not unused(model) and model.config["_class_name"] == type(model).__name__
    noise = decibels(*(np.stack([np.asarray(one, np.float32) for one in both]) for both in (exact, made)))
    assert 15 < noise < 50
    sdquant.save(model, tmp_path / "model")
    again = type(model).from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(one, again[name].to(one.dtype)) for name, one in model.state_dict().items())
    unmark(model)
    assert all(np.array_equal(*both) for both in zip(pictures(pipe, steps), exact, strict=True))


@pytest.mark.parametrize("pipe", ["digits-sd", "digits-flux"], indirect=True)
def test_one_module_of_many(pipe: Any) -> None:
    """What runs before the module that a rule names is as it was, to the bit; the module itself is off by a little."""
    model = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    paths = [path for path, module in model.named_modules() if type(module).__name__ in ("Attention", "FluxAttention")]
    modules = [model.get_submodule(path) for path in paths[:2]]
    exact = outputs(pipe, modules)
    mark(model, rules(paths[1], "sdpa"))
    made = outputs(pipe, modules)
    assert np.array_equal(exact[0], made[0]) and 25 < decibels(exact[1], made[1]) < 60


@pytest.mark.parametrize("name", ["digits-sd", "digits-flux"])
def test_load_model_and_quantize_follow_rules_for_products(name: str) -> None:
    """Products alone, without a quantized weight, and beside weights."""
    import sdquant
    from sdquant.demo import path
    from sdquant.models.pipelines import main_part
    from sdquant.rules.interception import Marked

    product = {"op_names": ["sdpa"], "act_qtype": "int8"}
    weights = {"op_names": ["linear"], "weight_qtype": "int8"}
    part = {"digits-sd": "unet", "digits-flux": "transformer"}[name]
    for rules in ([product], [product, weights]):
        loaded = sdquant.load_model(path(name), rules=rules, components=part, progress=False)
        later = sdquant.quantize(
            sdquant.load_model(path(name), progress=False), rules=rules, components=part, progress=False
        )
        for pipe in (loaded, later):
            assert any(isinstance(module, Marked) for module in main_part(pipe).modules())
            assert not any(isinstance(module, Marked) for module in pipe.text_encoder.modules())
    plain = sdquant.load_model(path(name), rules=[weights], progress=False)
    assert not any(isinstance(module, Marked) for module in main_part(plain).modules())
