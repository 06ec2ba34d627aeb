"""optimum-quanto's schemes against the library itself, its files, its extension, and our 3 bits."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sdquant import backends
from sdquant.core.backend import Packed, TensorInfo, Unfit
from sdquant.errors import BadFileError

quanto = pytest.importorskip("optimum.quanto", reason="tests of the optimum-quanto backend need optimum-quanto")

from sdquant.backends._quanto_codec import pack3, unpack3  # noqa: E402
from sdquant.backends._quanto_extension import Unpacker, without_compiler  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

BACKEND = backends.get("quanto")
THEIRS = ("qint8", "qfloat8", "qint4", "qint2")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Includes rows without groups (up to 128), groups of 128, 96 and 64, and a row that no group divides (200).
WIDTHS = (32, 64, 96, 128, 192, 200, 256, 320, 1152)


@pytest.fixture(autouse=True)
def _no_build() -> Iterator[None]:
    """The library's own calls in these tests must not compile either; and nothing here may have built anything."""
    without_compiler()
    from optimum.quanto.library.extensions import cpp

    before = Path(cpp.ext.build_directory).exists()
    yield
    assert Path(cpp.ext.build_directory).exists() == before


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _assert_same(a: Packed, b: Packed) -> None:
    assert a.spec == b.spec
    assert a.parts.keys() == b.parts.keys()
    for part in a.parts:
        assert _same(a.parts[part], b.parts[part]), part


def _frozen(layer: nn.Module, scheme: str) -> Any:
    """The layer as quanto itself quantizes it."""
    model = nn.Sequential(layer)
    quanto.quantize(model, weights=quanto.qtypes[scheme])
    quanto.freeze(model)
    return model[0]


