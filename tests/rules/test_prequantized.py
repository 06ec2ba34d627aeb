"""Weights that another tool quantized: files of codes and scales, their rules, and their tensors in a template."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import sdquant
from sdquant import backends
from sdquant.core.backend import TensorInfo
from sdquant.demo import path
from sdquant.errors import BadFileError, ConflictError, SettingsError, UnsupportedFileError
from sdquant.nn import QuantizedLayer
from sdquant.rules import (
    PtqProvider,
    QtRule,
    QuantizationRule,
    assign,
    process_prequantized_params,
    quantize_model,
    quantize_params,
    require_complete,
    restore_quantization_rules,
)
from sdquant.rules.core.qarray import quantize
from sdquant.rules.packed_layout import weight_how
from sdquant.rules.qconfig import Rules
from sdquant.rules.quant_spec import operation_of

BACKEND = backends.get("rules")
UNET = path("digits-sd") / "unet"
FILE = "diffusion_pytorch_model.safetensors"
RULES = (
    QuantizationRule(module_path=r".*attentions.*", op_names=("linear",), weight_qtype="int8", tile_size=32),
    QuantizationRule(module_path=r"down_blocks.*", weight_qtype="float8_e4m3fn"),
    QtRule(module_path=r"mid_block.*", weight_qtype="int16", disable_channelwise_axes=True),
    QuantizationRule(module_path=r"up_blocks.*", weight_qtype="int8", weight_calibration_method="minmax"),
)


def _draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).mul(0.05).to(dtype)


def _parts(weight: Tensor, rule: QuantizationRule) -> dict[str, Tensor]:
    """A weight quantized by a rule, taken apart."""
    array = quantize(weight, weight_how(rule, tuple(weight.shape)))
    parts = {"qvalue": array.qvalue, "scale": array.scale}
    return parts if array.zero_point is None else {**parts, "zero_point": array.zero_point}


def _infos(tensors: dict[str, Tensor]) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(dtype=str(t.dtype)[6:], shape=tuple(t.shape), nbytes=t.nbytes) for name, t in tensors.items()
    }


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = tensor.double().numpy()
    return found


INFERRED = [
    QuantizationRule(weight_qtype="int8"),
    QuantizationRule(weight_qtype="int8", tile_size=16),
    QuantizationRule(weight_qtype="int8", weight_calibration_method="minmax", tile_size=32),
    QuantizationRule(weight_qtype="int16"),
    QuantizationRule(weight_qtype="float8_e4m3fn"),
    QuantizationRule(weight_qtype="float8_e5m2", tile_size=8),
    QtRule(weight_qtype="int8", disable_channelwise_axes=True),
    QtRule(weight_qtype="int8", disable_channelwise_axes=True, tile_size=32, weight_calibration_method="minmax"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(12, 64), (4, 64, 3, 3)], ids=["linear", "conv"])
@pytest.mark.parametrize(
    "rule", INFERRED, ids=lambda r: f"{r.weight_qtype}-{r.tile_size}-{r.weight_calibration_method}"
)
def test_a_rule_is_inferred_and_the_weight_is_what_codes_and_scales_say(
    rule: QuantizationRule, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    parts = _parts(_draw(*shape, dtype=dtype), rule)
    parts["scale"] = parts["scale"].to(dtype)  # another tool has no reason to keep them in float32
    tensors = {f"a.weight.{part}": tensor for part, tensor in parts.items()}
    (found,) = BACKEND.find(_infos(tensors), {})
    packed = BACKEND.read(found, shape, tensors.__getitem__)
    spec: Any = BACKEND.spec_of(packed.spec)
    assert found.name == "a.weight" and spec.rule == rule and packed.spec.dtype == str(dtype)[6:]
    tile = shape[1] // parts["scale"].shape[1]
    scale = np.repeat(_numpy(parts["scale"]), tile, 1)
    zero = np.repeat(_numpy(parts["zero_point"]), tile, 1) if "zero_point" in parts else 0.0
    wanted = torch.from_numpy((_numpy(parts["qvalue"]) - zero) * scale)
    if rule.weight_qtype == "int16" and dtype == torch.bfloat16:  # the code itself is rounded first, as in Qwix
        wanted = torch.from_numpy(_numpy(parts["qvalue"].bfloat16()) * scale)
    # One rounding of an exact product, but for float32, whose product of 24-bit numbers was rounded there as well.
    assert torch.equal(BACKEND.decode(packed, dtype), wanted.to(dtype))
    assert found.nbytes in (None, packed.nbytes) and (found.nbytes is None) == (dtype != torch.float16)


@pytest.mark.parametrize("join", [".", "_", ".array."])
def test_spellings(join: str) -> None:
    tensors = {
        f"a.weight{join}{part}": tensor
        for part, tensor in _parts(_draw(4, 8), QuantizationRule(weight_qtype="int8")).items()
    }
    (found,) = BACKEND.find(_infos(tensors), {})
    assert found.name == "a.weight" and set(found.keys.values()) == set(tensors)


def _damaged(**changes: Tensor | None) -> dict[str, Tensor]:
    parts = _parts(_draw(4, 8), QuantizationRule(weight_qtype="int8", tile_size=4)) | changes
    return {f"a.weight.{part}": tensor for part, tensor in parts.items() if tensor is not None}


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        (_damaged(scale=None), BadFileError, "no scale"),
        (_damaged(scale=torch.ones(4, 3)), BadFileError, r"\[4, 3\].*\[4, 8\]"),
        (_damaged(scale=torch.ones(4)), BadFileError, r"\[4\]"),
        (_damaged(scale=torch.ones(2, 2)), UnsupportedFileError, "for each output or for all"),
        (_damaged(scale=torch.ones(4, 2).double()), UnsupportedFileError, "float64"),
        (_damaged(zero_point=torch.zeros(4, 1, dtype=torch.int8)), BadFileError, "zero point"),
        (_damaged(zero_point=torch.zeros(4, 2, dtype=torch.int32)), BadFileError, "int32"),
        (_damaged(qvalue=torch.zeros(4, 8, dtype=torch.uint8)), UnsupportedFileError, "nf4, mxfp4, nvfp4"),
        (_damaged(qvalue=torch.zeros(4, 8)), UnsupportedFileError, "float32"),
        (_damaged(qvalue=torch.zeros(8, dtype=torch.int8)), UnsupportedFileError, "outputs and inputs"),
        (_damaged(qvalue=torch.zeros(0, 8, dtype=torch.int8)), BadFileError, r"\[0, 8\]"),
        (
            _damaged(qvalue=torch.zeros(4, 8).to(torch.float8_e5m2), zero_point=torch.zeros(4, 2)),
            BadFileError,
            "float8_e5m2 has none",
        ),
        (_damaged() | {"a.weight": torch.ones(4, 8)}, BadFileError, "twice"),
        (_damaged() | {"a.dot_general0_lhs_scale": torch.ones(1)}, UnsupportedFileError, "range of activations"),
        ({k.replace("weight", "kernel"): t for k, t in _damaged().items()}, UnsupportedFileError, "Flax"),
    ],
)
def test_what_does_not_fit_or_cannot_be_told_is_refused(
    tensors: dict[str, Tensor], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        BACKEND.find(_infos(tensors), {})
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(error, match=r"model\.safetensors"):
        sdquant.detect(tmp_path / "model.safetensors")


def test_another_size_than_the_models_and_leftovers_are_refused(tmp_path: Path) -> None:
    tensors = _damaged()
    (found,) = BACKEND.find(_infos(tensors), {})
    with pytest.raises(BadFileError, match=r"\[4, 8\].*\[8, 4\]"):
        BACKEND.read(found, (8, 4), tensors.__getitem__)
    save_file(_damaged() | {"b.weight.zero_point": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(BadFileError, match=r"b\.weight\.zero_point"):
        sdquant.verify(tmp_path / "model.safetensors")


class Unet:
    """The shipped UNet: as floats, quantized, and written as another tool would."""

    def __init__(self, folder: Path) -> None:
        from diffusers import UNet2DConditionModel

        self.folder = folder
        self.floats = UNet2DConditionModel.from_pretrained(UNET, torch_dtype=torch.bfloat16)
        self.rules = Rules(RULES)
        self.tensors: dict[str, Tensor] = {}
        self.layers: dict[str, QuantizationRule | None] = {}
        for name, tensor in self.floats.state_dict().items():
            stem, shape = name.removesuffix(".weight"), tuple(tensor.shape)
            if name.endswith(".weight") and len(shape) > 1:
                self.layers[stem] = self.rules.of(stem, operation_of(shape))
            rule = self.layers.get(stem) if name.endswith(".weight") else None
            if rule is None:
                self.tensors[name] = tensor
            else:
                self.tensors |= {f"{name}.{part}": one.contiguous() for part, one in _parts(tensor, rule).items()}
        folder.mkdir()
        shutil.copy(UNET / "config.json", folder)
        save_file(self.tensors, folder / FILE)
        self.quantized = quantize_model(self.floats, PtqProvider(self.rules))
        with torch.device("meta"):
            self.empty = UNet2DConditionModel.from_config(self.floats.config).to(torch.bfloat16)

    def run(self, model: nn.Module) -> Tensor:
        draw = torch.Generator().manual_seed(1)
        sample = torch.randn(2, 4, 8, 8, generator=draw).bfloat16()
        text = torch.randn(2, 16, self.floats.config.cross_attention_dim, generator=draw).bfloat16()
        with torch.no_grad():
            out: Tensor = model(sample, 7, text, return_dict=False)[0]
        return out


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> Unet:
    return Unet(tmp_path_factory.mktemp("foreign") / "unet")


def _codes(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if "packed_" in name}


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype
        and tensor.shape == other[name].shape
        and torch.equal(tensor.contiguous().view(torch.uint8), other[name].contiguous().view(torch.uint8))
        for name, tensor in one.items()
        if tensor.numel()
    )


def test_a_folder_of_another_tool_is_found_loaded_saved_and_verified(unet: Unet, tmp_path: Path) -> None:
    seen = sdquant.detect(unet.folder)
    assert seen.quant == seen.backend == "rules" and seen.prequantized and not seen.warnings
    assert any("codes in *.qvalue" in line for line in seen.evidence)
    weights = sum(row.weights for row in seen.histogram)
    assert weights == sum(tensor.numel() for tensor in unet.floats.state_dict().values())
    sdquant.verify(unet.folder)
    model = sdquant.load_model(unet.folder, progress=False)
    assert _same(_codes(model), _codes(unet.quantized)) and _codes(model)
    assert torch.equal(unet.run(model), unet.run(unet.quantized))
    assert not torch.equal(unet.run(model), unet.run(unet.floats))
    sdquant.save(model, tmp_path / "saved")
    sdquant.verify(tmp_path / "saved")
    again = sdquant.load_model(tmp_path / "saved", progress=False)
    assert _same(again.state_dict(), model.state_dict()) and torch.equal(unet.run(again), unet.run(model))
    alone = tmp_path / "unet-int8.safetensors"
    shutil.copy(unet.folder / FILE, alone)
    assert not sdquant.detect(alone).warnings  # the name is as good as true
    pipe = sdquant.load_model(alone, base=path("digits-sd"), progress=False)
    assert _same(_codes(pipe.unet), _codes(model))


def test_rules_for_it_are_those_it_has_or_refused(unet: Unet) -> None:
    assert sdquant.plan(unet.folder, rules=RULES).components[0].action == "found"
    for rules in ([QuantizationRule(weight_qtype="int4")], RULES[:2]):
        with pytest.raises(ConflictError, match="by a different one"):
            sdquant.plan(unet.folder, rules=rules)
    with pytest.raises(ConflictError, match="already quantized to rules"):
        sdquant.plan(unet.folder, "nf4")


def test_verify_finds_scales_that_no_encoder_writes(unet: Unet, tmp_path: Path) -> None:
    name = next(name for name in unet.tensors if name.endswith(".scale"))
    for value, words in ((float("nan"), "not finite"), (-1.0, "negative")):
        scale = unet.tensors[name].clone()
        scale.view(-1)[0] = value
        save_file(unet.tensors | {name: scale}, tmp_path / "model.safetensors")
        with pytest.raises(BadFileError, match=words):
            sdquant.verify(tmp_path / "model.safetensors")


def test_restored_rules_quantize_every_layer_as_it_is(unet: Unet) -> None:
    restored = restore_quantization_rules(unet.tensors)
    assert len(restored) < len(unet.layers) / 2  # numbers in paths stand for any
    found = Rules(restored)
    for name, rule in unet.layers.items():
        shape = tuple(unet.floats.get_parameter(f"{name}.weight").shape)
        mine = found.of(name, operation_of(shape))
        if rule is None:
            assert mine is None or mine.weight_qtype is None, name
        else:
            assert mine is not None and isinstance(mine, QtRule) == isinstance(rule, QtRule)
            assert weight_how(mine, shape).method == weight_how(rule, shape).method and mine.act_qtype is None
            assert mine.weight_qtype == rule.weight_qtype
            assert (mine.tile_size or shape[1]) == (rule.tile_size or shape[1]), name
    template = quantize_model(unet.empty, PtqProvider(restored))
    assign(template, process_prequantized_params(unet.tensors, template))
    require_complete(template)
    assert torch.equal(unet.run(template), unet.run(unet.quantized))
    headers = _infos(unet.tensors)
    assert restore_quantization_rules(headers) == restored


class TestRestored:
    """Rules from a few tensors."""

    def tensors(self, *kinds: str | None) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for number, kind in enumerate(kinds):
            name = f"blocks.{number}.to_q.weight"
            rule = QuantizationRule(weight_qtype=kind)
            made |= (
                {name: _draw(4, 8)}
                if kind is None
                else {f"{name}.{part}": one for part, one in _parts(_draw(4, 8), rule).items()}
            )
        return made

    def test_numbers_in_paths_stand_for_any(self) -> None:
        assert restore_quantization_rules(self.tensors("int8", "int8")) == [
            QuantizationRule(module_path=r"blocks\.[^.]+\.to_q", weight_qtype="int8")
        ]

    def test_exceptions_come_first(self) -> None:
        assert restore_quantization_rules(self.tensors("int8", None, "int8", "int16")) == [
            QuantizationRule(module_path=r"blocks\.1\.to_q"),
            QuantizationRule(module_path=r"blocks\.3\.to_q", weight_qtype="int16"),
            QuantizationRule(module_path=r"blocks\.[^.]+\.to_q", weight_qtype="int8"),
        ]

    def test_a_name_that_is_no_number_is_not_caught_by_one(self) -> None:
        one = _parts(_draw(4, 8), QuantizationRule(weight_qtype="int16"))
        given = self.tensors("int8", "int8") | {f"blocks.last.to_q.weight.{part}": t for part, t in one.items()}
        found = Rules(restore_quantization_rules(given))
        kinds = {name: found.of(f"blocks.{name}.to_q", "linear") for name in ("0", "1", "last")}
        assert [rule.weight_qtype for rule in kinds.values() if rule] == ["int8", "int8", "int16"]

    def test_more_fields_and_kinds(self) -> None:
        (rule,) = restore_quantization_rules(self.tensors("int8"), QtRule, act_qtype="int8", bwd_qtype="float8_e5m2")
        assert isinstance(rule, QtRule) and rule.bwd_qtype == "float8_e5m2" and rule.act_qtype == "int8"
        with pytest.raises(SettingsError, match="bwd_qtype"):
            restore_quantization_rules(self.tensors("int8"), bwd_qtype="int8")
        tree = {"a": {"weight": _parts(_draw(4, 8), QuantizationRule(weight_qtype="int8")), "bias": torch.ones(4)}}
        assert restore_quantization_rules(tree) == [QuantizationRule(module_path="a", weight_qtype="int8")]


class Small(nn.Module):
    """A linear layer that a rule is for, and one that it is not."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 8)
        self.b = nn.Linear(8, 8)


