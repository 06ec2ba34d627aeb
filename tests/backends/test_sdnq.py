"""The SDNQ backend against SDNQ: its decoded weights, its folders read, and ours read by it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import nn

import sdquant
from sdquant import backends
from sdquant.backends import _sdnq_encode
from sdquant.backends import sdnq as module
from sdquant.backends._sdnq_codes import OF_DTYPE, code_named
from sdquant.core.backend import Packed, TensorInfo, Unfit
from sdquant.errors import BadFileError, UnsupportedFileError
from sdquant.nn.layer_factory import set_compute
from sdquant.nn.weights import quantized
from sdquant.training import digits
from sdquant.utils import chunk_sizes

from ..test_keep_in_fp32 import run_wan, snr, wan

BACKEND = backends.get("sdnq")
SCHEMES = [row.name for row in BACKEND.schemes if row.on_the_fly]


@pytest.fixture(scope="module")
def sdnq() -> Any:
    return _sdnq_encode.import_sdnq()


def _own(sdnq: Any, layer: nn.Module, text: str, **extra: Any) -> Any:
    """The layer as SDNQ itself quantizes it."""
    config = sdnq.SDNQConfig(**module._settings(backends.parse(text)) | extra)
    return sdnq.sdnq_quantize_layer(layer, config, torch_dtype=layer.weight.dtype, param_name="weight")[0]


def _dequantized(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight by SDNQ's own dequantizer."""
    parts = {key: getattr(layer, key, None) for key in ("weight", "scale", "zero_point", "svd_up", "svd_down")}
    weight: torch.Tensor = layer.sdnq_dequantizer(
        **parts, dtype=dtype, skip_compile=True, skip_quantized_matmul=layer.sdnq_dequantizer.use_quantized_matmul
    )
    return weight


def _layer(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    match kind:
        case "linear":
            return nn.Linear(256, 72, dtype=dtype)
        case "uneven":  # 200 channels: groups that SDNQ has to make smaller or fewer
            return nn.Linear(200, 72, dtype=dtype)
        case "conv":
            return nn.Conv2d(128, 72, 3, dtype=dtype)
        case _:
            return nn.Conv1d(64, 72, 5, dtype=dtype)


@pytest.mark.parametrize("kind", ["linear", "uneven", "conv", "conv1d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("option", ["", ",fp32_scales", ",group_size=32", ",group_size=-1"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_and_decoded_weights_are_sdnqs(
    sdnq: Any, scheme: str, option: str, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_sizes, "CPU", 1000)  # many chunks
    layer: Any = _layer(kind, dtype)
    packed = BACKEND.encode(layer.weight.data, backends.parse(scheme + option))
    own = _own(sdnq, layer, scheme + option)
    for part, tensor in packed.parts.items():
        assert torch.equal(tensor.view(torch.uint8), getattr(own, part).contiguous().view(torch.uint8)), part
    for out in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(BACKEND.decode(packed, out), _dequantized(own, out))


@pytest.mark.parametrize("extra", [{"use_svd": True, "svd_rank": 8}, {"use_quantized_matmul": True}], ids=str)
@pytest.mark.parametrize("scheme", ["sdnq-int8", "sdnq-fp8", "sdnq-uint4"])
def test_svd_and_matmul_weights_are_read(sdnq: Any, scheme: str, extra: dict[str, Any]) -> None:
    layer: Any = _layer("linear", torch.bfloat16)
    own = _own(sdnq, layer, scheme, **extra, group_size=-1 if "use_quantized_matmul" in extra else 64)
    root = nn.ModuleDict({"proj": own})
    file = {key: value.data for key, value in root.named_parameters()}
    settings = {"quant_method": "sdnq", "weights_dtype": module.CODES[scheme].sdnq, **extra}
    packed = _read_all(file, settings, root)
    assert torch.equal(BACKEND.decode(packed["proj.weight"], torch.bfloat16), _dequantized(own, torch.bfloat16))


def _read_all(file: dict[str, torch.Tensor], settings: dict[str, Any], root: nn.Module) -> dict[str, Packed]:
    """Everything that `find` finds in a file of a model that SDNQ quantized, read."""
    infos = {
        key: TensorInfo(
            dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape), nbytes=t.numel() * t.element_size()
        )
        for key, t in file.items()
    }
    read = {}
    for found in BACKEND.find(infos, {"quantization_config": settings}):
        layer: Any = root.get_submodule(found.name.removesuffix(".weight"))
        read[found.name] = BACKEND.read(found, tuple(layer.sdnq_dequantizer.original_shape), file.__getitem__)
    return read


def _flux() -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        guidance_embeds=False,
        axes_dims_rope=(4, 14, 14),
    ).to(torch.bfloat16)


