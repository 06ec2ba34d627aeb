"""What SDNQ writes with its extras, and in all its dtypes: read, and dequantized to its own numbers."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import sdquant
from sdquant import backends
from sdquant.backends import _sdnq_encode
from sdquant.backends import sdnq as module
from sdquant.backends._sdnq_codes import OF_DTYPE, code_named
from sdquant.core.backend import Packed, TensorInfo
from sdquant.errors import BadFileError, UnsupportedFileError
from sdquant.models.fitting import Shell
from sdquant.nn import quantized_layer
from sdquant.nn.layer_factory import set_compute
from sdquant.nn.weights import quantized

BACKEND = backends.get("sdnq")
GOLDEN = Path(__file__).with_name("golden")
FILES = sorted(path.name for path in GOLDEN.glob("sdnq_*.safetensors"))


@pytest.fixture(scope="module")
def sdnq() -> Any:
    return _sdnq_encode.import_sdnq()


def infos(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    return {
        key: TensorInfo(dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape), nbytes=t.nbytes)
        for key, t in tensors.items()
    }


def read(
    tensors: dict[str, torch.Tensor],
    settings: Mapping[str, Any],
    shape: tuple[int, ...] | None,
    model: Shell | None = None,
) -> Packed:
    """The weight of a layer `proj`, as a file with this config has it; `model`: that it belongs to."""
    config = {"quantization_config": {**settings, "quant_method": "sdnq"}}
    (found,) = BACKEND.find(infos(tensors), config)
    assert BACKEND.missing(found) is None and set(found.keys.values()) == tensors.keys() - {"proj.bias"}
    found = found if model is None else model.described("proj.weight", found)
    return BACKEND.read(found, shape, tensors.__getitem__)


@pytest.mark.parametrize("name", FILES)
def test_golden_vectors(name: str) -> None:
    tensors = load_file(GOLDEN / name)
    with safe_open(GOLDEN / name, "pt") as file:
        settings = json.loads(file.metadata()["quantization_config"])
    want = tensors["golden.weight"]
    layer = {f"proj.{key.removeprefix('layer.')}": t for key, t in tensors.items() if key.startswith("layer.")}
    packed = read(layer, settings, tuple(want.shape))
    got = BACKEND.decode(packed, torch.float32)
    if packed.spec.rotation:  # SDNQ rotated in bfloat16
        assert float((got - want).norm() / want.norm()) < 3e-3
    else:
        assert torch.equal(got.bfloat16(), want.bfloat16())


def made(sdnq: Any, layer: nn.Module, **extra: Any) -> Any:
    """The layer as SDNQ itself quantizes it."""
    config = sdnq.SDNQConfig(
        **{"quant_conv": True, "add_skip_keys": False, "minimum_allowed_numel": 0, "svd_rank": 8, **extra}
    )
    dtype: Any = layer.weight.dtype
    return sdnq.sdnq_quantize_layer(layer, config, torch_dtype=dtype, param_name="weight")[0], config.to_dict()


def dequantized(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight by SDNQ's own dequantizer."""
    parts = {name: getattr(layer, name, None) for name in module.PARTS}
    way = layer.sdnq_dequantizer
    weight: torch.Tensor = way(**parts, dtype=dtype, skip_compile=True, skip_quantized_matmul=way.use_quantized_matmul)
    return weight


def tensors_of(layer: Any) -> dict[str, torch.Tensor]:
    """Copies: SDNQ's dequantizer changes codes and scales that are float32."""
    return {f"proj.{name}": part.data.clone() for name, part in layer.named_parameters() if name != "bias"}


def check(layer: Any, settings: Mapping[str, Any], dtype: torch.dtype) -> Packed:
    """Read what SDNQ made, compare all numbers with its own, and return the packed weight."""
    shape = tuple(layer.sdnq_dequantizer.original_shape)
    whole = nn.ModuleDict({"proj": layer})
    model = Shell(whole, frozenset(), {})
    packed = read(tensors_of(layer), settings, shape, model)
    want = dequantized(layer, torch.float32)
    got = BACKEND.decode(packed, torch.float32)
    assert got.shape == want.shape == shape
    if layer.sdnq_dequantizer.use_hadamard:  # a product, which adds in an order of its own
        assert float((got - want).norm() / want.norm()) < 2e-6
    else:
        assert torch.equal(got, want), float((got - want).abs().max())
    for other in (torch.bfloat16, torch.float16):
        assert torch.equal(BACKEND.decode(packed, other), got.to(other)) or "svd_up" in packed.parts
    assert torch.equal(BACKEND.decode(packed, torch.float32), got)  # whose codes are as they were
    again = BACKEND.write("proj.weight", packed)  # as [out, in]
    settings = {name: value for name, value in settings.items() if not name.startswith("use_quantized_matmul")}
    assert torch.equal(BACKEND.decode(read(again, settings, shape, model), torch.float32), got)
    if not getattr(layer, "transposed", False):  # which tells itself in any file
        assert torch.equal(BACKEND.decode(read(again, settings, shape), torch.float32), got)
    return packed


