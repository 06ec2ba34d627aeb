"""Static ranges of products of activations: found over batches, kept in the model, through every way that it goes."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sdquant
from sdquant.errors import SettingsError
from sdquant.models.generate import draw
from sdquant.models.pipelines import main_part
from sdquant.rules import (
    PtqProvider,
    QtProvider,
    QuantizationRule,
    assign,
    collecting,
    load_quant_stats,
    merge_quant_stats,
    missing_params,
    quant_stats,
    quantize_model,
    quantize_params,
    require_complete,
)
from sdquant.rules.core.attention import attention
from sdquant.rules.interception import unmark
from sdquant.rules.providers.product import Site, product
from sdquant.rules.statistics_file import write_statistics
from sdquant.training import digits
from sdquant.training.calibration import Calibration, calibrate

from .test_attention import Outer, decibels
from .test_products import COLUMNS, LEAD, ROWS, SIZE, numbers, tensor

STATIC: dict[str, Any] = {"op_names": ("sdpa",), "act_qtype": "int8", "act_static_scale": True}


def rule(path: str = "first|second", **more: Any) -> QuantizationRule:
    return QuantizationRule(module_path=path, **{**STATIC, **more})


def batches(count: int = 5) -> list[Tensor]:
    """Of different lengths, and of very different sizes."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 7 + n % 3, 16, generator=generator) * 10.0 ** (n % 3 - 1) for n in range(count)]


def collected(given: QuantizationRule, of: list[Tensor], way: str = "sdpa", **keywords: bool) -> Any:
    model = quantize_model(Outer(way), QtProvider([given]))
    with torch.no_grad(), collecting(model, **keywords):
        for batch in of:
            model(batch)
    return model


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def codes(x: np.ndarray[Any, Any], bound: np.float32) -> tuple[np.ndarray[Any, Any], np.float32]:
    """int8 codes of x and their scale, for the range from -bound to bound."""
    scale = np.float32(bound / np.float32(127.5))
    return np.clip(np.rint(x / scale), -128, 127).astype(np.int64), scale


def test_a_product_as_numpy_computes_it() -> None:
    """One scale for each operand, and numbers outside of it saturate."""
    a, b, _ = numbers("float32")
    bounds = {"einsum0_lhs": np.float32(0.7 * np.abs(a).max()), "einsum0_rhs": np.float32(0.6 * np.abs(b).max())}
    model = nn.Module()
    made = quantize_model(Calls(), PtqProvider([rule("", op_names=("einsum",))], statistics(bounds)))
    (left, one), (right, other) = codes(a, bounds["einsum0_lhs"]), codes(b, bounds["einsum0_rhs"])
    assert (np.abs(left) == 128).any() and model is not made
    wanted = (left @ right).astype(np.float32) * other * one  # einsum scales by the right operand first
    assert np.array_equal(made(tensor(a, "float32"), tensor(b, "float32")).numpy(), wanted)
    assert list(made.state_dict()) == ["einsum0_lhs_scale", "einsum0_rhs_scale"]
    assert made.einsum0_lhs_scale.item() == one