def _unet() -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(64, 128),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        attention_head_dim=4,
        cross_attention_dim=64,
        norm_num_groups=8,
    ).to(torch.bfloat16)


@pytest.mark.parametrize("make", [_flux, _unet])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_folder_that_sdnq_saved_is_read(sdnq: Any, scheme: str, make: Any, tmp_path: Path) -> None:
    """With SDNQ's own defaults: its groups, float32 scales, its list of modules to leave alone."""
    model = sdnq.sdnq_post_load_quant(
        make(), weights_dtype=module.CODES[scheme].sdnq, quant_conv=True, torch_dtype=torch.bfloat16
    )
    sdnq.save_sdnq_model(model, str(tmp_path))
    file = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    packed = _read_all(file, settings, model)
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "sdnq_dequantizer")}
    assert set(packed) == {f"{name}.weight" for name in layers} and len(packed) > 10
    for name, layer in layers.items():
        assert packed[f"{name}.weight"].spec.scheme.name == scheme
        assert packed[f"{name}.weight"].spec.dtype == "bfloat16"
        assert torch.equal(
            BACKEND.decode(packed[f"{name}.weight"], torch.bfloat16), _dequantized(layer, torch.bfloat16)
        )


def test_a_folder_that_diffusers_saved_is_read(sdnq: Any, tmp_path: Path) -> None:
    _flux().save_pretrained(tmp_path / "float")
    config = sdnq.SDNQConfig(weights_dtype="uint4", modules_dtype_dict={"int8": ["ff"]})
    model = FluxTransformer2DModel.from_pretrained(
        tmp_path / "float", quantization_config=config, torch_dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path / "sdnq")
    file = load_file(tmp_path / "sdnq" / "diffusion_pytorch_model.safetensors")
    settings = json.loads((tmp_path / "sdnq" / "config.json").read_text())["quantization_config"]
    packed = _read_all(file, settings, model)
    assert {row.spec.scheme.name for row in packed.values()} == {"sdnq-uint4", "sdnq-int8"}
    for name, row in packed.items():
        layer = model.get_submodule(name.removesuffix(".weight"))
        assert torch.equal(BACKEND.decode(row, torch.bfloat16), _dequantized(layer, torch.bfloat16))


@pytest.mark.parametrize("scheme", ["int8", "float8_e4m3fn"])
def test_a_folder_for_quantized_products_is_loaded(sdnq: Any, scheme: str, tmp_path: Path) -> None:
    """Its scales lie as [1, rows]; turned, their last stride is the number of rows."""
    _flux().save_pretrained(tmp_path / "float")
    config = sdnq.SDNQConfig(weights_dtype=scheme, use_quantized_matmul=True)
    theirs = FluxTransformer2DModel.from_pretrained(
        tmp_path / "float", quantization_config=config, torch_dtype=torch.bfloat16
    )
    theirs.save_pretrained(tmp_path / "sdnq")
    model = sdquant.load_model(tmp_path / "sdnq", progress=False)
    layers = {name: layer for name, layer in theirs.named_modules() if hasattr(layer, "sdnq_dequantizer")}
    assert len(layers) > 10
    for name, layer in layers.items():
        assert torch.equal(model.get_submodule(name).dequantize(), _dequantized(layer, torch.bfloat16))
    name = next(iter(layers))
    x = torch.randn(40, layers[name].sdnq_dequantizer.original_shape[1]).bfloat16()
    set_compute(model, "int8")  # takes some of its rows for a look
    with torch.no_grad():
        assert bool(model.get_submodule(name)(x).isfinite().all())
    sdquant.save(model, tmp_path / "again")
    again = sdquant.load_model(tmp_path / "again", progress=False)
    assert torch.equal(again.get_submodule(name).dequantize(), model.get_submodule(name).dequantize())