def linear(dtype: torch.dtype = torch.float32, channels: int = 128, rows: int = 96) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(channels, rows, dtype=dtype)


def convolution(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv2d(64, 48, 3, dtype=dtype)


@pytest.mark.parametrize("make", [linear, convolution])
def test_every_dtype(sdnq: Any, make: Any) -> None:
    """All that the library lists, with its own groups."""
    from sdnq.common import dtype_dict

    assert len(dtype_dict) > 200
    for name in dtype_dict:
        layer, settings = made(sdnq, make(), weights_dtype=name)
        packed, code = check(layer, settings, torch.float32), code_named(name)
        assert code is not None and packed.spec.scheme.name == OF_DTYPE.get(code.sdnq, "sdnq-other"), name


EXTRAS = [
    {"weights_dtype": "uint4", "use_svd": True},
    {"weights_dtype": "uint4", "group_size": -2},
    {"weights_dtype": "int8", "group_size": -2},
    {"weights_dtype": "int5", "group_size": 32},
    {"weights_dtype": "uint8", "group_size": 32},
    {"weights_dtype": "uint4", "scale_dtype": "uint8"},
    {"weights_dtype": "uint4", "scale_dtype": "uint4"},
    {"weights_dtype": "uint4", "scale_dtype": "fp4"},
    {"weights_dtype": "uint4", "scale_dtype": "float8_e4m3fn"},
    {"weights_dtype": "uint4", "scale_dtype": "bfloat16"},
    {"weights_dtype": "uint4", "scale_dtype": "float32"},
    {"weights_dtype": "uint4", "scale_dtype": "uint9"},
    {"weights_dtype": "uint4", "scale_dtype": "ufp8"},
    {"weights_dtype": "int8", "scale_dtype": "int8"},
    {"weights_dtype": "int8", "scale_dtype": "int6"},
    {"weights_dtype": "int8", "group_size": -2, "scale_dtype": "uint8"},
    {"weights_dtype": "uint4", "zero_point_dtype": "uint8"},
    {"weights_dtype": "uint4", "zero_point_dtype": "int8", "scale_dtype": "float16"},
    {"weights_dtype": "int8", "zero_point_dtype": "uint8"},
    {"weights_dtype": "uint4", "scale_dtype": "uint8", "use_codebook_scale": True},
    {"weights_dtype": "int8", "scale_dtype": "uint4", "use_codebook_scale": True},
    {"weights_dtype": "uint4", "use_codebook_scale": True},
    {"weights_dtype": "uint4", "use_codebook": True},
    {"weights_dtype": "uint4", "use_codebook": True, "group_size": 32},
    {"weights_dtype": "uint3", "use_codebook": True, "group_size": 32},
    {"weights_dtype": "uint6", "use_codebook": True},
    {"weights_dtype": "uint8", "use_codebook": True},
    {"weights_dtype": "uint1", "use_codebook": True, "group_size": 32},
    {"weights_dtype": "uint4", "use_codebook": True, "group_size": -2},
    {"weights_dtype": "uint4", "use_codebook": True, "scale_dtype": "uint8"},
    {"weights_dtype": "uint4", "use_codebook": True, "scale_dtype": "uint4", "group_size": 32},
    {"weights_dtype": "uint4", "use_codebook": True, "scale_dtype": "uint8", "group_size": -2},
    {"weights_dtype": "uint4", "use_codebook": True, "scale_dtype": "uint8", "use_codebook_scale": True},
    {"weights_dtype": "uint4", "use_codebook": True, "use_svd": True},
    {"weights_dtype": "uint4", "use_hadamard": True},
    {"weights_dtype": "int8", "use_hadamard": True, "hadamard_group_size": 16},
    {"weights_dtype": "uint4", "use_hadamard": True, "use_svd": True},
    {"weights_dtype": "uint4", "use_hadamard": True, "use_codebook": True, "scale_dtype": "float8_e4m3fn"},
    {"weights_dtype": "int5", "use_hadamard": True, "scale_dtype": "uint8", "use_svd": True},
    {"weights_dtype": "uint4", "dequantize_fp32": False},
    {"weights_dtype": "uint8", "dequantize_fp32": False, "use_svd": True},
]  # fmt: skip


def _id(extra: dict[str, Any] | str) -> str:
    if isinstance(extra, str):
        return extra
    return "-".join(str(name if value is True else value) for name, value in extra.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [linear, convolution])
@pytest.mark.parametrize("extra", EXTRAS, ids=_id)
def test_extras(sdnq: Any, extra: dict[str, Any], make: Any, dtype: torch.dtype) -> None:
    layer, settings = made(sdnq, make(dtype), codebook_steps=2, **extra)
    check(layer, settings, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [linear, convolution])
@pytest.mark.parametrize("svd", [False, True])
@pytest.mark.parametrize(
    "extra",
    [
        {"weights_dtype": "int8"},
        {"weights_dtype": "uint8"},
        {"weights_dtype": "fp8"},
        {"weights_dtype": "fp16"},
        {"weights_dtype": "uint4"},
        {"weights_dtype": "int8", "group_size": -2},
        {"weights_dtype": "int8", "use_hadamard": True},
        {"weights_dtype": "int8", "scale_dtype": "uint8"},
        {"weights_dtype": "uint4", "use_codebook": True},
    ],
    ids=_id,
)
def test_layouts_for_quantized_products(
    sdnq: Any, extra: dict[str, Any], svd: bool, make: Any, dtype: torch.dtype
) -> None:
    products = {"use_quantized_matmul": True, "use_quantized_matmul_conv": True}
    layer, settings = made(sdnq, make(dtype), codebook_steps=2, **extra, **products, use_svd=svd)
    if make is convolution and tuple(layer.weight.shape) == (576, 48) and (svd or extra.get("use_hadamard")):
        # sdnq 0.2.8 itself dequantizes none of these ("Bad in-place call", "unflatten"); it computes with the codes.
        packed = read(tensors_of(layer), settings, tuple(layer.sdnq_dequantizer.original_shape))
        got, source = BACKEND.decode(packed, torch.float32), convolution(dtype).state_dict()["weight"].float()
        assert float((got - source).norm() / source.norm()) < (0.04 if extra["weights_dtype"] == "fp8" else 0.02)
        return
    check(layer, settings, dtype)


@pytest.mark.parametrize(
    "layer", [nn.Embedding(100, 64), nn.Conv3d(64, 32, 2), nn.Conv2d(64, 64, 3, groups=2)], ids=lambda one: str(one)[:6]
)
@pytest.mark.parametrize(
    "extra",
    [
        {"weights_dtype": "uint4"},
        {"weights_dtype": "int5", "use_svd": True},
        {"weights_dtype": "int8", "use_hadamard": True},
        {"weights_dtype": "uint4", "use_codebook": True},
    ],
    ids=_id,
)
def test_other_layers(sdnq: Any, extra: dict[str, Any], layer: nn.Module) -> None:
    layer, settings = made(sdnq, copy.deepcopy(layer), codebook_steps=2, quant_embedding=True, **extra)
    check(layer, settings, torch.float32)


@pytest.mark.parametrize("place", ["quantization_config", "config"])
def test_settings_in_the_metadata_of_a_file(sdnq: Any, tmp_path: Path, place: str) -> None:
    layer, settings = made(sdnq, linear(), weights_dtype="uint4", use_hadamard=True)
    said = {**settings, "quant_method": "sdnq"}
    metadata = json.dumps(said if place == "quantization_config" else {"quantization_config": said}, default=str)
    save_file(tensors_of(layer), tmp_path / "proj.safetensors", {place: metadata})
    assert sdquant.detect(tmp_path / "proj.safetensors").quant == "sdnq-uint4"
    got = dict(sdquant.dequantize(tmp_path / "proj.safetensors"))["proj.weight"]
    assert torch.equal(got, BACKEND.decode(read(tensors_of(layer), settings, (96, 128)), torch.float32))


TRANSPOSED = [nn.ConvTranspose2d(64, 96, 3), nn.ConvTranspose1d(64, 64, 3), nn.ConvTranspose2d(16, 16, 3)]


@pytest.mark.filterwarnings("ignore:torch.searchsorted")
@pytest.mark.parametrize("layer", TRANSPOSED, ids=lambda one: str(one)[:22])
@pytest.mark.parametrize("svd", [False, True])
def test_transposed_convolutions(sdnq: Any, layer: nn.Module, svd: bool) -> None:
    extras: list[dict[str, Any]] = [
        *({"weights_dtype": dtype} for dtype in ("int8", "uint4", "int5")),
        *({"use_codebook": True, "weights_dtype": dtype} for dtype in ("uint4", "uint8")),
        *({"scale_dtype": dtype} for dtype in ("uint4", "int8", "float8_e4m3fn")),
        {"use_hadamard": True},
        {"group_size": -2},
        {"use_codebook": True, "scale_dtype": "uint4"},
    ]
    if layer.in_channels == layer.out_channels:  # SDNQ can split no other into groups
        extras += [
            {"group_size": 8},
            {"group_size": 8, "use_codebook": True},
            {"group_size": 8, "scale_dtype": "uint4"},
        ]
    for extra in extras:
        settings = {"weights_dtype": "uint4", "use_svd": svd, "group_size": -1, "codebook_steps": 2, **extra}
        made_, config = made(sdnq, copy.deepcopy(layer), **settings)
        check(made_, config, torch.float32)


@pytest.mark.filterwarnings("ignore:torch.searchsorted")
@pytest.mark.parametrize(("channels", "dtype"), [(16, "uint4"), (256, "uint8")])
def test_a_convolution_with_as_many_levels_as_channels(sdnq: Any, channels: int, dtype: str) -> None:
    layer, settings = made(sdnq, nn.Conv2d(channels, channels, 3), weights_dtype=dtype, use_codebook=True,
                           codebook_steps=2, group_size=-1)  # fmt: skip
    assert layer.scale.shape == (channels, channels, 3, 3)  # as those of a transposed one would be
    check(layer, settings, torch.float32)


@pytest.mark.parametrize("compute", ["float", "int8"])
@pytest.mark.parametrize(
    "extra",
    [
        {"weights_dtype": "int5"},
        {"weights_dtype": "int8", "group_size": -2},
        {"weights_dtype": "uint4", "use_hadamard": True},
        {"weights_dtype": "uint4", "use_codebook": True},
        {"weights_dtype": "int8", "scale_dtype": "uint8"},
    ],
    ids=_id,
)
@pytest.mark.parametrize("make", [linear, convolution])
def test_layers_compute_with_the_decoded_weight(sdnq: Any, make: Any, extra: dict[str, Any], compute: str) -> None:
    layer, settings = made(sdnq, make(), codebook_steps=2, **extra)
    packed, floats = check(layer, settings, torch.float32), make()
    ours = nn.Sequential(quantized_layer(copy.deepcopy(floats), packed)).eval()
    set_compute(ours, compute)
    floats.weight.data = BACKEND.decode(packed, torch.float32)
    small = (torch.randn(2, 128), torch.randn(96, 128))
    images = (torch.randn(1, 64, 7, 7), torch.randn(2, 64, 9, 9))
    for x in small if make is linear else images:
        with torch.no_grad():
            want, got = floats(x), ours(x)
        assert float((got - want).norm() / want.norm()) < (1e-5 if compute == "float" else 0.02)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "float8_e4m3fn", "float8_e5m2", "float16"])