class Calls(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("...ij,...jk->...ik", a, b)


def statistics(bounds: dict[str, np.float32], prefix: str = "") -> dict[str, Tensor]:
    """Of four batches whose ranges have this mean."""
    made = {}
    for name, bound in bounds.items():
        made[f"{prefix}{name}.count"] = torch.tensor(4, dtype=torch.int32)
        made[f"{prefix}{name}.sum_of_absmax"] = torch.tensor([[[4 * bound]]])
    return made


def test_attention_as_numpy_computes_it() -> None:
    """Also where rows are taken some at a time, and where gradients are wanted."""
    random = np.random.default_rng(5)
    q, k, v = (random.normal(size=(2, 4, 12, 16)).astype(np.float32) for _ in range(3))
    bounds = dict(
        zip((f"einsum{n}_{side}" for n in (0, 1) for side in ("lhs", "rhs")), (2.5, 2.0, 0.5, 3.0), strict=True)
    )
    given = rule("attn")

    def known(name: str) -> Any:
        from sdquant.rules.core.static_range import StaticRange

        return StaticRange(torch.tensor([np.float32(bounds[name]) / np.float32(127.5)]), None)

    def multiplied(a: Any, b: Any, name: str) -> Any:
        (left, one), (right, other) = (
            codes(a, np.float32(bounds[f"{name}_lhs"])),
            codes(b, np.float32(bounds[f"{name}_rhs"])),
        )
        return (left @ right).astype(np.float32) * other * one

    scores = multiplied(q, k.swapaxes(-1, -2), "einsum0") * np.float32(0.25)
    odds = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = multiplied(odds / odds.sum(-1, keepdims=True), v, "einsum1")
    both = tuple(Site(rule=given, name=f"einsum{n}", known=known) for n in (0, 1))
    inputs = [torch.from_numpy(x) for x in (q, k, v)]
    done = attention(*inputs, rule=both)
    # An exponential that is rounded otherwise moves a code now and then.
    assert decibels(wanted, done.numpy()) > 60
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sdquant.rules.core.attention.CPU_BLOCK", 5 * 8 * 12)
        assert torch.equal(attention(*inputs, rule=both), done)
    trained = attention(*(x.requires_grad_() for x in inputs), rule=both)
    assert torch.equal(trained, done)
    trained.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in inputs)


@pytest.mark.parametrize("way", ["sdpa", "matmul", "bmm", "einsum"])
def test_names_shapes_and_means(way: str) -> None:
    counted = {"sdpa": "einsum", "einsum": "einsum"}.get(way, "dot_general")
    of = batches()
    model = collected(rule(op_names=(way,)), of, way)
    stats = quant_stats(model)
    assert sorted(stats) == sorted(
        f"{path}.{counted}{n}_{side}.{what}"
        for path in ("first", "second")
        for n in (0, 1)
        for side in ("lhs", "rhs")
        for what in ("count", "sum_of_absmax")
    )
    assert all(value.numel() == 1 for value in stats.values())
    assert {int(value) for name, value in stats.items() if name.endswith("count")} == {len(of)}
    # What goes into the first product of the first module is that of the float model.
    floats = Outer(way).first
    for side, layer, axis in (("lhs", floats.to_q, -1), ("rhs", floats.to_k, -1)):
        means = [np.abs(layer(x).detach().numpy()).max(axis).astype(np.float64).mean().astype(np.float32) for x in of]
        found = stats[f"first.{counted}0_{side}.sum_of_absmax"].item()
        assert found == pytest.approx(float(np.sum(means, dtype=np.float64)), rel=1e-6)