def _template(**values: Any) -> nn.Module:
    with torch.device("meta"):
        model = Small()
    made: nn.Module = quantize_model(model, PtqProvider([QuantizationRule(module_path="a", **values)]))
    return made


@pytest.mark.parametrize(
    "values",
    [{"weight_qtype": "int8", "tile_size": 16}, {"weight_qtype": "int4", "weight_calibration_method": "minmax"},
     {"weight_qtype": "int3"}, {"weight_qtype": "nf4", "tile_size": 32}, {"weight_qtype": "float8_e4m3fn"},
     {"weight_qtype": "mxfp8", "tile_size": 32}],
    ids=lambda values: values["weight_qtype"],
)  # fmt: skip
def test_into_a_template_as_if_it_had_been_quantized_there(values: dict[str, Any]) -> None:
    """Types of fewer bits than a byte, too: the template says which it is."""
    floats, template = Small().state_dict(), _template(**values)
    parts = _parts(floats["a.weight"], QuantizationRule(**values))
    given = {**floats, "a.weight": parts}
    assert _same(process_prequantized_params(given, template), quantize_params(floats, template))


def test_where_the_template_is_float_it_is_dequantized() -> None:
    floats, template = Small().state_dict(), _template(weight_qtype="int8")
    rule = QuantizationRule(weight_qtype="int8", weight_calibration_method="minmax", tile_size=2)
    parts = _parts(floats["b.weight"], rule)
    del floats["b.weight"], floats["a.weight"]
    made = process_prequantized_params({**floats, "b.weight": parts}, template)
    step = np.repeat(parts["scale"].numpy(), 2, 1)
    low = np.repeat(parts["zero_point"].float().numpy(), 2, 1)
    assert np.array_equal(made["b.weight"].numpy(), (parts["qvalue"].float().numpy() - low) * step)
    assert set(made) == {*floats, "b.weight"}