@pytest.mark.parametrize("channels", [96, 40, 16])
@pytest.mark.parametrize("products", [{"use_quantized_matmul": True}, {"use_quantized_matmul_conv": True}])
def test_a_square_lies_as_its_config_says(sdnq: Any, dtype: str, channels: int, products: dict[str, bool]) -> None:
    layer, settings = made(
        sdnq, linear(channels=channels, rows=channels), weights_dtype=dtype, group_size=-2, **products
    )
    check(layer, settings, torch.float32)
    others = {**settings, "modules_to_not_use_matmul": ["weight"]}
    layer, settings = made(sdnq, linear(channels=channels, rows=channels), **{**others, "quant_method": None})
    check(layer, settings, torch.float32)


@pytest.mark.filterwarnings("ignore:torch.searchsorted")
@pytest.mark.parametrize("svd", [False, True])
@pytest.mark.parametrize(
    "extra",
    [{"scale_dtype": "int8"}, {"scale_dtype": "uint8"}, {"weights_dtype": "int16"}, {"use_codebook": True}],
    ids=_id,
)
def test_what_is_quantized_again_for_a_product_lies_as_it_is(sdnq: Any, extra: dict[str, Any], svd: bool) -> None:
    """Only the factors of its SVD are turned: a square was turned with them, in silence."""
    extra = {"weights_dtype": "uint8" if "use_codebook" in extra else "int8", **extra}
    layer, settings = made(sdnq, linear(channels=96), use_quantized_matmul=True, group_size=-2, use_svd=svd,
                           codebook_steps=2, **extra)  # fmt: skip
    check(layer, settings, torch.float32)