@pytest.mark.parametrize("scheme", ["qint8", "qint4", "qint2", "qfloat8"])
@pytest.mark.parametrize("made", ["linear", "conv"])
def test_the_librarys_modules_are_copied(scheme: str, made: str) -> None:
    """torch cannot copy quanto's tensors: `clone` gives floats."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 32) if made == "linear" else nn.Conv2d(16, 32, 3)
    packed = BACKEND.encode(layer.weight.detach(), backends.parse(scheme))
    module = BACKEND.to_library(layer, packed)
    other = copy.deepcopy(nn.ModuleList([module, module]))[1]
    again = BACKEND.from_library(other)
    assert again is not None and type(other) is type(module)
    first = BACKEND.from_library(module)
    assert first is not None
    _assert_same(first, again)
    theirs = {part.data_ptr() for part in again.parts.values()}
    assert not theirs & {part.data_ptr() for part in first.parts.values()}
    x = torch.randn(2, 64) if made == "linear" else torch.randn(2, 16, 8, 8)
    assert torch.equal(other(x), module(x)) and not other.weight.requires_grad


def _saved(module: nn.Module) -> dict[str, Tensor]:
    return {key: value for key, value in module.state_dict().items() if key.startswith("weight")}


def _linear(width: int, out: int = 48, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(width)
    layer = nn.Linear(width, out)
    with torch.no_grad():
        layer.weight[0] *= 20  # outliers
        layer.weight[1] += 1  # a row whose zero lies outside its range: TinyGemm's layout rounds its shift
    return layer.to(dtype)


def _infos(tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    return {
        key: TensorInfo(
            dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape), nbytes=t.numel() * t.element_size()
        )
        for key, t in tensors.items()
    }


def _file(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (safe_open is no dict)


class TestBitEqualToTheLibrary:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("scheme", THEIRS)
    def test_linear(self, scheme: str, width: int, dtype: torch.dtype) -> None:
        layer = _linear(width, dtype=dtype)
        self._compare(scheme, layer)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("channels", [3, 16, 32])
    @pytest.mark.parametrize("scheme", THEIRS)
    def test_conv2d(self, scheme: str, channels: int, dtype: torch.dtype) -> None:
        torch.manual_seed(channels)
        self._compare(scheme, nn.Conv2d(channels, 10, 3, dtype=dtype))

    def test_conv2d_in_channels_last(self) -> None:
        weight = torch.randn(8, 16, 3, 3)
        packed = BACKEND.encode(weight, backends.parse("qint4"))
        last = weight.to(memory_format=torch.channels_last)
        assert not last.is_contiguous()
        _assert_same(packed, BACKEND.encode(last, backends.parse("qint4")))

    @pytest.mark.parametrize("scheme", ["qint8", "qfloat8"])
    def test_a_single_row_has_a_scalar_scale(self, scheme: str) -> None:
        self._compare(scheme, nn.Linear(64, 1))

    @pytest.mark.parametrize("out", [2, 3, 5, 7])
    @pytest.mark.parametrize("scheme", ["qint4", "qint2"])
    def test_rows_that_do_not_fill_a_byte(self, scheme: str, out: int) -> None:
        self._compare(scheme, nn.Linear(96, out))

    def _compare(self, scheme: str, layer: nn.Linear | nn.Conv2d) -> None:
        weight = layer.weight.detach().clone()
        packed = BACKEND.encode(weight, backends.parse(scheme))
        layout = BACKEND.layout(backends.parse(scheme), tuple(weight.shape), packed.spec.dtype)
        assert _infos(packed.parts) == {
            part: TensorInfo(dtype=row.dtype, shape=row.shape, nbytes=row.nbytes) for part, row in layout.items()
        }
        theirs = _frozen(layer, scheme)
        saved = _saved(theirs)
        assert saved.keys() == {BACKEND.key("weight", part, packed.spec) for part in packed.parts}
        for part, tensor in packed.parts.items():
            assert _same(tensor, saved[BACKEND.key("weight", part, packed.spec)]), part
        inside = BACKEND.from_library(theirs)
        assert inside is not None
        _assert_same(inside, packed)
        assert _same(BACKEND.decode(packed, weight.dtype), theirs.weight.dequantize())

    def test_tinygemm_is_among_what_was_compared(self) -> None:
        """Else the tests above would say nothing about the layout that quanto chooses for bf16 and groups of 128."""
        frozen = _frozen(_linear(256, dtype=torch.bfloat16), "qint4")
        assert type(frozen.weight).__name__ == "TinyGemmWeightQBitsTensor"
        scale, shift = quanto.MaxOptimizer()(
            _linear(256, dtype=torch.bfloat16).weight.data, quanto.qint4, axis=0, group_size=128
        )
        saved = frozen.state_dict()
        assert torch.equal(saved["weight._scale"], scale)
        assert not torch.equal(saved["weight._shift"], shift)  # lossy, and our bits follow it

    def test_integer_shifts_of_other_optimizers(self) -> None:
        weight = _linear(256).weight.detach()
        scale, shift = quanto.MaxOptimizer()(weight, quanto.qint4, axis=0, group_size=128, zeropoint=True)
        assert shift.dtype == torch.uint8
        theirs = quanto.quantize_weight(weight, quanto.qint4, 0, scale, shift, group_size=128)
        tensors: dict[str, Tensor] = {}
        theirs.save_to_state_dict(tensors, "proj.weight.", False)
        (found,) = BACKEND.find(_infos(tensors), {})
        packed = BACKEND.read(found, tuple(weight.shape), tensors.__getitem__)
        assert _same(BACKEND.decode(packed, torch.float32), theirs.dequantize())


class TestDecode:
    @pytest.mark.parametrize("scheme", [*THEIRS, "qint3"])
    def test_slabs_and_strides_change_nothing(self, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from sdquant.utils import chunk_sizes

        packed = BACKEND.encode(_linear(384, out=21, dtype=torch.bfloat16).weight.data, backends.parse(scheme))
        for dtype in DTYPES:
            whole = BACKEND.decode(packed, dtype)
            strided = torch.empty(384, 21, dtype=dtype).t()
            BACKEND.decode_into(packed, strided)
            with monkeypatch.context() as patch:
                patch.setattr(chunk_sizes, "CPU", 1000)
                small = BACKEND.decode(packed, dtype)
            assert torch.equal(whole, strided) and torch.equal(whole, small)

    def test_a_row_of_zeros_in_qfloat8(self) -> None:
        weight = _linear(64).weight.detach().clone()
        weight[3] = 0
        packed = BACKEND.encode(weight, backends.parse("qfloat8"))
        back = BACKEND.decode(packed, torch.float32)
        assert torch.equal(back[3], torch.zeros(64))
        theirs = _frozen(_with(weight), "qfloat8").weight.dequantize()
        assert theirs[3].isnan().all()  # the library's bug, which is why ours differs there
        keep = torch.arange(len(weight)) != 3
        assert torch.equal(back[keep], theirs[keep])


def _with(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone())
    return layer


class TestModules:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("scheme", THEIRS)
    def test_conv2d_and_linear_from_meta(self, scheme: str, dtype: torch.dtype) -> None:
        for layer, x in (
            (_linear(256, dtype=dtype), torch.randn(3, 256).to(dtype)),
            (nn.Conv2d(16, 8, 3, stride=2, padding=1, groups=2, dtype=dtype), torch.randn(1, 16, 9, 9).to(dtype)),
        ):
            weight = layer.weight.detach().clone()
            packed = BACKEND.encode(weight, backends.parse(scheme))
            layer.weight = nn.Parameter(weight.to("meta"))
            layer.eval()
            made = BACKEND.to_library(layer, packed, backends.parse(scheme))
            assert type(made).__name__ == ("QLinear" if isinstance(layer, nn.Linear) else "QConv2d")
            assert made.bias is layer.bias and not made.training
            assert made.weight.shape == weight.shape and made.weight.dtype == dtype and made.weight.device.type == "cpu"
            inside = BACKEND.from_library(made)
            assert inside is not None
            _assert_same(inside, packed)
            layer.weight = nn.Parameter(BACKEND.decode(packed, dtype))
            with torch.no_grad():
                assert torch.allclose(made(x).float(), layer(x).float(), atol=0.05, rtol=0.03)
            tensors = {f"proj.{key}": value for key, value in made.state_dict().items() if key != "bias"}
            written = BACKEND.write("proj.weight", packed)
            assert tensors.keys() == written.keys()
            assert all(_same(tensors[key], written[key]) for key in written)

    def test_what_is_not_quantos(self) -> None:
        assert BACKEND.from_library(nn.Linear(4, 4)) is None
        model = nn.Sequential(nn.Linear(64, 8))
        quanto.quantize(model, weights=quanto.qint8)
        assert BACKEND.from_library(model[0]) is None  # not frozen: it still holds the float weight

    @pytest.mark.parametrize("layer", [nn.Conv1d(16, 8, 3), nn.Conv3d(16, 8, 3)], ids=["conv1d", "conv3d"])
    def test_layers_that_quanto_lacks(self, layer: nn.Conv1d | nn.Conv3d) -> None:
        packed = BACKEND.encode(layer.weight.data, backends.parse("qint8"))
        with pytest.raises(NotImplementedError, match="QLinear and QConv2d"):
            BACKEND.to_library(layer, packed)

    def test_qint3_has_no_library_module(self) -> None:
        layer = nn.Linear(128, 8)
        with pytest.raises(NotImplementedError, match="3-bit"):
            BACKEND.to_library(layer, BACKEND.encode(layer.weight.data, backends.parse("qint3")))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 64), nn.Sequential(nn.Conv2d(32, 8, 3), nn.Linear(96, 2)), nn.LayerNorm(4))


class TestFiles:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("with_map", [False, True], ids=["sizes alone", "map"])
    @pytest.mark.parametrize("scheme", [*THEIRS, "qfloat8_e5m2"])
    def test_what_quanto_saved(self, scheme: str, with_map: bool, dtype: torch.dtype, tmp_path: Path) -> None:
        model = _model().to(dtype)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        quanto.quantize(model, weights=quanto.qtypes[scheme])
        quanto.freeze(model)
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        (tmp_path / "quantization_map.json").write_text(json.dumps(quanto.quantization_map(model)))
        tensors = _file(tmp_path / "model.safetensors")
        config = {"quantization_map": json.loads((tmp_path / "quantization_map.json").read_text())} if with_map else {}
        rows = BACKEND.find(_infos(tensors), config)
        assert sorted(row.name for row in rows) == ["0.weight", "1.0.weight", "1.1.weight"]
        claimed = {key for row in rows for key in (*row.keys.values(), *row.extra)}
        assert set(tensors) - claimed == {"0.bias", "1.0.bias", "1.1.bias", "2.weight", "2.bias"}
        assert len({row.evidence for row in rows}) == 1
        for row in rows:
            # 1.1 has two rows, which do not show their bits: it follows its neighbours.
            assert row.scheme == backends.scheme(scheme.removesuffix("_e5m2")).name
            module: Any = model.get_submodule(row.name.removesuffix(".weight"))
            inside = BACKEND.from_library(module)
            assert inside is not None
            packed = BACKEND.read(row, shapes[row.name], tensors.__getitem__)
            _assert_same(packed, inside)
            assert _same(BACKEND.decode(packed, dtype), module.weight.dequantize())
            again = BACKEND.from_library(BACKEND.to_library(_like(module), packed))
            assert again is not None
            _assert_same(again, packed)

    @pytest.mark.filterwarnings("ignore:.*Quanto.*deprecated:FutureWarning")
    @pytest.mark.parametrize("word", ["int8", "float8", "int4", "int2"])
    def test_what_diffusers_saved(self, word: str, tmp_path: Path) -> None:
        from diffusers import FluxTransformer2DModel, QuantoConfig

        torch.manual_seed(0)
        model = FluxTransformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=32, num_attention_heads=4,
            joint_attention_dim=64, pooled_projection_dim=32, axes_dims_rope=(8, 12, 12),
        )  # fmt: skip
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        model.save_pretrained(tmp_path / "float")
        loaded = FluxTransformer2DModel.from_pretrained(
            tmp_path / "float", quantization_config=QuantoConfig(weights_dtype=word), torch_dtype=torch.bfloat16
        )
        loaded.save_pretrained(tmp_path / "quanto")
        tensors = _file(tmp_path / "quanto" / "diffusion_pytorch_model.safetensors")
        config = json.loads((tmp_path / "quanto" / "config.json").read_text())
        scheme = {"int8": "qint8", "float8": "qfloat8", "int4": "qint4", "int2": "qint2"}[word]
        ours = BACKEND.config(backends.parse(scheme), "bfloat16")
        assert ours is not None
        assert ours.items() <= {**config["quantization_config"], "modules_to_not_convert": None}.items()
        rows = BACKEND.find(_infos(tensors), config)
        linears = {name for name, module in loaded.named_modules() if isinstance(module, nn.Linear)}
        assert {row.name for row in rows} == {f"{name}.weight" for name in linears}
        original = model.to(torch.bfloat16).state_dict()
        for row in rows:
            assert row.scheme == scheme
            inside = BACKEND.from_library(loaded.get_submodule(row.name.removesuffix(".weight")))
            assert inside is not None
            packed = BACKEND.read(row, shapes[row.name], tensors.__getitem__)
            _assert_same(packed, inside)
            _assert_same(packed, BACKEND.encode(original[row.name], backends.parse(scheme)))

    @pytest.mark.parametrize("scheme", THEIRS)
    def test_quanto_reads_what_was_written(self, scheme: str) -> None:
        model, x = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 8)), torch.randn(2, 256)
        tensors = {key: tensor for key, tensor in model.state_dict().items() if key.endswith("bias")}
        for name in ("0.weight", "1.weight"):
            packed = BACKEND.encode(model.state_dict()[name], backends.parse(scheme))
            tensors |= BACKEND.write(name, packed)
        row = {"weights": quanto.qtypes[scheme].name, "activations": "none"}
        with torch.device("meta"):
            theirs = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 8))
        quanto.requantize(theirs, dict(tensors), {"0": row, "1": row})
        quanto.quantize(model, weights=quanto.qtypes[scheme])
        quanto.freeze(model)
        with torch.no_grad():
            assert torch.equal(theirs(x), model(x))

    def test_two_rows_alone_follow_the_config(self) -> None:
        weight = torch.randn(2, 64)
        for scheme, word in (("qint4", "int4"), ("qint2", "int2")):
            tensors = BACKEND.write("a.weight", BACKEND.encode(weight, backends.parse(scheme)))
            config = {"quantization_config": {"quant_method": "quanto", "weights_dtype": word}}
            assert [row.scheme for row in BACKEND.find(_infos(tensors), config)] == [scheme]
            transformers = {"quantization_config": {"quant_method": "quanto", "weights": word}}
            assert [row.scheme for row in BACKEND.find(_infos(tensors), transformers)] == [scheme]
            named = {"quantization_map": {"a": {"weights": scheme, "activations": "none"}}}
            assert [row.scheme for row in BACKEND.find(_infos(tensors), named)] == [scheme]
        (row,) = BACKEND.find(_infos(tensors), {})
        assert row.scheme == "qint4" and "4 assumed" in row.evidence

    def test_a_file_of_several_schemes(self) -> None:
        tensors: dict[str, Tensor] = {}
        for scheme in (*THEIRS, "qint3"):
            tensors |= BACKEND.write(f"{scheme}.weight", BACKEND.encode(_linear(256).weight, backends.parse(scheme)))
        rows = BACKEND.find(_infos(tensors), {})
        assert {row.name: row.scheme for row in rows} == {f"{s}.weight": s for s in (*THEIRS, "qint3")}

    def test_other_files_are_left_alone(self) -> None:
        others = {"a.weight": torch.zeros(8, 8), "a.weight_scale": torch.ones(8), "b._data": torch.zeros(3)}
        assert BACKEND.find(_infos(others), {}) == []


def _like(module: nn.Module) -> nn.Module:
    """The float layer, on the meta device, that one of quanto's stands for."""
    if isinstance(module, nn.Linear):
        return nn.Linear(module.in_features, module.out_features, device="meta")
    assert isinstance(module, nn.Conv2d)
    return nn.Conv2d(module.in_channels, module.out_channels, 3, device="meta")


