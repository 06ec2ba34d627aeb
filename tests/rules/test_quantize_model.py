"""quantize_model and quantize_params: templates, subsets, files, float weights, on the shipped models."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sdquant
from sdquant.demo import path
from sdquant.errors import BadFileError, ConflictError, IncompatibleError, SettingsError
from sdquant.nn import QuantizedLayer
from sdquant.rules import (
    HowToQuantize,
    PtqProvider,
    QtProvider,
    QuantizationRule,
    assign,
    collecting,
    load_params,
    missing_params,
    quant_stats,
    quantize_model,
    quantize_params,
    require_complete,
)

RULES = (
    QuantizationRule(module_path=r".*(attn|attentions).*", weight_qtype="int4", tile_size=32, act_qtype="int8"),
    QuantizationRule(op_names=("linear",), weight_qtype="nf4", tile_size=1.0),
    QuantizationRule(weight_qtype="int8", act_qtype="int8"),
)
WHERE = {"digits-sd": ("unet", "UNet2DConditionModel"), "digits-flux": ("transformer", "FluxTransformer2DModel")}
FILE = "diffusion_pytorch_model.safetensors"


class Case:
    """A shipped model: as floats, quantized in memory, as a template, and an input."""

    def __init__(self, name: str) -> None:
        import diffusers

        part, kind = WHERE[name]
        self.file = path(name) / part / FILE
        self.model = getattr(diffusers, kind).from_pretrained(path(name) / part, torch_dtype=torch.bfloat16)
        with torch.device("meta"):
            empty = getattr(diffusers, kind).from_config(self.model.config).to(torch.bfloat16)
        self.quantized = quantize_model(self.model, PtqProvider(RULES))
        self.template = quantize_model(empty, PtqProvider(RULES))
        draw = torch.Generator().manual_seed(3)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).bfloat16()

        config = self.model.config
        if part == "unet":
            self.values: dict[str, Any] = {
                "sample": noise(2, 4, 8, 8), "timestep": 7,
                "encoder_hidden_states": noise(2, 16, config.cross_attention_dim),
            }  # fmt: skip
        else:
            self.values = {
                "hidden_states": noise(2, 16, 16), "encoder_hidden_states": noise(2, 16, config.joint_attention_dim),
                "pooled_projections": noise(2, config.pooled_projection_dim), "timestep": torch.tensor([0.5, 0.5]),
                "guidance": torch.ones(2), "txt_ids": torch.zeros(16, 3), "img_ids": torch.zeros(16, 3),
            }  # fmt: skip

    def run(self, model: nn.Module) -> Tensor:
        with torch.no_grad():
            out: Tensor = model(**self.values, return_dict=False)[0]
        return out


@pytest.fixture(scope="module", params=WHERE)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    yield Case(request.param)


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and one[name].contiguous().view(-1).view(torch.uint8).equal(other[name].contiguous().view(-1).view(torch.uint8))
        for name in one
        if one[name].numel()
    )


def test_the_model_is_not_changed_and_the_copy_is_quantized_by_the_rules(case: Case) -> None:
    floats = [m for m in case.model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert floats and not any(isinstance(m, QuantizedLayer) for m in floats)
    layers = {p: m for p, m in case.quantized.named_modules() if isinstance(m, QuantizedLayer)}
    assert len(layers) == len(floats)
    types = {p: m.spec.details["weight_qtype"] for p, m in layers.items()}
    assert all((kind == "int4") == ("attn" in p or "attentions" in p) for p, kind in types.items())
    error = (case.run(case.quantized) - case.run(case.model)).float().norm() / case.run(case.model).float().norm()
    assert 0 < error < 0.3


def test_a_template_allocates_nothing_and_knows_how(case: Case) -> None:
    assert all(p.is_meta for p in case.template.parameters())
    codes = [p for n, p in case.template.named_parameters() if n.endswith("packed_qvalue")]
    assert codes and all(isinstance(p.how, HowToQuantize) for p in codes)
    attention = [m for p, m in case.template.named_modules() if p.endswith("to_q")]
    assert attention[0].packed_qvalue.how.tiled_axes == {1: 32}


def test_whole_subsets_files_and_memory_give_the_same_bits(case: Case) -> None:
    floats = case.model.state_dict()
    whole = quantize_params(floats, case.template)
    pieces: dict[str, Tensor] = {}
    names = sorted(floats)
    for start in range(0, len(names), 7):
        pieces |= quantize_params({name: floats[name] for name in names[start : start + 7]}, case.template)
    assert _same(whole, pieces)
    wanted = case.run(case.quantized)
    for fill in (
        lambda t: t.load_state_dict(whole, assign=True),
        lambda t: t.load_state_dict(floats, assign=True),  # float weights into a quantized model
        lambda t: t.load_state_dict(floats),
        lambda t: assign(t, pieces),
        lambda t: load_params(t, [case.file]),
    ):
        model = copy.deepcopy(case.template)
        fill(model)
        require_complete(model)
        assert torch.equal(case.run(model), wanted)
        assert _same(model.state_dict(), case.quantized.state_dict())


def test_float_weights_go_into_a_model_that_has_others(case: Case) -> None:
    model = copy.deepcopy(case.quantized)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not torch.equal(case.run(model), case.run(case.quantized))
    model.load_state_dict(case.model.state_dict())
    assert torch.equal(case.run(model), case.run(case.quantized))


def test_what_is_missing_is_named(case: Case) -> None:
    floats = case.model.state_dict()
    name = next(name for name in floats if name.endswith("to_q.weight"))
    part = quantize_params({key: value for key, value in floats.items() if key != name}, case.template)
    assert missing_params(case.template, part) == [name]
    model = copy.deepcopy(case.template)
    with pytest.raises(RuntimeError, match=name.removesuffix("weight") + "packed_qvalue"):
        model.load_state_dict(part, assign=True)
    assign(model, part)
    with pytest.raises(SettingsError, match=name):
        require_complete(model)


def test_errors_are_qwixs_kinds_and_name_the_parameter(case: Case) -> None:
    with pytest.raises(TypeError, match="not a tensor"):
        quantize_params({"proj_out.weight": [1.0]}, case.template)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"'zzz\.kernel'.*not found"):
        quantize_params({"zzz.kernel": torch.ones(2)}, case.template)
    assert quantize_params({"zzz.kernel": torch.ones(2)}, case.template, allow_extra_params=True) == {}
    name = next(name for name, p in case.model.named_parameters() if p.ndim == 2)
    with pytest.raises(TypeError, match=r"\[3\]"):
        quantize_params({name: torch.ones(3)}, case.template)
    # As in Qwix, a weight of the same size in another shape is that weight.
    flat = case.model.get_parameter(name).data.flatten()
    assert _same(
        quantize_params({name: flat}, case.template), quantize_params({name: flat.reshape(-1, 1)}, case.template)
    )


def test_a_quantized_model_is_not_quantized_again_and_useless_rules_are_told(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConflictError, match="already quantized"):
        quantize_model(case.quantized, PtqProvider(RULES))
    with pytest.raises(IncompatibleError, match="none of them"):
        quantize_model(case.model, PtqProvider([QuantizationRule(module_path="nowhere", weight_qtype="int8")]))
    provider = PtqProvider([*RULES, QuantizationRule(module_path="nowhere", weight_qtype="int8")])
    with caplog.at_level(logging.WARNING, "sdquant"):
        quantize_model(case.model, provider)
    unused = {row.module_path for row in provider.get_unused_rules()} - {".*"}  # Flux has no convolution
    assert unused == {"nowhere"}
    assert "nowhere" in caplog.text


def test_a_rule_that_cannot_hold_a_layer_names_it(case: Case) -> None:
    with pytest.raises(SettingsError, match="10000"):
        quantize_model(case.model, PtqProvider([QuantizationRule(weight_qtype="int8", tile_size=10000)]))
    broken = copy.deepcopy(case.model)
    path_of = next(p for p, m in broken.named_modules() if isinstance(m, nn.Linear))
    with torch.no_grad():
        broken.get_submodule(path_of).weight[0, 0] = float("nan")
    with pytest.raises(BadFileError, match=path_of.replace(".", r"\.")):
        quantize_model(broken, PtqProvider(RULES))


def test_gradients_pass_through_to_what_is_before(case: Case) -> None:
    """As to a LoRA on a quantized base: those of the product with the float weight."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 32), nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 3, 3, padding=1))
    quantized = quantize_model(layer, PtqProvider([QuantizationRule(weight_qtype="int8", act_qtype="int8")]))
    x = torch.randn(5, 64, requires_grad=True)
    (mine,) = torch.autograd.grad(quantized(x).sum(), x)
    with torch.no_grad():
        for index in (0, 2):
            layer[index].weight.copy_(quantized[index].dequantize())
    (wanted,) = torch.autograd.grad(layer(x).sum(), x)
    assert torch.allclose(mine, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", WHERE)
def test_load_model_draws_what_the_flow_draws_and_saves_it(name: str, tmp_path: Any) -> None:
    part = WHERE[name][0]
    pipe = sdquant.load_model(path(name), rules=RULES, components=part, progress=False)
    case = Case(name)
    assert torch.equal(case.run(getattr(pipe, part)), case.run(case.quantized))
    sdquant.save(pipe, tmp_path / "saved")
    again = sdquant.load_model(tmp_path / "saved", progress=False)
    assert sdquant.detect(tmp_path / "saved" / part).quant == "rules"
    assert _same(getattr(again, part).state_dict(), getattr(pipe, part).state_dict())
    assert torch.equal(case.run(getattr(again, part)), case.run(case.quantized))
    post = sdquant.quantize(
        sdquant.load_model(path(name), progress=False), rules=RULES, components=part, progress=False
    )
    assert torch.equal(case.run(getattr(post, part)), case.run(case.quantized))


def test_a_plan_says_which_rules_match_nothing_and_what_stays(tmp_path: Any) -> None:
    rules = [
        {"module_path": "down_blocks.*", "weight_qtype": "int8"},
        {"module_path": "mid_block.*"},
        {"module_path": "nowhere", "weight_qtype": "int8"},
    ]
    plan = sdquant.plan(path("digits-sd"), rules=rules, components="unet")
    (unet,) = [row for row in plan.components if row.name == "unet"]
    assert unet.weights and all(row.name.startswith("down_blocks.") for row in unet.weights)
    assert any("leaves it" in why for name, why in unet.kept.items() if name.startswith("mid_block."))
    assert any("no rule" in why for name, why in unet.kept.items() if name.startswith("up_blocks."))
    assert [line for line in plan.warnings if "nowhere" in line]
    with pytest.raises(SettingsError, match="quant='rules'"):
        sdquant.plan(path("digits-sd"), "nf4", rules=rules)


STATIC = QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)