def test_a_square_that_may_lie_either_way_is_refused(sdnq: Any) -> None:
    products = {"use_quantized_matmul": True, "weights_dtype": "int8", "group_size": -2}
    for svd in (False, True):
        layer, settings = made(sdnq, linear(channels=96), **products, use_svd=svd, quantized_matmul_dtype="int8")
        check(layer, settings, torch.float32)
        settings["quantized_matmul_dtype"] = "float8_e4m3fn"  # for which it is quantized again, by versions known today
        with pytest.raises(UnsupportedFileError, match="quantized products"):
            check(layer, settings, torch.float32)


@pytest.mark.parametrize("channels", [64, 256, 160, 640, 100, 90])
def test_rotations_of_both_kinds(sdnq: Any, channels: int) -> None:
    layer, settings = made(sdnq, linear(channels=channels), weights_dtype="uint8", use_hadamard=True)
    packed = check(layer, settings, torch.float32)
    way = layer.sdnq_dequantizer
    assert packed.spec.rotation == (way.hadamard_group_size if way.use_hadamard else 0)
    floats = linear(channels=channels)
    ours = quantized_layer(copy.deepcopy(floats), packed)
    floats.weight.data = BACKEND.decode(packed, torch.float32)
    for rows in (1, 40):  # the activations are rotated, and the codes multiplied
        x = torch.randn(rows, channels)
        with torch.no_grad():
            assert float((ours(x) - floats(x)).norm() / floats(x).norm()) < 2e-6