def test_scales_are_repeated_where_the_template_has_more() -> None:
    template, codes = _template(weight_qtype="int8", tile_size=16), torch.ones(8, 64, dtype=torch.int8)
    parts = {"qvalue": codes, "scale": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}  # for blocks of 4 outputs, 32 inputs
    made = process_prequantized_params({"a.weight": parts}, template)
    wanted = np.kron(np.array([[1.0, 2.0], [3.0, 4.0]]), np.ones((4, 2)))
    assert np.array_equal(made["a.packed_scale"].numpy(), wanted)


@pytest.mark.parametrize(
    ("values", "changes", "kind", "words"),
    [
        ({"weight_qtype": "int8"}, {"a.weight": torch.ones(8, 64)}, ValueError, "quantized in the template"),
        ({"weight_qtype": "int8"}, {"c.weight": torch.ones(8, 64)}, ValueError, "not found in the template"),
        ({"weight_qtype": "int8"}, {"a.bias": [1.0]}, TypeError, "not a tensor"),
        ({"weight_qtype": "int8"}, {"a.bias": torch.ones(3)}, ValueError, r"\[3\]"),
        ({"weight_qtype": "int4"}, {}, ValueError, "outside of -8 to 7"),
        ({"weight_qtype": "float8_e4m3fn"}, {}, ValueError, "int8, but the template expects float8_e4m3fn"),
        ({"weight_qtype": "mxfp4", "tile_size": 32}, {}, ValueError, "torch does not have"),
        ({"weight_qtype": "int8", "weight_calibration_method": "minmax"}, {}, ValueError, "no zero point"),
        ({"weight_qtype": "int8"}, {"a.weight.zero_point": torch.zeros(8, 1)}, ValueError, "expects none"),
        ({"weight_qtype": "int8"}, {"a.weight.scale": torch.ones(8, 3)}, ValueError, r"\[8, 3\]"),
        ({"weight_qtype": "int8"}, {"a.weight.qvalue": torch.ones(8, 32)}, ValueError, r"\[8, 32\]"),
    ],
)
def test_errors_are_qwixs_kinds_and_name_the_parameter(
    values: dict[str, Any], changes: dict[str, Any], kind: type[Exception], words: str
) -> None:
    parts = _parts(Small().a.weight.detach(), QuantizationRule(weight_qtype="int8"))
    given = {f"a.weight.{part}": tensor for part, tensor in parts.items()}
    if "a.weight" in changes:
        given = {}
    name = next(iter(changes), "a.weight").removesuffix(".zero_point").removesuffix(".scale").removesuffix(".qvalue")
    with pytest.raises(kind, match=words) as caught:
        process_prequantized_params(given | changes, _template(**values))
    assert isinstance(caught.value, SettingsError) and repr(name) in str(caught.value)
    assert process_prequantized_params({"c.weight": torch.ones(1)}, _template(**values), allow_extra_params=True) == {}


def test_the_rule_is_that_of_a_layer_once_it_is_loaded(unet: Unet) -> None:
    model = sdquant.load_model(unet.folder, progress=False)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLayer)}
    for name, module in layers.items():
        rule = unet.layers[name]
        assert rule is not None
        spec: Any = BACKEND.spec_of(module.spec)
        tile = None if rule.tile_size == module.spec.shape[1] else rule.tile_size
        assert spec.rule == dataclasses.replace(rule, module_path=".*", op_names=(), tile_size=tile)
    assert json.loads((unet.folder / "config.json").read_text())["_class_name"] == type(model).__name__