def test_from_calibration_to_static_ranges(case: Case) -> None:
    """Collected in a QtProvider's model; then by `quantize_params`, by the provider, and from the model itself."""
    training = quantize_model(case.model, QtProvider([STATIC]))
    with torch.no_grad(), collecting(training):
        case.run(training)
    statistics = quant_stats(training)
    first = training.get_submodule(next(p for p, m in case.template.named_modules() if isinstance(m, QuantizedLayer)))
    assert first.weight.data_ptr() != case.model.get_submodule(first.path).weight.data_ptr()

    static = quantize_model(case.model, PtqProvider([STATIC], quant_stats=statistics))
    wanted = case.run(static)
    assert torch.equal(case.run(training), wanted)  # the ranges of one batch are its own: so far as dynamic
    assert torch.equal(case.run(quantize_model(training, PtqProvider([STATIC]))), wanted)

    template = quantize_model(_empty(case), PtqProvider([STATIC]))
    assign(template, quantize_params(case.model.state_dict(), template))
    assert all(name.endswith("_lhs") for name in missing_params(template)) and missing_params(template)
    with pytest.raises(SettingsError, match="_lhs"):
        require_complete(template)
    assign(template, quantize_params({}, template, statistics))
    require_complete(template)
    assert torch.equal(case.run(template), wanted)