def compare(got: torch.Tensor, layer: Any) -> None:
    """A weight of ours in float32 with a layer of SDNQ's."""
    try:
        want = dequantized(layer, torch.float32)
    except RuntimeError:  # of a convolution for quantized products: see `test_layouts_for_quantized_products`
        return
    if layer.sdnq_dequantizer.use_hadamard:
        assert float((got - want).norm() / want.norm()) < 2e-6
    else:
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("model", "extra"),
    [
        ("digits-flux", {"weights_dtype": "uint4", "use_hadamard": True, "use_svd": True}),
        ("digits-flux", {"weights_dtype": "int4", "use_dynamic_quantization": True, "dynamic_loss_threshold": 3e-3}),
        ("digits-sd", {"weights_dtype": "int4", "use_dynamic_quantization": True, "dynamic_loss_threshold": 2e-3}),
        ("digits-flux", {"weights_dtype": "int8", "use_svd": True, "use_quantized_matmul": True}),
        ("digits-sd", {"weights_dtype": "uint4", "use_codebook": True, "scale_dtype": "uint8"}),
        ("digits-sd", {"weights_dtype": "int5", "use_hadamard": True, "group_size": -1}),
        ("digits-sd", {"weights_dtype": "float8_e5m2", "use_quantized_matmul": True, "use_svd": True}),
    ],
    ids=_id,
)
def test_a_folder_of_sdnqs_is_loaded_and_saved_again(
    sdnq: Any, model: str, extra: dict[str, Any], tmp_path: Path
) -> None:
    part, cls = {"digits-flux": ("transformer", FluxTransformer2DModel), "digits-sd": ("unet", UNet2DConditionModel)}[
        model
    ]
    settings = {"quant_conv": True, "minimum_allowed_numel": 0, "svd_rank": 8, "codebook_steps": 2, **extra}
    theirs = cls.from_pretrained(
        sdquant.demo.path(model) / part, quantization_config=sdnq.SDNQConfig(**settings), torch_dtype=torch.bfloat16
    )
    theirs.save_pretrained(tmp_path / "sdnq")
    layers = {name: layer for name, layer in theirs.named_modules() if hasattr(layer, "sdnq_dequantizer")}
    assert len(layers) > 10
    dtypes = {layer.sdnq_dequantizer.weights_dtype for layer in layers.values()}
    assert (len(dtypes) > 1) == extra.get("use_dynamic_quantization", False)

    seen = sdquant.detect(tmp_path / "sdnq")
    assert seen.prequantized
    assert sdquant.verify(tmp_path / "sdnq").quant is not None
    (plan,) = sdquant.plan(tmp_path / "sdnq").components
    assert len(plan.weights) >= len(layers)
    ours = sdquant.load_model(tmp_path / "sdnq", progress=False)
    packed = dict(quantized(ours))
    assert set(packed) == {f"{name}.weight" for name in layers}
    for name, layer in layers.items():
        compare(BACKEND.decode(packed[f"{name}.weight"], torch.float32), layer)

    sdquant.save(ours, tmp_path / "saved")
    again = dict(quantized(sdquant.load_model(tmp_path / "saved", progress=False)))
    assert set(again) == set(packed)
    for name, weight in packed.items():
        assert again[name].spec == weight.spec
        assert all(
            torch.equal(part.view(torch.uint8), again[name].parts[key].view(torch.uint8))
            for key, part in weight.parts.items()
        )


