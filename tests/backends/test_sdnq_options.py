"""Hadamard rotation, SVD and dynamic dtypes as options: what is made is SDNQ's, and SDNQ reads it."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from torch import nn

import sdquant
from sdquant import backends
from sdquant.backends import _sdnq_encode
from sdquant.backends import sdnq as module
from sdquant.backends._sdnq_storage import PARTS, storage_of
from sdquant.cli import main
from sdquant.errors import BadFileError, ConflictError, SettingsError
from sdquant.nn import quantized_layer
from sdquant.nn.layer_factory import set_compute
from sdquant.nn.weights import quantized

from .test_sdnq_storage import compare, convolution, dequantized, linear

if TYPE_CHECKING:
    from sdquant.core import Packed

BACKEND = backends.get("sdnq")
MODELS = {"digits-flux": ("transformer", FluxTransformer2DModel), "digits-sd": ("unet", UNet2DConditionModel)}


@pytest.fixture(scope="module")
def sdnq() -> Any:
    return _sdnq_encode.import_sdnq()


def theirs(sdnq: Any, layer: nn.Module, text: str, seed: int = _sdnq_encode.SEED) -> Any:
    """The layer as SDNQ itself quantizes it, its SVD started with these random numbers."""
    spec = backends.parse(text)
    config = sdnq.SDNQConfig(**{**module._settings(spec), "use_dynamic_quantization": spec["dynamic"]})
    dtype: Any = layer.weight.dtype
    torch.manual_seed(seed)
    return sdnq.sdnq_quantize_layer(layer, config, torch_dtype=dtype, param_name="weight")[0]


def same_parts(packed: Packed, own: Any) -> None:
    made = {name for name in PARTS if getattr(own, name, None) is not None}
    assert packed.parts.keys() == made
    for part, tensor in packed.parts.items():
        assert torch.equal(tensor.view(torch.uint8), getattr(own, part).contiguous().view(torch.uint8)), part


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("option", ["hadamard", "svd,rank=16", "hadamard,svd", "dynamic", "dynamic,hadamard,svd"])
@pytest.mark.parametrize("scheme", ["sdnq-int8", "sdnq-uint4", "sdnq-uint3"])
@pytest.mark.parametrize("make", [linear, convolution])
def test_what_is_made_is_sdnqs(sdnq: Any, make: Any, scheme: str, option: str, dtype: torch.dtype) -> None:
    layer = make(dtype)
    layer.weight.data[:, 7] *= 40  # which SDNQ's dynamic selection finds too much for the dtype
    packed = BACKEND.encode(layer.weight.data, backends.parse(f"{scheme},{option}"))
    own = theirs(sdnq, layer, f"{scheme},{option}")
    same_parts(packed, own)
    way = own.sdnq_dequantizer
    assert storage_of(packed.spec.scheme.name, packed.spec.details).code.sdnq == way.weights_dtype
    assert packed.spec.rotation == (way.hadamard_group_size if way.use_hadamard else 0)
    compare(BACKEND.decode(packed, torch.float32), own)
    if "dynamic" not in option:
        layout = BACKEND.layout(backends.parse(f"{scheme},{option}"), packed.spec.shape, packed.spec.dtype)
        assert {part: (row.dtype, row.shape) for part, row in layout.items()} == {
            part: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for part, tensor in packed.parts.items()
        }
    elif "hadamard" not in option:
        assert packed.spec.scheme.name != scheme


def test_the_random_start_of_the_svd_decides_little(sdnq: Any) -> None:
    """Bit-equal needs SDNQ's random numbers to start alike; with others its error is the same."""
    torch.manual_seed(3)
    layer = nn.Linear(256, 192, bias=False)
    source = layer.weight.detach() + torch.randn(192, 12) @ torch.randn(12, 256) * 0.1
    errors = []
    for seed in range(3):
        layer.weight = nn.Parameter(source.clone(), requires_grad=False)
        found = dequantized(theirs(sdnq, layer, "sdnq-uint4,svd,rank=16", seed), torch.float32)
        errors.append(float((found - source).norm()))
        layer = nn.Linear(256, 192, bias=False)
    assert max(errors) / min(errors) < 1.02
    state = torch.get_rng_state()
    packed = BACKEND.encode(source, backends.parse("sdnq-uint4,svd,rank=16"))
    assert torch.equal(torch.get_rng_state(), state)  # images of the same seed stay the same
    ours = float((BACKEND.decode(packed, torch.float32) - source).norm())
    assert ours == pytest.approx(errors[_sdnq_encode.SEED], rel=1e-6)
    plain = BACKEND.decode(BACKEND.encode(source, backends.parse("sdnq-uint4")), torch.float32)
    assert ours < 0.6 * float((plain - source).norm())