def _rows_cut(t: dict[str, Tensor], key: str) -> None:
    t[key] = t[key][:-1]


BROKEN: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "no scale": lambda t: t.pop("p.weight._scale"),
    "no shift": lambda t: t.pop("p.weight._shift"),
    "rows missing": lambda t: _rows_cut(t, "p.weight._data._data"),
    "scales missing": lambda t: _rows_cut(t, "p.weight._scale"),
    "shift of another dtype": lambda t: t.update({"p.weight._shift": t["p.weight._shift"].half()}),
    "scale of integers": lambda t: t.update({"p.weight._scale": t["p.weight._scale"].int()}),
    "codes of another dtype": lambda t: t.update({"p.weight._data._data": t["p.weight._data._data"].to(torch.int8)}),
    "flat codes": lambda t: t.update({"p.weight._data._data": t["p.weight._data._data"].flatten()}),
}


class TestBadInput:
    @pytest.mark.parametrize("what", BROKEN)
    def test_damaged_files(self, what: str) -> None:
        tensors = BACKEND.write("p.weight", BACKEND.encode(_linear(256).weight, backends.parse("qint4")))
        BROKEN[what](tensors)
        named = {"quantization_map": {"p": {"weights": "qint4", "activations": "none"}}}
        for config in ({}, named):
            (row,) = BACKEND.find(_infos(tensors), config)
            with pytest.raises(BadFileError, match=r"p\.weight"):
                BACKEND.read(row, (48, 256), tensors.__getitem__)

    @pytest.mark.parametrize("scheme", [*THEIRS, "qint3"])
    def test_another_models_shape(self, scheme: str) -> None:
        tensors = BACKEND.write("p.weight", BACKEND.encode(_linear(256).weight, backends.parse(scheme)))
        (row,) = BACKEND.find(_infos(tensors), {})
        for shape in ((48, 128), (96, 256), (256, 40), (48, 256, 1, 1, 2)):
            with pytest.raises(BadFileError, match=r"p\.weight"):
                BACKEND.read(row, shape, tensors.__getitem__)

    def test_a_map_that_contradicts_the_tensors(self) -> None:
        tensors = BACKEND.write("p.weight", BACKEND.encode(_linear(256).weight, backends.parse("qint2")))
        (row,) = BACKEND.find(_infos(tensors), {"quantization_map": {"p": {"weights": "qint4"}}})
        with pytest.raises(BadFileError, match="qint4"):
            BACKEND.read(row, (48, 256), tensors.__getitem__)

    @pytest.mark.parametrize(
        ("scheme", "shape", "dtype", "why"),
        [
            ("qint8", (8, 8), torch.float64, "float64"),
            ("qint8", (8,), torch.float32, "two dimensions"),
            ("qint8", (0, 8), torch.float32, "two dimensions"),
            ("qint4", (1, 64), torch.float32, "single row"),
            ("qint3", (5, 27), torch.float32, "135 weights"),
        ],
    )
    def test_what_does_not_fit(self, scheme: str, shape: tuple[int, ...], dtype: torch.dtype, why: str) -> None:
        spec = backends.parse(scheme)
        with pytest.raises(Unfit, match=why):
            BACKEND.encode(torch.zeros(shape, dtype=dtype), spec)
        with pytest.raises(Unfit, match=why):
            BACKEND.layout(spec, shape, str(dtype).removeprefix("torch."))