@pytest.mark.parametrize(
    ("extra", "method"),
    [
        ({"weights_dtype": "int8", "group_size": 32}, "sdnq"),
        ({"weights_dtype": "uint4", "group_size": -1}, "sdnq"),
        ({"weights_dtype": "uint4"}, "sdnq"),
        ({"weights_dtype": "uint4", "use_svd": True}, "sdnq"),
        ({"weights_dtype": "int8", "group_size": -2}, "sdquant"),
        ({"weights_dtype": "uint4", "use_hadamard": True}, "sdnq"),
        ({"weights_dtype": "int5"}, "sdnq"),
        ({"weights_dtype": "uint4", "use_codebook": True, "codebook_steps": 2}, "sdquant"),
        ({"weights_dtype": "int4", "use_dynamic_quantization": True, "dynamic_loss_threshold": 3e-3}, "sdnq"),
    ],
    ids=_id,
)
def test_what_is_saved_again_names_who_reads_it(sdnq: Any, extra: dict[str, Any], method: str, tmp_path: Path) -> None:
    """SDNQ itself, if its config can say what was read."""
    settings = {"minimum_allowed_numel": 0, "svd_rank": 8, **extra}
    FluxTransformer2DModel.from_pretrained(
        sdquant.demo.path("digits-flux") / "transformer",
        quantization_config=sdnq.SDNQConfig(**settings),
        torch_dtype=torch.bfloat16,
    ).save_pretrained(tmp_path / "sdnq")
    ours = sdquant.load_model(tmp_path / "sdnq", progress=False)
    sdquant.save(ours, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == method
    if method == "sdnq":
        theirs = sdnq.load_sdnq_model(str(tmp_path / "saved"))
        for name, packed in quantized(ours):
            layer = theirs.get_submodule(name.removesuffix(".weight"))
            compare(BACKEND.decode(packed, torch.float32), layer)


def test_what_sdnq_does_not_write_is_refused() -> None:
    three = {"proj.weight": torch.zeros(3, dtype=torch.uint8), "proj.scale": torch.ones(1, 1)}
    three["proj.zero_point"] = torch.zeros(1, 1)
    with pytest.raises(BadFileError, match="do not make a weight"):
        read(three, {"weights_dtype": "uint3"}, (1, 9))
    for size in (-1, 2, "16"):
        settings = {"weights_dtype": "int8", "use_hadamard": True, "hadamard_group_size": size}
        with pytest.raises(UnsupportedFileError, match="rotated in groups"):
            read({"proj.weight": torch.zeros(4, 64).char(), "proj.scale": torch.ones(4, 1)}, settings, (4, 64))


def test_scales_that_all_positions_of_a_kernel_share() -> None:
    """They have no layout for kernels, whose scales are of one position each or of all weights of a row."""
    codes = torch.randint(-100, 100, (9, 8, 8, 3, 3), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    scale = torch.rand(9, 8, 1, 1, 1, generator=torch.Generator().manual_seed(1)) + 0.5
    packed = read({"proj.weight": codes, "proj.scale": scale}, {"weights_dtype": "int8"}, (9, 64, 3, 3))
    assert BACKEND.form(packed) is None
    assert torch.equal(BACKEND.decode(packed, torch.float32), (codes * scale).view(9, 64, 3, 3))