def test_other_threads_random_numbers_do_not_repeat(sdnq: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own generator is neither set nor drawn from while SDNQ's SVD runs."""
    lowrank, seen = torch.svd_lowrank, []

    def svd_lowrank(*args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(torch.randn, 4).result())
        return lowrank(*args, **kwargs)

    monkeypatch.setattr(torch, "svd_lowrank", svd_lowrank)
    weight = linear().weight.data
    torch.manual_seed(5)
    BACKEND.encode(weight, backends.parse("sdnq-int8,svd"))
    seen.append(torch.randn(4))
    torch.manual_seed(5)
    assert torch.equal(torch.stack(seen), torch.stack([torch.randn(4), torch.randn(4)]))


def test_a_matrix_has_no_rank_above_its_shorter_side(sdnq: Any) -> None:
    layer, spec = linear(rows=16), backends.parse("sdnq-int8,svd")
    packed = BACKEND.encode(layer.weight.data, spec)
    same_parts(packed, theirs(sdnq, layer, "sdnq-int8,svd"))
    assert packed.parts["svd_up"].shape == (16, 16) == BACKEND.layout(spec, (16, 128), "float32")["svd_up"].shape


@pytest.mark.parametrize("option", ["dynamic", "svd", "hadamard"])
def test_values_that_are_not_finite_are_refused(option: str, tmp_path: Path) -> None:
    source = sdquant.demo.path("digits-flux") / "transformer"
    model = FluxTransformer2DModel.from_pretrained(source)
    model.transformer_blocks[0].attn.to_q.weight.data[0, 0] = float("nan")
    with pytest.raises(BadFileError, match="to_q"):
        sdquant.quantize(model, f"sdnq-uint4,{option}")


@pytest.mark.parametrize("option", ["svd,rank=16", "hadamard,svd,rank=16"])
@pytest.mark.parametrize("scheme", ["sdnq-int8", "sdnq-uint4"])
def test_the_factors_are_multiplied_beside_the_codes(scheme: str, option: str) -> None:
    floats = linear()
    packed = BACKEND.encode(floats.weight.data, backends.parse(f"{scheme},{option}"))
    branch = BACKEND.low_rank(packed)
    assert branch is not None
    assert BACKEND.form(replace(packed, parts=branch.residual_of(packed.parts)).without_rotation) is not None
    layer = quantized_layer(copy.deepcopy(floats), packed)
    floats.weight.data = BACKEND.decode(packed, torch.float32)
    for rows in (1, 5, 96):
        x = torch.randn(rows, 128, requires_grad=True)
        got, want = layer(x), floats(x)
        assert float((got - want).detach().norm() / want.detach().norm()) < 1e-5
        mine, exact = torch.autograd.grad(got.sum(), x)[0], torch.autograd.grad(want.sum(), x)[0]
        assert float((mine - exact).norm() / exact.norm()) < 1e-5
    set_compute(nn.Sequential(layer), "int8")
    with torch.no_grad():
        assert 0 < float((layer(x) - want).norm() / want.norm()) < 0.02


def test_float16_has_room_between_the_factors() -> None:
    """All of the size is in one of them: along the largest direction the narrow product was infinite."""
    floats = linear()
    packed = BACKEND.encode(floats.weight.data, backends.parse("sdnq-int8,svd,rank=16"))
    branch = BACKEND.low_rank(packed)
    assert branch is not None
    layer = quantized_layer(copy.deepcopy(floats).half(), packed)
    down = packed.parts[branch.down].float()
    x = 1.2e4 * down[:1].sign()
    assert float((x @ down.T).abs().max()) > torch.finfo(torch.float16).max
    assert bool(layer(x.half()).isfinite().all())


def test_ranks_are_few() -> None:
    with pytest.raises(SettingsError, match="rank"):
        backends.parse("sdnq-uint4,svd,rank=0")


@pytest.mark.parametrize("words", ["rank=128", "rank=128,svd=false"])
def test_a_rank_is_of_the_svd(words: str) -> None:
    with pytest.raises(SettingsError, match="without svd") as caught:
        backends.parse(f"sdnq-int8,{words}")
    assert "Write sdnq-int8,svd,rank=128" in caught.value.fix


def test_a_folder_of_dynamic_dtypes_loads_with_its_quant(tmp_path: Path) -> None:
    source, quant = sdquant.demo.path("digits-flux") / "transformer", "sdnq-uint3,dynamic"
    made = sdquant.load_model(source, quant, progress=False)
    sdquant.save(made, tmp_path / "saved")
    assert sdquant.detect(tmp_path / "saved").quant != "sdnq-uint3"
    again = sdquant.load_model(tmp_path / "saved", quant, progress=False)
    assert {name: row.spec for name, row in quantized(again)} == {name: row.spec for name, row in quantized(made)}
    with pytest.raises(ConflictError):
        sdquant.plan(tmp_path / "saved", "sdnq-uint3")


def check_folder(sdnq: Any, folder: Path, ours: Any, cls: Any) -> None:
    """SDNQ's and diffusers' loaders have the weights that `ours` has."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "sdnq"
    weights = dict(quantized(ours))
    assert len(weights) > 10
    own, diffusers = sdnq.load_sdnq_model(str(folder)), cls.from_pretrained(folder, torch_dtype=torch.bfloat16)
    for name, packed in weights.items():
        got, path = BACKEND.decode(packed, torch.float32), name.removesuffix(".weight")
        compare(got, own.get_submodule(path))
        if config["use_svd"] and config["dequantize_fp32"]:  # SDNQ's quantizer makes the factors float32, and the sum
            want = dequantized(diffusers.get_submodule(path), torch.float32)
            assert float((got - want).norm() / want.norm()) < 8e-3
        else:
            compare(got, diffusers.get_submodule(path))


@pytest.mark.parametrize(
    ("model", "quant"),
    [
        ("digits-flux", "sdnq-uint4,hadamard,svd,rank=8"),
        ("digits-flux", "sdnq-int8,hadamard"),
        ("digits-sd", "sdnq-int8,dynamic"),
        ("digits-sd", "sdnq-uint4,svd,rank=8,fp32_scales"),
    ],
)
def test_a_folder_that_we_write_is_sdnqs(sdnq: Any, model: str, quant: str, tmp_path: Path) -> None:
    """On the fly and afterwards, the same, saved; and read by the real thing."""
    part, cls = MODELS[model]
    source = sdquant.demo.path(model) / part
    ours = sdquant.load_model(source, quant, dtype="bfloat16", progress=False)
    after = cls.from_pretrained(source, torch_dtype=torch.bfloat16)
    sdquant.quantize(after, quant)
    other = dict(quantized(after))
    for name, packed in quantized(ours):
        assert other[name].spec == packed.spec
        same_parts(packed, nn.ParameterDict({k: nn.Parameter(v, False) for k, v in other[name].parts.items()}))
    sdquant.save(ours, tmp_path / "saved")
    check_folder(sdnq, tmp_path / "saved", ours, cls)
    again = dict(quantized(sdquant.load_model(tmp_path / "saved", progress=False)))
    assert {name: packed.spec for name, packed in again.items()} == {n: p.spec for n, p in quantized(ours)}


def test_the_command_writes_it(sdnq: Any, tmp_path: Path) -> None:
    source = sdquant.demo.path("digits-flux") / "transformer"
    quant = "sdnq-uint4,hadamard,svd,rank=8"
    assert (
        main(["quantize", str(source), "--quant", quant, "--out", str(tmp_path / "made"), "--dtype", "bfloat16"]) == 0
    )
    ours = sdquant.load_model(tmp_path / "made", progress=False)
    check_folder(sdnq, tmp_path / "made", ours, FluxTransformer2DModel)
    assert sdquant.verify(tmp_path / "made").quant == "sdnq-uint4"