class Matrices(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


@pytest.mark.parametrize(
    ("more", "left", "right"),
    [
        ({"tile_size": 128}, (1, 1, 1, SIZE // 128), (1, SIZE // 128, 1)),
        ({"act_batch_axes": (0,)}, (1, LEAD[1], ROWS, 1), (1, 1, COLUMNS)),
    ],
)
def test_tiles_and_axes_that_are_kept(more: dict[str, Any], left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = (tensor(x, "float32") for x in numbers("float32")[:2])
    given = [rule("", op_names=("matmul",), **more)]
    made = quantize_model(Matrices(), QtProvider(given))
    with collecting(made):
        made(a, b)
    found = quant_stats(made)
    assert [tuple(found[f"dot_general0_{side}.sum_of_absmax"].shape) for side in ("lhs", "rhs")] == [left, right]
    run = quantize_model(made, PtqProvider(given))
    assert torch.equal(run(a, b), made(a, b))
    with pytest.raises(SettingsError, match=r"dot_general0_[lr]hs.*Calibrate again"):
        run(a[..., :128], b[:, :128, :2])
    with pytest.raises(SettingsError, match=r"dot_general0_[lr]hs.*(tile_size|act_batch_axes)"), collecting(made):
        made(a[..., :128], b[:, :128, :2])


@pytest.mark.parametrize("method", ["absmax", "rms,3", "fixed,-2,2"])
def test_what_collected_computes_as_what_is_made_of_it(method: str) -> None:
    """And no sequence length is kept."""
    given, x = [rule(act_calibration_method=method)], batches(3)[1]
    model = collected(given[0], [x])
    run, again = (quantize_model(*both) for both in (
        (model, PtqProvider(given)), (Outer(), PtqProvider(given, quant_stats(model))),
    ))  # fmt: skip
    with torch.no_grad():
        assert torch.equal(run(x), model(x)) and torch.equal(again(x), run(x))
        assert run(torch.ones(3, 31, 16)).shape == (3, 31, 16)
    assert quant_stats(run) == {}


def test_one_batch_of_one_row_is_what_dynamic_ranges_give() -> None:
    """One range for a tensor: that which the batch has."""
    random = torch.Generator().manual_seed(3)
    a, b = torch.randn(1, 64, generator=random), torch.randn(64, 1, generator=random)
    given = rule("", op_names=("matmul",))
    made = quantize_model(Matrices(), QtProvider([given]))
    with collecting(made):
        made(a, b)
    dynamic = QuantizationRule(op_names=("matmul",), act_qtype="int8")
    assert torch.equal(quantize_model(made, PtqProvider([given]))(a, b), product(a, b, dynamic))


def test_zero_points_in_small_tiles() -> None:
    more = {"op_names": ("matmul",), "act_calibration_method": "minmax"}
    for tile in (None, 128):
        with pytest.raises(SettingsError, match="both operands a zero point"):
            quantize_model(Matrices(), QtProvider([rule("", tile_size=tile, **more)]))
    given = [rule("", tile_size=3, **more)]
    a, b = torch.rand(2, 5, 9) - 0.2, torch.rand(9, 4) + 1
    made = quantize_model(Matrices(), QtProvider(given))
    with collecting(made):
        made(a, b)
    run = quantize_model(made, PtqProvider(given))
    names = [f"dot_general0_{side}_{what}" for side in ("lhs", "rhs") for what in ("scale", "zero_point")]
    assert list(run.state_dict()) == names
    assert torch.equal(run(a, b), made(a, b)) and 15 < decibels((a @ b).numpy(), run(a, b).numpy()) < 60


def test_parts_of_several_processes_add_up_to_the_same_bits() -> None:
    of = batches(6)
    alone = quant_stats(collected(rule(), of, own_ranges=True), exact=True)
    parts = [quant_stats(collected(rule(), of[n::2], own_ranges=True), exact=True) for n in (0, 1)]
    assert same(merge_quant_stats(parts), alone) and same(merge_quant_stats(parts[::-1]), alone)
    again = quantize_model(Outer(), QtProvider([rule()]))
    load_quant_stats(again, parts[0])
    with torch.no_grad(), collecting(again, own_ranges=True):
        for batch in of[1::2]:
            again(batch)
    assert same(quant_stats(again, exact=True), alone)
    with pytest.raises(SettingsError, match="no such layer"):
        load_quant_stats(again, {"first.to_q.einsum0_lhs.count": torch.tensor(1)})


def test_copies_and_checkpointing_count_a_batch_once() -> None:
    model = collected(rule(), batches(2))
    twin = copy.deepcopy(model)
    with collecting(twin):
        checkpoint(twin, batches(1)[0], use_reentrant=False).sum().backward()
    assert int(quant_stats(twin)["first.einsum0_lhs.count"]) == 3
    assert int(quant_stats(model)["first.einsum0_lhs.count"]) == 2


def test_ranges_go_where_the_model_goes() -> None:
    x = batches(2)[1]
    given = rule()
    run = quantize_model(collected(given, batches()), PtqProvider([given]))
    with torch.no_grad():
        done = run(x)
        assert torch.equal(copy.deepcopy(run)(x), done)
        assert torch.equal(pickle.loads(pickle.dumps(run))(x), done)
        before = {name: value.clone() for name, value in run.state_dict().items() if name.endswith("_scale")}
        half = copy.deepcopy(run).to(torch.bfloat16)
        assert half.first.to_q.weight.dtype == torch.bfloat16
        assert len(before) == 8 and all(torch.equal(half.state_dict()[name], value) for name, value in before.items())
        assert half.first(x.bfloat16()).isfinite().all()
        other = quantize_model(Outer(), PtqProvider([given]))
        with pytest.raises(SettingsError, match=r"first.einsum0_rhs .*in 'first'\): "):
            other(x)
        other.load_state_dict(run.state_dict())
        assert torch.equal(other(x), done)
        unmark(other)
        assert list(other.state_dict()) == list(Outer().state_dict()) and torch.equal(other(x), Outer()(x))


def test_a_template_is_filled_with_ranges() -> None:
    x, given = batches(2)[1], rule()
    stats = quant_stats(collected(given, batches()))
    floats = Outer()
    with torch.device("meta"):
        empty = Outer()
    template = quantize_model(empty, PtqProvider([given]))
    assign(template, quantize_params(floats.state_dict(), template))
    assert missing_params(template) == ["first.einsum0_lhs"]
    with pytest.raises(SettingsError, match=r"first\.einsum0_lhs"):
        require_complete(template)
    made = quantize_params({}, template, stats)
    assert missing_params(template, made) == []
    for put in (lambda: template.load_state_dict(made, strict=False, assign=True), lambda: assign(template, made)):
        put()
        require_complete(template)
        with torch.no_grad():
            wanted = quantize_model(floats, PtqProvider([given], stats))(x)
            assert torch.equal(template(x), wanted)
    stats["second.einsum1_rhs.count"] *= 0
    with pytest.raises(SettingsError, match=r"second.einsum1_rhs.*not initialized|not initialized.*second.einsum1_rhs"):
        quantize_params({}, template, stats)
    with pytest.raises(SettingsError, match=r"third\.einsum0_lhs"):
        quantize_params({}, template, {"third.einsum0_lhs.count": torch.tensor(1)})


def test_two_rules_for_one_name_are_refused() -> None:
    both = [rule(op_names=("sdpa",), tile_size=3), rule(op_names=("einsum",))]
    model = Outer()
    # A rule for "einsum" means attention, too, so that this is two rules only because sdpa comes first.
    with pytest.raises(SettingsError, match="two act_static_scale rules"):
        quantize_model(model, QtProvider(both))
    with pytest.raises(SettingsError, match="act_static_scale"):
        product(torch.ones(2, 2), torch.ones(2, 2), rule())


PATTERNS = {"digits-sd": r".*\.attn[12]|.*self_attn", "digits-flux": r".*\.attn|.*self_attn"}


def task(name: str, **more: Any) -> Calibration:
    rules = (rule(PATTERNS[name]), QuantizationRule(weight_qtype="int8", op_names=("linear",)))
    part = {"digits-sd": "unet", "digits-flux": "transformer"}[name]
    given: dict[str, Any] = {"model": name, "rules": rules, "components": (part, "text_encoder"), "steps": 1}
    return Calibration(prompts=(digits.prompt(3),), **{**given, **more})


def pixels(pipe: Any) -> Any:
    return np.stack([np.asarray(one) for one in draw(pipe, [digits.prompt(3)], seeds=(0,), steps=1)])


def ranges_in(model: nn.Module) -> dict[str, Tensor]:
    return {key: value for key, value in model.state_dict().items() if "einsum" in key}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("digits-sd", {}),
        ("digits-flux", {}),
        # Eight tiles, of fewer than 128: then both sides can have a zero point.
        ("digits-flux", {"act_calibration_method": "minmax", "tile_size": 0.125, "module_path": r".*\.attn"}),
    ],
    ids=["digits-sd", "digits-flux", "zero points"],
)
def test_from_prompts_to_a_saved_model(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    asked, place = task(name), sdquant.demo.path(name)
    asked = replace(asked, rules=(replace(asked.rules[0], **more), *asked.rules[1:]))
    if more:
        asked = replace(asked, components=("transformer",))
    stats = calibrate(sdquant.load_model(place, progress=False), asked)
    assert stats and all("attn" in key and ".einsum" in key for key in stats)
    file = tmp_path / "ranges.safetensors"
    write_statistics(file, stats, {})
    given: dict[str, Any] = {"rules": list(asked.rules), "components": asked.components, "progress": False}
    with pytest.raises(SettingsError, match="quant_stats is not set"):
        sdquant.load_model(place, **given)
    pipe = sdquant.load_model(place, **given, quant_stats=file)
    drawn = pixels(pipe)
    sdquant.save(pipe, tmp_path / "saved")
    again = sdquant.load_model(tmp_path / "saved", progress=False)
    assert np.array_equal(pixels(again), drawn)
    count = 0
    for part in asked.components:
        ours, other = getattr(pipe, part), getattr(again, part)
        kept = ranges_in(ours)
        count += len(kept)
        assert same(other.state_dict(), ours.state_dict()) and {
            x.dtype for key, x in kept.items() if key.endswith("_scale")
        } <= {torch.float32}
        (held,) = (tmp_path / "saved" / part).glob("*.safetensors")
        assert {key for key in load_file(held) if "einsum" in key} == set(kept)
        plainly = type(ours).from_pretrained(tmp_path / "saved" / part, dtype=torch.bfloat16)
        assert same(ranges_in(plainly), kept)
    assert count == len(stats) // (2 if not more else 3) * (2 if more else 1)
    if name == "digits-flux" and not more:
        half = sdquant.load_model(tmp_path / "saved", dtype="float16", progress=False)
        assert same(ranges_in(main_part(half)), ranges_in(main_part(pipe)))
        for offload in ("sequential", "group"):
            away = sdquant.load_model(tmp_path / "saved", offload=offload, progress=False)
            assert np.array_equal(pixels(away), drawn)


@pytest.mark.filterwarnings("ignore:The rule for:sdquant.rules.interception.UnusedRuleWarning")  # the error says more
def test_rules_that_nothing_is_found_for() -> None:
    """In calibration, and before any weight is read."""
    bare = rule(".*resnets.*")
    with pytest.raises(SettingsError, match=r"resnets.*saw no product.*unet\.down_blocks"):
        calibrate(
            sdquant.load_model(sdquant.demo.path("digits-sd"), progress=False),
            task("digits-sd", rules=(bare,)),
        )


def test_ranges_of_another_rule(tmp_path: Path) -> None:
    file = tmp_path / "ranges.safetensors"
    found = {"einsum0_lhs": np.float32(1), "einsum0_rhs": np.float32(1)}
    write_statistics(file, statistics(found, "unet.mid_block.attentions.0."), {})
    given: dict[str, Any] = {"quant_stats": file, "progress": False}
    path = sdquant.demo.path("digits-sd")
    with pytest.raises(SettingsError, match="quant_stats has none of their ranges"):
        sdquant.load_model(path, rules=[rule(r".*\.attn1")], **given)
    pipe = sdquant.load_model(path, progress=False)
    with pytest.raises(SettingsError, match="quant_stats has none of their ranges"):
        sdquant.quantize(pipe, rules=[rule(r".*\.attn1")], **given)
    other = rule(r".*\.attentions\.0", act_calibration_method="minmax", tile_size=16)
    with pytest.raises(SettingsError, match="Calibrate again"):
        sdquant.load_model(path, rules=[other], components="unet", **given)