@pytest.mark.parametrize("make", [_flux, _unet])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_folder_that_we_write_loads_in_sdnq(sdnq: Any, scheme: str, make: Any, tmp_path: Path) -> None:
    model = make()
    spec = backends.parse(scheme)
    file, kept, want = dict(model.state_dict()), [], {}
    for name, layer in model.named_modules():
        if not isinstance(layer, (nn.Linear, nn.Conv2d)):
            continue
        try:
            packed = BACKEND.encode(layer.weight.data, spec)
        except Unfit:
            kept.append(f"{name}.weight")
            continue
        del file[f"{name}.weight"]
        file |= BACKEND.write(f"{name}.weight", packed)
        want[name] = BACKEND.decode(packed, torch.bfloat16)
    settings = BACKEND.config(spec, "bfloat16")
    assert settings is not None
    settings["modules_to_not_convert"] = kept
    config = json.loads(model.to_json_string()) | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(file, tmp_path / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})

    loaded = sdnq.load_sdnq_model(str(tmp_path))
    assert len(want) > 10
    for name, weight in want.items():
        layer = loaded.get_submodule(name)
        assert torch.equal(_dequantized(layer, torch.bfloat16), weight)
    for name in kept:
        assert torch.equal(loaded.get_parameter(name), model.get_parameter(name))
    same = type(model).from_pretrained(tmp_path, torch_dtype=torch.bfloat16)  # diffusers, through SDNQ's quantizer
    for name, weight in want.items():
        assert torch.equal(_dequantized(same.get_submodule(name), torch.bfloat16), weight)


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    folder = tmp_path_factory.mktemp("t5")
    T5EncoderModel(T5Config(**sizes, feed_forward_proj="gated-gelu")).bfloat16().save_pretrained(folder)
    return folder


def _text(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(24).view(2, 12)).last_hidden_state
    return found


