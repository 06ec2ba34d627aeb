"""The bitsandbytes backend against bitsandbytes itself, against diffusers' files, and against files that lie."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import bitsandbytes
import bitsandbytes.functional as bnb
import pytest
import torch
from torch import Tensor, nn

from sdquant import backends
from sdquant.backends._bnb_library import has_kernel
from sdquant.backends.bnb import _say_float8
from sdquant.core.backend import Packed, TensorInfo
from sdquant.errors import BadFileError, UnsupportedFileError
from sdquant.nn import quantized_layer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BACKEND = backends.get("bnb")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAME = "block.proj.weight"


def _weight(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.05).to(dtype)


def _encode(text: str, weight: Tensor) -> Packed:
    return BACKEND.encode(weight, backends.parse(text))


def _infos(file: dict[str, Tensor]) -> dict[str, TensorInfo]:
    return {
        key: TensorInfo(
            dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape), nbytes=t.numel() * t.element_size()
        )
        for key, t in file.items()
    }


def _read(file: dict[str, Tensor], shape: tuple[int, ...], config: dict[str, Any] | None = None) -> Packed:
    found = BACKEND.find(_infos(file), config or {})
    assert [one.name for one in found] == [NAME]
    assert {*found[0].keys.values(), *found[0].extra} == set(file)
    return BACKEND.read(found[0], shape, file.__getitem__)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


class TestFourBit:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(128, 256), (7, 13), (64, 288), (16, 8, 3, 3)])
    @pytest.mark.parametrize("options", ["", ",double_quant", ",block_size=32", ",block_size=128,double_quant"])
    @pytest.mark.parametrize("scheme", ["nf4", "fp4"])
    def test_codes_and_scales_are_the_librarys(
        self, scheme: str, options: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        weight = _weight(shape, dtype)
        spec = backends.parse(scheme + options)
        packed = BACKEND.encode(weight, spec)
        codes, state = bnb.quantize_4bit(
            weight, blocksize=spec["block_size"], compress_statistics=spec["double_quant"], quant_type=scheme
        )
        assert _same(packed.parts["codes"], codes)
        assert _same(packed.parts["absmax"], state.absmax)
        assert ("nested_absmax" in packed.parts) is state.nested is spec["double_quant"]
        if state.nested:
            assert _same(packed.parts["nested_absmax"], state.state2.absmax)
            assert _same(torch.tensor(packed.spec.details["offset"]), state.offset)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("options", ["", ",double_quant", ",block_size=256"])
    @pytest.mark.parametrize("scheme", ["nf4", "fp4"])
    def test_decode_is_the_librarys(self, scheme: str, options: str, dtype: torch.dtype) -> None:
        # Rows of whole blocks, which the library's CPU kernel gets right; see the next test.
        spec = backends.parse(scheme + options)
        weight = _weight((40, 512), dtype)
        codes, state = bnb.quantize_4bit(
            weight, blocksize=spec["block_size"], compress_statistics=spec["double_quant"], quant_type=scheme
        )
        assert _same(BACKEND.decode(BACKEND.encode(weight, spec), dtype), bnb.dequantize_4bit(codes, state))

    @pytest.mark.parametrize("shape", [(64, 288), (7, 13), (16, 8, 3, 3), (1, 1), (3, 31)])
    @pytest.mark.parametrize("block", [32, 64, 1024, 2048, 4096])
    @pytest.mark.parametrize("scheme", ["nf4", "fp4"])
    def test_decode_of_any_shape_is_code_times_scale(self, scheme: str, block: int, shape: tuple[int, ...]) -> None:
        packed = _encode(f"{scheme},block_size={block}", _weight(shape))
        pairs = packed.parts["codes"].view(-1).int()
        codes = torch.stack((pairs >> 4, pairs & 15), 1).view(-1)[: _weight(shape).numel()]
        scale = packed.parts["absmax"].repeat_interleave(block)[: codes.numel()]
        wanted = (bnb.get_4bit_type(scheme, "cpu")[codes] * scale).view(shape)
        for dtype in DTYPES:
            assert _same(BACKEND.decode(packed, dtype), wanted.to(dtype))

    def test_a_large_weight_is_decoded_in_pieces_without_seams(self) -> None:
        weight = _weight((1025, 1088))  # more than one tile, and the last one is not full
        packed = _encode("nf4", weight)
        codes, state = bnb.quantize_4bit(weight.view(-1, 64), quant_type="nf4")
        assert _same(BACKEND.decode(packed, torch.float32).view(-1, 64), bnb.dequantize_4bit(codes, state))

    def test_decode_into_a_strided_tensor(self) -> None:
        packed = _encode("nf4", _weight((64, 128)))
        out = torch.empty(128, 64).t()
        BACKEND.decode_into(packed, out)
        assert torch.equal(out, BACKEND.decode(packed, torch.float32))

    @pytest.mark.parametrize("options", ["", ",double_quant"])
    def test_written_file_is_the_state_dict_of_the_librarys_module(self, options: str) -> None:
        weight = _weight((64, 128), torch.bfloat16)
        spec = backends.parse("nf4" + options)
        theirs = bitsandbytes.nn.Linear4bit(
            128, 64, bias=False, quant_type="nf4", compress_statistics=spec["double_quant"]
        )
        theirs.weight = bitsandbytes.nn.Params4bit(
            weight, requires_grad=False, quant_type="nf4", compress_statistics=spec["double_quant"]
        )
        wanted = {f"block.proj.{key}": t for key, t in theirs.to("cpu").state_dict().items()}
        written = BACKEND.write(NAME, BACKEND.encode(weight, spec))
        assert written.keys() == wanted.keys()
        for key, tensor in wanted.items():
            assert _same(written[key], tensor), key

    def test_codes_stored_as_bfloat16_are_read(self) -> None:
        packed = _encode("nf4", _weight((64, 128)))
        file = BACKEND.write(NAME, packed)
        file[NAME] = file[NAME].view(-1).view(torch.bfloat16)[:, None]
        assert _same(_read(file, (64, 128)).parts["codes"], packed.parts["codes"])

    @pytest.mark.skipif(not bnb.has_avx512bf16(), reason="only these CPUs make bitsandbytes repack its weights")
    def test_weights_repacked_by_a_forward_are_read_back(self) -> None:
        packed = _encode("nf4", _weight((64, 128)))
        module: Any = BACKEND.to_library(nn.Linear(128, 64), packed).eval()
        module.support_avx512bf16_for_cpu = True  # as in a module that another tool made
        # The repacking writes into the QuantState but not into our tensors, which it shares: take the codes along.
        with torch.no_grad():
            module(torch.randn(2, 128))
        back = BACKEND.from_library(module)
        assert back is not None and back.spec.details == packed.spec.details
        assert _same(back.parts["codes"], packed.parts["codes"])
        assert _same(back.parts["absmax"], packed.parts["absmax"].bfloat16().float())
        file = {f"block.proj.{key}": t for key, t in module.state_dict().items() if key != "bias"}
        assert file["block.proj.weight.absmax"].ndim == 2  # bitsandbytes saves them in the kernel's order
        assert _same(_read(file, (64, 128)).parts["absmax"], back.parts["absmax"])


def _json(values: dict[str, Any]) -> Tensor:
    return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)


def _claim(**changed: Any) -> Callable[[dict[str, Tensor]], None]:
    def change(file: dict[str, Tensor]) -> None:
        key = f"{NAME}.quant_state.bitsandbytes__nf4"
        claims = json.loads(bytes(file[key].tolist())) | changed
        file[key] = _json({field: value for field, value in claims.items() if value != "gone"})

    return change


def _put(suffix: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def put(file: dict[str, Tensor]) -> None:
        file[NAME + suffix] = change(file[NAME + suffix])

    return put


def _drop(suffix: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda file: file.__delitem__(NAME + suffix)


STATE = ".quant_state.bitsandbytes__nf4"
LIES: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "truncated absmax": (_put(".absmax", lambda t: t[:-1]), "absmax"),
    "absmax of another dtype": (_put(".absmax", lambda t: t.int()), "absmax"),
    "truncated nested absmax": (_put(".nested_absmax", lambda t: t[:0]), "nested_absmax"),
    "NaN in the scales": (_put(".nested_absmax", lambda t: t * float("nan")), "nested_absmax"),
    "truncated codes": (_put("", lambda t: t[:-1]), "bytes"),
    "codes of another dtype": (_put("", lambda t: t.long()), "codes"),
    "wrong code table": (_put(".quant_map", lambda t: t.flip(0)), "quant_map"),
    "wrong nested code table": (_put(".nested_quant_map", lambda t: t * 2), "nested_quant_map"),
    "no code table": (_drop(".quant_map"), "quant_map"),
    "no absmax": (_drop(".absmax"), "absmax"),
    "no nested absmax": (_drop(".nested_absmax"), "disagree"),
    "unknown dtype": (_claim(dtype="load"), "dtype"),
    "dtype that is not a string": (_claim(dtype=["float32"]), "dtype"),
    "block size that does not exist": (_claim(blocksize=48), "blocksize"),
    "block size of another file": (_claim(blocksize=128), "absmax"),
    "no block size": (_claim(blocksize="gone"), "blocksize"),
    "another quant type": (_claim(quant_type="fp4"), "quant_type"),
    "another shape": (_claim(shape=[128, 64]), "shape"),
    "infinite offset": (_claim(nested_offset=float("inf")), "nested_offset"),
    "offset that is not a number": (_claim(nested_offset="1"), "nested_offset"),
    "another nested block size": (_claim(nested_blocksize=64), "nested_blocksize"),
    "no JSON": (_put(STATE, lambda t: t[:-3]), "JSON"),
    "JSON that is not an object": (_put(STATE, lambda t: _json([])), "object"),  # type: ignore[arg-type]
    "description that is too long": (_put(STATE, lambda t: t.repeat(100)), "quant_state"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_four_bit_file_that_lies_is_refused(lie: str) -> None:
    file = BACKEND.write(NAME, _encode("nf4,double_quant", _weight((64, 128))))
    assert _read(dict(file), (64, 128)).spec.details["block_size"] == 64
    change, word = LIES[lie]
    change(file)
    with pytest.raises(BadFileError, match=word) as error:
        _read(file, (64, 128))
    assert NAME in error.value.what


class TestInt8:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(128, 256), (7, 13), (16, 8, 3, 3)])
    def test_codes_and_scales_are_the_librarys(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        weight = _weight(shape, dtype)
        packed = _encode("bnb-int8", weight)
        codes, scb, _ = bnb.int8_vectorwise_quant(weight.reshape(shape[0], -1).half())
        assert _same(packed.parts["codes"], codes) and _same(packed.parts["scb"], scb)
        wanted = bnb.int8_vectorwise_dequant(codes, scb).view(shape)
        for out in DTYPES:
            assert _same(BACKEND.decode(packed, out), wanted.to(out))

    def test_written_file_is_the_state_dict_of_the_librarys_module(self) -> None:
        weight = _weight((64, 128), torch.bfloat16)
        theirs = bitsandbytes.nn.Linear8bitLt(128, 64, bias=False, has_fp16_weights=False)
        theirs.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        wanted = {f"block.proj.{key}": t for key, t in theirs.to("cpu").state_dict().items()}
        written = BACKEND.write(NAME, _encode("bnb-int8", weight))
        assert written.keys() == wanted.keys()
        assert all(_same(written[key], tensor) for key, tensor in wanted.items())

    @pytest.mark.parametrize(
        ("key", "change"),
        [
            ("block.proj.SCB", lambda t: t[:-1]),
            ("block.proj.SCB", lambda t: t.int()),
            ("block.proj.SCB", lambda t: t * float("inf")),
            ("block.proj.weight", lambda t: t[:, :-1]),
            ("block.proj.weight_format", lambda t: t + 1),
        ],
    )
    def test_a_file_that_lies_is_refused(self, key: str, change: Callable[[Tensor], Tensor]) -> None:
        file = BACKEND.write(NAME, _encode("bnb-int8", _weight((64, 128))))
        file[key] = change(file[key])
        with pytest.raises(BadFileError, match=key):
            _read(file, (64, 128))


class TestFp8:
    def test_the_librarys_kernel_only_where_it_has_one(self) -> None:
        # On Macs it has none that decodes into a given tensor, and said so at the first forward.
        assert has_kernel("dequantize_4bit", "cpu") and not has_kernel("dequantize_blockwise.out", "mps")

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(128, 256), (7, 13), (16, 8, 3, 3)])
    def test_blockwise_is_the_librarys(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        weight = _weight(shape, dtype)
        packed = _encode("fp8", weight)
        assert packed.spec.details["packing"] == "blockwise"
        codes, state = bnb.quantize_blockwise(weight, code=bnb.create_fp8_map(True, 4, 3, 8), blocksize=256)
        assert _same(packed.parts["codes"], codes.view(-1)) and _same(packed.parts["absmax"], state.absmax)
        for out in DTYPES:
            state.dtype = out
            assert _same(BACKEND.decode(packed, out), bnb.dequantize_blockwise(codes, state))

    def test_a_large_weight_is_decoded_in_pieces_without_seams(self) -> None:
        weight = _weight((1025, 1030))
        codes, state = bnb.quantize_blockwise(weight, code=bnb.create_fp8_map(True, 4, 3, 8), blocksize=256)
        packed = _encode("fp8", weight)
        assert _same(BACKEND.decode(packed, torch.float32), bnb.dequantize_blockwise(codes, state))

    def test_without_bitsandbytes_it_is_float8_and_says_so(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        find_spec = importlib.util.find_spec
        missing = {"bitsandbytes"}
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name in missing else find_spec(name, *rest)
        )
        _say_float8.cache_clear()  # said once per process
        with caplog.at_level(logging.WARNING, logger="sdquant"):
            packed = _encode("fp8", _weight((32, 64)))
        assert packed.spec.details["packing"] == "float8"
        assert "bitsandbytes is not installed" in caplog.text
        assert packed.parts["codes"].dtype == torch.float8_e4m3fn

    @pytest.mark.parametrize("shape", [(32, 64), (16, 8, 3, 3)])
    def test_float8_rows(self, shape: tuple[int, ...]) -> None:
        weight = _weight(shape)
        packed = _encode("fp8,packing=float8", weight)
        assert packed.parts["scale"].shape == (shape[0],) + (1,) * (len(shape) - 1)
        assert _same(BACKEND.decode(packed, torch.float32), packed.parts["codes"].float() * packed.parts["scale"])
        assert _same(packed.parts["scale"].flatten(), weight.flatten(1).abs().amax(1) / 448)
        file = BACKEND.write(NAME, packed)
        assert file.keys() == {NAME, "block.proj.scale_weight"}
        back = _read(file, shape)
        assert all(_same(back.parts[part].float(), packed.parts[part].float()) for part in packed.parts)

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
    def test_plain_float8_is_a_cast(self, dtype: torch.dtype) -> None:
        codes = _weight((32, 64)).to(dtype)
        packed = _read({NAME: codes}, (32, 64))
        for out in DTYPES:
            assert _same(BACKEND.decode(packed, out), codes.to(out))

    @pytest.mark.parametrize("spelling", ["scale_weight", "weight_scale", "weight_scale_inv"])
    @pytest.mark.parametrize("scale", [(), (1,), (1, 1), (32,), (32, 1)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_every_spelling_multiplies(self, spelling: str, scale: tuple[int, ...], dtype: torch.dtype) -> None:
        codes = (_weight((32, 64)) * 1000).to(torch.float8_e4m3fn)
        factor = torch.rand(scale, generator=torch.Generator().manual_seed(1)).to(dtype) + 0.1
        file = {NAME: codes, f"block.proj.{spelling}": factor}
        back = BACKEND.decode(_read(file, (32, 64)), torch.float32)
        assert torch.equal(back, codes.float() * factor.float().reshape(-1, 1))

    def test_comfyui_markers_and_hints_belong_to_the_weights(self) -> None:
        codes = _weight((32, 64)).to(torch.float8_e4m3fn)
        old = {
            "scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn),
            NAME: codes,
            "block.proj.scale_weight": torch.tensor(0.5),
            "block.proj.scale_input": torch.tensor(2.0),
        }
        new = {
            NAME: codes,
            "block.proj.weight_scale": torch.tensor(0.5),
            "block.proj.input_scale": torch.tensor(2.0),
            "block.proj.comfy_quant": _json({"format": "float8_e4m3fn"}),
        }
        for file in (old, new):
            assert torch.equal(BACKEND.decode(_read(file, (32, 64)), torch.float32), codes.float() * 0.5)

    @pytest.mark.parametrize(
        ("extra", "word"),
        [
            ({"scale_weight": torch.ones(3, 4)}, "scale_weight"),
            ({"scale_weight": torch.ones(4, 4)}, "scale_weight"),
            ({"scale_weight": torch.ones(64)}, "scale_weight"),
            ({"scale_weight": torch.ones(1, 64)}, "scale_weight"),
            ({"weight_scale_inv": torch.ones(1, 1, 2)}, "weight_scale_inv"),
            ({"scale_weight": torch.ones(32, dtype=torch.uint8)}, "scale_weight"),
            ({"scale_weight": torch.tensor(float("nan"))}, "scale_weight"),
            ({"scale_weight": torch.ones(1), "weight_scale": torch.ones(1)}, "one scale"),
            ({"scale": torch.ones(32)}, "looks like a scale"),
            ({"weight.scales": torch.ones(32)}, "looks like a scale"),
            ({"weight_scale": torch.ones(1), "weight_scalar": torch.ones(1)}, "looks like a scale"),
            ({"weight_scale": torch.ones(1), "comfy_quant": _json({"format": "mxfp8"})}, "mxfp8"),
            ({"weight_scale": torch.ones(1), "comfy_quant": _json({"format": "nvfp4"})}, "nvfp4"),
            ({"comfy_quant": _json({"format": "mxfp8"})}, "mxfp8"),
            ({"comfy_quant": torch.tensor([1, 2], dtype=torch.uint8)}, "JSON"),
        ],
    )
    def test_no_scale_is_ignored(self, extra: dict[str, Tensor], word: str) -> None:
        file = {NAME: _weight((32, 64)).to(torch.float8_e4m3fn)}
        file |= {f"block.proj.{key}": tensor for key, tensor in extra.items()}
        # What looks like a scale may be a good one, of a format that is not read.
        kind = UnsupportedFileError if word == "looks like a scale" else BadFileError
        with pytest.raises(kind, match=word):
            _read(file, (32, 64))

    def test_what_is_not_ours_is_left_alone(self) -> None:
        codes = _weight((32, 64)).to(torch.float8_e4m3fn)
        others = {
            "norm.weight": codes[0],  # a norm in float8 is a plain tensor
            "proj.bias": codes[0],
            "quanto.weight._data": codes,
            "quanto.weight._scale": torch.ones(32, 1),
            "ao.weight": torch.ones(4, 4, dtype=torch.int8),
            "ao.weight_scale": torch.ones(4),
        }
        assert BACKEND.find(_infos(others), {}) == []
        sdnq = {"proj.weight": codes, "proj.scale": torch.ones(32, 1)}
        assert BACKEND.find(_infos(sdnq), {"quantization_config": {"quant_method": "sdnq"}}) == []


def test_import_is_quiet_and_the_logger_is_left_as_it_was() -> None:
    code = (
        "import logging, sys\n"
        "from sdquant.backends.bnb import BACKEND\n"
        "assert not {'torch', 'bitsandbytes'} & set(sys.modules)\n"
        "from sdquant.backends._bnb_library import library\n"
        "library()\n"
        "assert logging.getLogger('bitsandbytes.backends.cpu.ops').level == logging.NOTSET"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class TestLibraryModules:
    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(64, 128), (48, 288), (10, 70)])
    @pytest.mark.parametrize("name", ["nf4", "fp4", "nf4,double_quant", "nf4,block_size=4096", "bnb-int8"])
    def test_module_computes_like_the_plain_layer_and_keeps_its_bits(
        self, name: str, shape: tuple[int, int], dtype: torch.dtype, training: bool
    ) -> None:
        torch.manual_seed(0)
        layer = nn.Linear(shape[1], shape[0], dtype=dtype)
        spec = backends.parse(name)
        packed = BACKEND.encode(layer.weight.data, spec)
        kept = {part: tensor.clone() for part, tensor in packed.parts.items()}
        empty = nn.Linear(shape[1], shape[0], dtype=dtype, device="meta").train(training)
        empty.bias = layer.bias
        module = BACKEND.to_library(empty, packed, spec)
        assert module.training is training and isinstance(module, nn.Linear)
        x = torch.randn(2, 5, shape[1], dtype=dtype)
        with torch.no_grad():
            out, wanted = module(x), quantized_layer(layer, packed)(x)
            again = module(x)
        assert out.dtype == dtype and torch.equal(out, again)
        assert (out - wanted).float().norm() / wanted.float().norm() < 0.02
        back = BACKEND.from_library(module)
        assert back is not None and back.spec == packed.spec
        assert all(_same(back.parts[part], kept[part]) for part in kept)

    def test_compute_dtype_is_used(self) -> None:
        layer = nn.Linear(128, 64)
        spec = backends.parse("nf4,compute_dtype=bfloat16")
        packed = BACKEND.encode(layer.weight.data, spec)
        x = torch.randn(3, 128)
        with torch.no_grad():
            half = BACKEND.to_library(layer, packed, spec)(x)
            full = BACKEND.to_library(layer, packed)(x)
        assert half.dtype == torch.float32 and torch.equal(half, half.bfloat16().float())
        assert not torch.equal(half, full)

    @pytest.mark.parametrize("name", ["nf4,double_quant", "bnb-int8"])
    def test_bits_survive_a_move_of_the_model_and_a_change_of_dtype(self, name: str) -> None:
        layer = nn.Linear(128, 64)
        packed = _encode(name, layer.weight.data)
        model = nn.Sequential(BACKEND.to_library(layer, packed, backends.parse(name))).eval()
        x = torch.randn(3, 128)
        with torch.no_grad():
            before = model(x)
            model.to("cpu").half()
            after = model(x.half())
        assert (before - after.float()).norm() / before.norm() < 0.01
        back = BACKEND.from_library(model[0])
        assert back is not None
        assert all(_same(back.parts[part], packed.parts[part]) for part in packed.parts)

    def test_other_modules_and_float_weights_are_not_packed(self) -> None:
        assert BACKEND.from_library(nn.Linear(4, 4)) is None
        assert BACKEND.from_library(bitsandbytes.nn.Linear4bit(64, 64)) is None
        assert BACKEND.from_library(bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False)) is None

    def test_no_log_line_at_every_forward(self, caplog: pytest.LogCaptureFixture) -> None:
        layer = nn.Linear(128, 64, dtype=torch.float16)
        with caplog.at_level(logging.WARNING), torch.no_grad():
            for name in ("nf4", "bnb-int8"):
                module = BACKEND.to_library(layer, _encode(name, layer.weight.data), backends.parse(name)).eval()
                module(torch.randn(2, 128, dtype=torch.float16))
                module(torch.randn(2, 128, dtype=torch.bfloat16))
        assert caplog.text == ""


@pytest.fixture
def diffusers_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers' two bitsandbytes quantizers without their refusal of machines that have no GPU."""
    from diffusers.quantizers import auto

    for method in ("bitsandbytes_4bit", "bitsandbytes_8bit"):
        base: Any = auto.AUTO_QUANTIZER_MAPPING[method]
        free = {
            "validate_environment": lambda self, *args, **kwargs: None,
            "update_device_map": lambda self, device_map: device_map or {"": "cpu"},
        }
        monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, method, type(base.__name__, (base,), free))