class TestQint3:
    def test_eight_codes_in_three_bytes(self) -> None:
        codes = torch.randint(0, 8, (7, 96), dtype=torch.uint8)
        packed = pack3(codes)
        assert packed.dtype == torch.uint8 and packed.shape == (7, 36)
        assert torch.equal(unpack3(packed), codes)
        # the layout itself: code k in bits 3k to 3k + 2 of a little-endian number of 24 bits
        number = sum(int(code) << 3 * k for k, code in enumerate(codes[0, :8]))
        assert bytes(packed[0, :3].tolist()) == number.to_bytes(3, "little")

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_codes_and_scales_are_quantos(self, dtype: torch.dtype) -> None:
        from optimum.quanto.tensor.qtype import qint

        weight = _linear(256, dtype=dtype).weight.data
        packed = BACKEND.encode(weight, backends.parse("qint3"))
        scale, shift = quanto.MaxOptimizer()(weight, qint(3), axis=0, group_size=128)
        codes = torch.ops.quanto.quantize_affine(weight, 3, 0, 128, scale, shift)
        assert _same(packed.parts["scale"], scale) and _same(packed.parts["shift"], shift)
        assert torch.equal(unpack3(packed.parts["data"]), codes)
        assert _same(BACKEND.decode(packed, dtype), (scale * codes - shift).reshape(weight.shape))

    @pytest.mark.parametrize(
        ("shape", "wanted", "group"),
        [
            ((64, 32), 128, 128),  # groups of four rows
            ((1, 128), 128, 128),
            ((6, 16), 128, 96),
            ((3, 64), 128, 96),
            ((64, 256), 64, 64),
            ((64, 256), 32, 32),
            ((5, 32), 64, 32),
            ((32, 9, 3, 3), 128, 96),  # 2592 weights
        ],
    )
    def test_groups(self, shape: tuple[int, ...], wanted: int, group: int) -> None:
        weight = torch.randn(shape)
        packed = BACKEND.encode(weight, backends.parse(f"qint3,group_size={wanted}"))
        assert packed.spec.details == {"group_size": group}
        assert packed.parts["scale"].shape == (weight.numel() // group, 1)
        span = weight.view(-1, group).amax(1) - weight.view(-1, group).amin(1)
        error = (BACKEND.decode(packed, torch.float32) - weight).view(-1, group).abs().amax(1)
        assert (error <= span / 7 * 0.501).all()

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_bytes(self, dtype: torch.dtype) -> None:
        packed = BACKEND.encode(_linear(1152, dtype=dtype).weight, backends.parse("qint3"))
        assert packed.nbytes / (2 * 48 * 1152) <= 0.22

    @pytest.mark.parametrize("kind", ["normal", "heavy tails", "outlier columns"])
    def test_error_lies_between_two_and_four_bits(self, kind: str) -> None:
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(128, 512, generator=generator) * 0.03
        if kind == "heavy tails":
            weight = weight * (1 + torch.rand(128, 512, generator=generator) ** 8 * 10)
        if kind == "outlier columns":
            weight[:, ::100] *= 8
        error = {}
        for scheme in ("qint4", "qint3", "qint2"):
            packed = BACKEND.encode(weight, backends.parse(scheme))
            error[scheme] = float((BACKEND.decode(packed, torch.float32) - weight).norm() / weight.norm())
        assert error["qint4"] * 1.5 < error["qint3"] < error["qint2"] / 1.5

    def test_the_file_says_three_bits(self) -> None:
        for shape, option in (((48, 256), ""), ((1, 128), ""), ((2, 64), ""), ((64, 64), ",group_size=32")):
            packed = BACKEND.encode(torch.randn(shape), backends.parse("qint3" + option))
            tensors = BACKEND.write("p.weight", packed)
            (row,) = BACKEND.find(_infos(tensors), {})
            assert row.scheme == "qint3" and row.details == packed.spec.details
            _assert_same(BACKEND.read(row, shape, tensors.__getitem__), packed)


class TestExtension:
    @pytest.mark.parametrize("bits", [4, 2])
    def test_unpack_undoes_the_librarys_packing(self, bits: int) -> None:
        from optimum.quanto.tensor.packed import pack_weights

        codes = torch.randint(0, 2**bits, (8, 3, 2), dtype=torch.uint8)
        packed = pack_weights(codes, bits)
        assert torch.equal(Unpacker.unpack(packed, bits), codes)
        assert torch.equal(torch.ops.quanto.unpack(packed, bits), codes)  # where quanto's tensors call it
        assert Unpacker.unpack(packed[:0], bits).shape == (0, 3, 2)

    def test_a_loaded_extension_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from optimum.quanto.library.extensions import cpp

        loaded = object()
        monkeypatch.setattr(cpp.ext, "_lib", loaded)
        without_compiler()
        assert cpp.ext._lib is loaded

    def test_a_stale_lock_and_no_compiler(self, tmp_path: Path) -> None:
        """A process of its own, its PATH empty: quanto alone fails there, and with a lock it would wait for ever."""
        script = """
            import pathlib, sys, time, torch
            from torch import nn
            from optimum.quanto.library.extensions import cpp
            build = pathlib.Path(sys.argv[1])
            cpp.ext.build_directory = str(build)
            try:
                cpp.ext.lib
            except Exception as error:
                print("quanto alone:", type(error).__name__)
            (build / "lock").touch()
            from sdquant import backends
            started = time.monotonic()
            for scheme in ("qint4", "qint2"):
                spec, backend = backends.parse(scheme), backends.of_scheme(scheme)
                layer = nn.Linear(256, 32)
                packed = backend.encode(layer.weight.data, spec)
                out = backend.to_library(layer, packed, spec)(torch.randn(3, 256))
                assert out.shape == (3, 32) and out.isfinite().all()
            assert sorted(p.name for p in build.iterdir()) == ["lock"]
            print("forward:", time.monotonic() - started < 5)
        """
        (tmp_path / "build").mkdir()
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "build")],
            env={**os.environ, "PATH": "", "OMP_NUM_THREADS": "1", "CXX": "/nonexistent"},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=240,  # importing quanto imports transformers: most of it
        )
        assert done.returncode == 0, done.stderr
        assert "quanto alone: " in done.stdout and "forward: True" in done.stdout