@pytest.mark.parametrize("how", ["save", "save_pretrained"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_sdnq_runs_a_text_encoder_that_we_write(sdnq: Any, scheme: str, how: str, t5: Path, tmp_path: Path) -> None:
    """T5 casts its activations to the dtype of `wo`, which in SDNQ's layers is that of the codes."""
    from transformers import T5EncoderModel

    model = sdquant.load_model(t5, scheme, progress=False)
    (part,) = sdquant.plan(t5, scheme).components
    assert len(part.kept) == 2 and all(f"{scheme},wo" in why for why in part.kept.values())
    if how == "save":
        sdquant.save(model, tmp_path / "saved")
    else:
        model.save_pretrained(tmp_path / "saved")
    settings = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "sdnq"
    theirs: Any = T5EncoderModel.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    layer = theirs.encoder.block[0].layer[1].DenseReluDense
    assert hasattr(layer.wi_0, "sdnq_dequantizer") and not hasattr(layer.wo, "sdnq_dequantizer")
    assert snr(_text(theirs).double(), _text(model).double()) > 35  # products of bfloat16 are rounded elsewhere


def test_what_sdnq_cannot_run_does_not_carry_its_name(t5: Path, tmp_path: Path) -> None:
    model = sdquant.load_model(t5, "sdnq-uint4,wo", progress=False)
    sdquant.save(model, tmp_path / "saved")
    settings = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "sdquant"
    assert torch.equal(_text(sdquant.load_model(tmp_path / "saved", progress=False)), _text(model))


@pytest.mark.parametrize("scheme", ["sdnq-uint4", "sdnq-int8"])
def test_sdnq_runs_a_transformer_that_we_write(sdnq: Any, scheme: str, tmp_path: Path) -> None:
    """Wan casts to the dtype of its time embedder's first parameter."""
    name, values = wan()
    torch.manual_seed(0)
    cls: Any = getattr(diffusers, name)
    cls(**values).bfloat16().save_pretrained(tmp_path / "float")
    model = sdquant.load_model(tmp_path / "float", scheme, progress=False)
    sdquant.save(model, tmp_path / "saved")
    theirs = cls.from_pretrained(tmp_path / "saved", torch_dtype=torch.bfloat16)
    assert sum(hasattr(layer, "sdnq_dequantizer") for layer in theirs.modules()) == len(dict(quantized(model))) > 5
    assert snr(run_wan(theirs), run_wan(model)) > 35


@pytest.mark.slow
@pytest.mark.parametrize("model", ["digits-flux", "digits-sd"])
def test_sdnq_draws_the_same(sdnq: Any, model: str, tmp_path: Path) -> None:
    pipe = sdquant.load_model(sdquant.demo.path(model), "sdnq-uint4", dtype="bfloat16", progress=False)
    sdquant.save(pipe, tmp_path / "saved")
    theirs = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    images = []
    for one in (pipe, theirs):
        one.set_progress_bar_config(disable=True)
        given = {"height": digits.SIZE, "width": digits.SIZE, "generator": torch.Generator().manual_seed(0)}
        made = one("a handwritten seven", num_inference_steps=4, output_type="np", **given).images
        images.append(torch.from_numpy(made))
    assert snr(*images) > 35  # both in bfloat16, by kernels of their own


def _header(**tensors: tuple[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    return {
        key.replace("__", "."): TensorInfo(dtype=dtype, shape=shape, nbytes=0)
        for key, (dtype, shape) in tensors.items()
    }


PROJ = _header(
    proj__weight=("uint8", (8192,)), proj__scale=("float32", (64, 4, 1)), proj__zero_point=("float32", (64, 4, 1))
)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"weights_dtype": "int17"}, "int17"),
        ({"weights_dtype": "float6_e3m3fn"}, "float6_e3m3fn"),  # seven bits
        ({"weights_dtype": "nf4"}, "nf4"),
        ({"weights_dtype": "int8", "use_codebook": True}, "indices of a codebook in 'int8'"),
        ({"weights_dtype": "uint4", "scale_dtype": "uint64"}, "uint64"),
        ({"weights_dtype": "uint4", "modules_quant_config": {"proj": {"weights_dtype": "uint0"}}}, "uint0"),
        ({"weights_dtype": "uint4", "modules_dtype_dict": {"minimum_17bit": ["proj.weight"]}}, "int17"),
    ],
)
def test_what_no_scheme_has_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedFileError, match=words) as caught:
        BACKEND.find(PROJ, {"quantization_config": {"quant_method": "sdnq", **settings}})
    assert "proj.weight" in caught.value.what and "diffusers" in caught.value.fix


@pytest.mark.parametrize(
    ("settings", "scheme"),
    [
        ({"weights_dtype": "uint4", "modules_dtype_dict": {"minimum_6bit": ["proj.weight"]}}, "sdnq-int6"),
        ({"weights_dtype": "int8", "modules_dtype_dict": {"minimum_6bit": ["proj.weight"]}}, "sdnq-int8"),
        ({"weights_dtype": "int8", "modules_dtype_dict": {"uint4": ["proj"]}}, "sdnq-uint4"),
        ({"weights_dtype": "int8", "modules_dtype_dict": {"uint4": [".pro"]}}, "sdnq-uint4"),
        ({"weights_dtype": "int8", "modules_dtype_dict": {"uint4": ["p*weight"]}}, "sdnq-uint4"),
        ({"weights_dtype": "int8", "modules_dtype_dict": {"uint4": ["other"]}}, "sdnq-int8"),
        ({"weights_dtype": "fp8"}, "sdnq-fp8"),
        ({"weights_dtype": "uint4", "modules_dtype_dict": {"minimum_7bit": ["proj.weight"]}}, "sdnq-other"),
    ],
)
def test_the_dtype_of_one_module_follows_sdnqs_rules(sdnq: Any, settings: dict[str, Any], scheme: str) -> None:
    found = BACKEND.find(PROJ, {"quantization_config": {"quant_method": "sdnq", **settings}})
    assert [row.scheme for row in found] == [scheme]
    from sdnq.utils import get_minimum_dtype  # its own rule

    own = get_minimum_dtype(settings["weights_dtype"], "proj.weight", settings.get("modules_dtype_dict", {}))
    code = code_named(own)
    assert code is not None and OF_DTYPE.get(code.sdnq, "sdnq-other") == scheme