@pytest.mark.usefixtures("diffusers_on_cpu")
class TestDiffusers:
    @staticmethod
    def _flux(path: Path) -> Path:
        from diffusers import FluxTransformer2DModel

        torch.manual_seed(0)
        model = FluxTransformer2DModel(
            in_channels=64,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=32,
            num_attention_heads=2,
            joint_attention_dim=64,
            pooled_projection_dim=64,
            axes_dims_rope=(8, 12, 12),
        )
        model.save_pretrained(path / "float")
        return path / "float"

    @staticmethod
    def _config(name: str) -> Any:
        from diffusers import BitsAndBytesConfig

        values = BACKEND.config(backends.parse(name), "float32")
        assert values is not None and values.pop("quant_method") == "bitsandbytes"
        return BitsAndBytesConfig(**values)

    @pytest.mark.parametrize("name", ["nf4", "nf4,double_quant", "fp4", "bnb-int8"])
    def test_what_diffusers_saved_is_found_and_read(self, name: str, tmp_path: Path) -> None:
        from diffusers import FluxTransformer2DModel
        from safetensors.torch import load_file

        model = FluxTransformer2DModel.from_pretrained(
            self._flux(tmp_path), quantization_config=self._config(name), torch_dtype=torch.float32
        )
        model.save_pretrained(tmp_path / "quantized")
        file = load_file(tmp_path / "quantized" / "diffusion_pytorch_model.safetensors")
        config = json.loads((tmp_path / "quantized" / "config.json").read_text())
        found = BACKEND.find(_infos(file), config)
        modules = dict(model.named_modules())
        quantized = {
            f"{key}.weight"
            for key, module in modules.items()
            if isinstance(module, bitsandbytes.nn.Linear4bit | bitsandbytes.nn.Linear8bitLt)
        }
        assert quantized and {one.name for one in found} == quantized
        rest = set(file) - {key for one in found for key in (*one.keys.values(), *one.extra)}
        assert all(file[key].is_floating_point() for key in rest)  # nothing packed is left over
        for one in found:
            module: Any = modules[one.name.removesuffix(".weight")]
            assert one.scheme == name.partition(",")[0]
            packed = BACKEND.read(one, (module.out_features, module.in_features), file.__getitem__)
            if one.scheme == "bnb-int8":
                wanted = bnb.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
            else:
                wanted = bnb.dequantize_4bit(module.weight.data, module.weight.quant_state)
            assert _same(BACKEND.decode(packed, torch.float32), wanted)

    @pytest.mark.parametrize("name", ["nf4", "nf4,double_quant", "fp4", "bnb-int8"])
    def test_what_sdquant_wrote_is_loaded_by_diffusers(self, name: str, tmp_path: Path) -> None:
        from diffusers import FluxTransformer2DModel
        from safetensors.torch import load_file, save_file

        folder = self._flux(tmp_path)
        model = FluxTransformer2DModel.from_pretrained(folder)
        spec = backends.parse(name)
        weights = "diffusion_pytorch_model.safetensors"
        file = load_file(folder / weights)
        packed = {}
        for key, module in model.named_modules():
            if type(module) is nn.Linear:
                packed[key] = BACKEND.encode(file.pop(f"{key}.weight"), spec)
                file |= BACKEND.write(f"{key}.weight", packed[key])
        (tmp_path / "ours").mkdir()
        save_file(file, tmp_path / "ours" / weights, {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = BACKEND.config(spec, "float32")
        (tmp_path / "ours" / "config.json").write_text(json.dumps(config))
        loaded = dict(FluxTransformer2DModel.from_pretrained(tmp_path / "ours").named_modules())
        for key, wanted in packed.items():
            back = BACKEND.from_library(loaded[key])
            assert back is not None
            assert back.spec.shape == wanted.spec.shape and back.spec.details == wanted.spec.details
            assert all(_same(back.parts[part], wanted.parts[part]) for part in wanted.parts)