def test_a_layer_that_saw_no_data_is_named(case: Case) -> None:
    training = quantize_model(case.model, QtProvider([STATIC]))
    with pytest.raises(SettingsError, match="not initialized for"):
        quantize_model(training, PtqProvider([STATIC]))
    template = quantize_model(case.model, QtProvider([STATIC]))
    with pytest.raises(ValueError, match="not initialized for"):
        quantize_params({}, quantize_model(_empty(case), PtqProvider([STATIC])), quant_stats(template))
    with pytest.raises(ValueError, match="no static range"):
        quantize_params({}, case.template, quant_stats(template))


def _empty(case: Case) -> nn.Module:
    with torch.device("meta"):
        made: nn.Module = type(case.model).from_config(case.model.config).to(torch.bfloat16)
    return made


@pytest.mark.parametrize(
    "rule",
    [QuantizationRule(weight_qtype="int4", tile_size=32), QuantizationRule(weight_qtype="int8", act_qtype="int8")],
)
def test_functional_call_takes_float_weights(rule: QuantizationRule) -> None:
    """As `ptq_model.apply(fp_variables, x)`: quantized as the layers are, and the model is as it was afterwards."""
    torch.manual_seed(3)
    one, other = (nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)) for _ in range(2))
    model, wanted = (quantize_model(net, PtqProvider([rule])) for net in (one, other))
    x = torch.randn(4, 32)
    before, names = model(x), list(model.state_dict())
    for _ in range(2):
        assert torch.equal(torch.func.functional_call(model, other.state_dict(), (x,)), wanted(x))
        assert torch.equal(model(x), before) and list(model.state_dict()) == names
    with pytest.raises(IncompatibleError, match="the tensor requires a gradient"):
        torch.func.functional_call(model, dict(other.named_parameters()), (x,))
    with pytest.raises(SettingsError, match=r"it has shape \[64, 32\]"):
        torch.func.functional_call(model, {"0.weight": torch.zeros(8, 32)}, (x,))
    assert torch.equal(model(x), before)
    model[0].weight, model[0].bias = other[0].weight.detach(), other[0].bias  # which the forward used to pass by
    assert torch.equal(model[0](x), wanted[0](x))
    with torch.device("meta"):
        empty = quantize_model(nn.Linear(32, 64), PtqProvider([rule]))
    with pytest.raises(IncompatibleError, match="has no values now"):
        empty.weight = torch.zeros(64, 32)
    nf4 = sdquant.quantize(one, "nf4", runtime="plain", progress=False)
    with pytest.raises(IncompatibleError, match="the scheme cannot quantize floats like this layer"):
        torch.func.functional_call(nf4, other.state_dict(), (x,))