def test_other_configs_are_not_sdnqs() -> None:
    assert BACKEND.find(PROJ, {}) == []
    assert BACKEND.find(PROJ, {"quantization_config": {"quant_method": "bitsandbytes"}}) == []


def test_parts_that_do_not_fit_are_a_bad_file() -> None:
    settings = {"quant_method": "sdnq", "weights_dtype": "uint4"}
    (found,) = BACKEND.find(PROJ, {"quantization_config": settings})
    parts = {"proj.weight": torch.zeros(8192, dtype=torch.uint8)}
    parts |= {key: torch.zeros(64, 4, 1) for key in ("proj.scale", "proj.zero_point")}
    assert BACKEND.read(found, (64, 256), parts.__getitem__).spec.shape == (64, 256)
    with pytest.raises(BadFileError, match=r"do not make a weight of \[64, 128\]"):
        BACKEND.read(found, (64, 128), parts.__getitem__)
    with pytest.raises(BadFileError):
        BACKEND.read(found, (128, 128), parts.__getitem__)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_layout_foretells_sdnqs_groups(scheme: str, sdnq: Any) -> None:
    """Channels that groups do not divide: 640, as half of SDXL's layers have, are not two groups of 320."""
    spec = backends.parse(scheme)
    for channels in (*range(96, 800, 32), 1280, 1920, 2048, 2816, 5120):
        own = _own(sdnq, nn.Linear(channels, 8), scheme)
        layout = BACKEND.layout(spec, (8, channels), "float32")
        assert {name: tuple(getattr(own, name).shape) for name in layout} == {k: v.shape for k, v in layout.items()}
    weight = torch.randn(1040, 640)  # more than one chunk of rows
    theirs = _own(sdnq, _linear(weight), scheme)
    assert torch.equal(BACKEND.decode(BACKEND.encode(weight, spec), torch.float32), _dequantized(theirs, torch.float32))


def _linear(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return layer


def test_few_channels_do_not_fit() -> None:
    with pytest.raises(Unfit, match="4 input channels"):
        BACKEND.layout(backends.parse("sdnq-int8"), (64, 4, 3, 3), "bfloat16")
    with pytest.raises(Unfit, match="32 input channels"):
        BACKEND.layout(backends.parse("sdnq-uint4"), (64, 32, 3, 3), "bfloat16")
    with pytest.raises(Unfit, match="units of 8"):
        BACKEND.layout(backends.parse("sdnq-uint3"), (1, 65), "bfloat16")


def test_encode_prints_nothing_and_leaves_the_environment() -> None:
    """In a process of its own: SDNQ speaks at its first import, and threads wait for each other's."""
    script = """
import logging, os, torch
from concurrent.futures import ThreadPoolExecutor
import sdquant
from sdquant import backends
before = dict(os.environ)
weight = torch.randn(64, 64)
with ThreadPoolExecutor(4) as pool:
    encode = backends.get("sdnq").encode
    list(pool.map(lambda spec: encode(weight, spec), [backends.parse("sdnq-uint4")] * 4))
assert dict(os.environ) == before
assert logging.getLogger("sdnq").level == logging.NOTSET
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
