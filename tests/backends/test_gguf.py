"""GGUF decoding against gguf-py, encoding against gguf-py and libgguf, and weights read from files of both."""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import gguf
import libgguf
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sdquant import backends
from sdquant.backends import _gguf_blocks, _gguf_decode
from sdquant.backends.gguf import BACKEND, undecodable
from sdquant.core.backend import Packed, PackedSpec, TensorInfo, Unfit
from sdquant.core.gguf_mixes import BASES, FILE_TYPES, dominant, mix_type
from sdquant.core.gguf_types import TYPES
from sdquant.errors import BackendUnavailableError, BadFileError
from sdquant.formats.gguf.file import GGUFFile, write_gguf
from sdquant.nn import quantized_layer
from sdquant.utils import chunk_sizes
from sdquant.utils.install import install_extra

if TYPE_CHECKING:
    from pathlib import Path

BLOCK_TYPES = tuple(_gguf_decode.DECODERS)
LEGACY = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")  # the ones gguf-py writes
K_TYPES = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")


def qtype(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name.upper()]


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05


def random_blocks(name: str, count: int) -> torch.Tensor:
    """Blocks of random bytes whose half-precision scales are finite: normal, subnormal, negative, huge."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (count, TYPES[name].nbytes), dtype=torch.uint8, generator=generator)
    if name == "iq1_m":  # its scale lies in the upper halves of four bytes: no exponent of ones
        blocks[:, 55] &= 0xBF
    if name == "mxfp4":  # nor powers of two at the end of float32
        blocks[:, 0].clamp_(max=250)
    for at in TYPES[name].halves:
        scales = torch.randint(-32768, 32768, (count, 1), generator=generator).to(torch.int16).view(torch.float16)
        blocks[:, at : at + 2] = torch.where(scales.isfinite(), scales, torch.zeros_like(scales)).view(torch.uint8)
    return blocks


def packed_of(name: str, blocks: torch.Tensor) -> Packed:
    numel = len(blocks) * TYPES[name].block
    spec = PackedSpec(scheme=backends.scheme(name), shape=(numel // 32, 32), dtype="bfloat16", details={"type": name})
    return Packed(spec=spec, parts={"blocks": blocks})


@cache
def encoded(name: str) -> Packed:
    """Of few weights, of which ggml takes up to a millisecond for each."""
    return BACKEND.encode(weights(4, 512), backends.parse(name))


def reference(name: str, blocks: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), qtype(name)))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.flatten().view(torch.int32), other.flatten().view(torch.int32))


@pytest.mark.parametrize("name", BLOCK_TYPES)
class TestDecode:
    def test_random_bytes_decode_as_in_gguf_py(self, name: str) -> None:
        blocks = random_blocks(name, 3000)
        assert same_bits(BACKEND.decode(packed_of(name, blocks), torch.float32), reference(name, blocks))

    def test_random_weights_decode_as_in_gguf_py(self, name: str) -> None:
        packed = encoded(name)
        assert same_bits(BACKEND.decode(packed, torch.float32), reference(name, packed.parts["blocks"]))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_other_dtypes_are_rounded_once(self, name: str, dtype: torch.dtype) -> None:
        packed = encoded(name)
        expected = reference(name, packed.parts["blocks"]).to(dtype).view(packed.spec.shape)
        assert torch.equal(BACKEND.decode(packed, dtype), expected)

    @pytest.mark.parametrize("tile", [1, 256, 1000, 4096])
    def test_tiles_do_not_show(self, name: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
        packed = packed_of(name, random_blocks(name, 40))
        whole = BACKEND.decode(packed, torch.float32)
        monkeypatch.setattr(chunk_sizes, "CPU", tile)
        assert same_bits(BACKEND.decode(packed, torch.float32), whole)
        out = torch.empty(packed.spec.shape, dtype=torch.bfloat16)
        BACKEND.decode_into(packed, out)
        assert torch.equal(out, whole.bfloat16())

    def test_decode_into_a_strided_tensor(self, name: str) -> None:
        packed = packed_of(name, random_blocks(name, 8))
        out = torch.zeros(32, packed.spec.shape[0]).t()
        BACKEND.decode_into(packed, out)
        assert same_bits(out.contiguous(), BACKEND.decode(packed, torch.float32))

    def test_decode_into_makes_nothing_of_the_weights_size(self, name: str) -> None:
        packed = packed_of(name, random_blocks(name, (1 << 22) // TYPES[name].block))
        out = torch.empty(packed.spec.shape, dtype=torch.bfloat16)

        class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
            """Keeps the size in bytes of the largest storage that an operation returned, `out` itself apart."""

            seen = 0

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                own = {out.untyped_storage().data_ptr(), packed.parts["blocks"].untyped_storage().data_ptr()}
                if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in own:
                    Largest.seen = max(Largest.seen, result.untyped_storage().nbytes())
                return result

        with Largest():  # type: ignore[no-untyped-call]
            BACKEND.decode_into(packed, out)
        assert 0 < Largest.seen <= 4 * chunk_sizes.CPU < out.nbytes


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_plain_types_decode_as_in_gguf_py(name: str) -> None:
    weight = weights(48, 33)
    packed = BACKEND.encode(weight, backends.parse(name))
    raw = packed.parts["blocks"].contiguous().view(torch.uint8)
    assert same_bits(BACKEND.decode(packed, torch.float32), reference(name, raw))
    theirs = torch.from_numpy(np.ascontiguousarray(gguf.quants.quantize(weight.numpy(), qtype(name))))
    assert torch.equal(theirs.view(torch.uint8).flatten(), raw.flatten())


class TestEncode:
    @pytest.mark.parametrize("name", LEGACY)
    def test_blocks_are_those_of_gguf_py(self, name: str) -> None:
        weight = weights(64, 256)
        theirs = gguf.quants.quantize(weight.numpy(), qtype(name)).reshape(-1, TYPES[name].nbytes)
        assert np.array_equal(BACKEND.encode(weight, backends.parse(name)).parts["blocks"].numpy(), theirs)

    @pytest.mark.parametrize("name", K_TYPES)
    def test_blocks_are_those_of_libgguf_row_by_row(self, name: str) -> None:
        weight = weights(16, 1024)
        theirs = libgguf.quantize_rows(weight.numpy(), qtype(name)).reshape(-1, TYPES[name].nbytes)
        assert np.array_equal(BACKEND.encode(weight, backends.parse(name)).parts["blocks"].numpy(), theirs)

    @pytest.mark.parametrize("name", BLOCK_TYPES)
    def test_tiles_do_not_show(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        weight = weights(32, 3, 16, 16).bfloat16()
        whole = BACKEND.encode(weight, backends.parse(name)).parts["blocks"]
        monkeypatch.setattr("sdquant.backends.gguf._ENCODE_TILE", 1024)
        assert torch.equal(BACKEND.encode(weight, backends.parse(name)).parts["blocks"], whole)

    @pytest.mark.parametrize("name", [row.name for row in BACKEND.schemes])
    def test_strided_weights(self, name: str) -> None:
        weight = weights(64, 128).t()
        spec = backends.parse(name)
        one, other = BACKEND.encode(weight, spec), BACKEND.encode(weight.contiguous(), spec)
        assert torch.equal(one.parts["blocks"], other.parts["blocks"]) and one.parts["blocks"].is_contiguous()

    @pytest.mark.parametrize("mix", BASES)
    def test_a_mix_is_its_base_type(self, mix: str) -> None:
        packed = BACKEND.encode(weights(8, 256), backends.parse(mix))
        assert packed.spec.scheme.name == BASES[mix] == packed.spec.details["type"]

    @pytest.mark.parametrize("name", ["q8_0", "q4_1", "q2_k", "q6_k", "f16", "f32"])
    def test_values_that_cannot_be_held_are_refused(self, name: str) -> None:
        weight = weights(8, 256)
        weight[3, 3] = float("inf") if name == "f32" else 1e9
        with pytest.raises(Unfit, match="not finite"):
            BACKEND.encode(weight, backends.parse(name))

    def test_unfit_names_the_block(self) -> None:
        with pytest.raises(Unfit, match="192 weights are not a whole number of q4_k blocks of 256"):
            BACKEND.layout(backends.parse("q4_k"), (3, 64), "bfloat16")

    def test_missing_library_names_the_pip_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "libgguf", None)
        with pytest.raises(BackendUnavailableError) as caught:
            BACKEND.encode(weights(8, 256), backends.parse("q4_k"))
        assert install_extra("gguf") in caught.value.fix
        packed = packed_of("q4_k", random_blocks("q4_k", 2))
        assert torch.isfinite(BACKEND.decode(packed, torch.float32)).all()  # reading needs no library


def _theirs(path: Path, tensors: dict[str, tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A file written with gguf-py (K-quants quantized by libgguf); returns the floats that it stands for."""
    writer = gguf.GGUFWriter(path, "flux")
    floats = {}
    for name, (kind, weight) in tensors.items():
        own = kind in LEGACY or TYPES[kind].dtype  # what gguf-py can write
        quantize = gguf.quants.quantize if own else libgguf.quantize_rows
        raw = quantize(weight.numpy(), qtype(kind))
        writer.add_tensor(name, raw, raw_dtype=qtype(kind))
        floats[name] = torch.from_numpy(gguf.quants.dequantize(raw, qtype(kind))).view(weight.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return floats


class TestFiles:
    def test_files_of_gguf_py_and_libgguf(self, tmp_path: Path) -> None:
        path = tmp_path / "theirs.gguf"
        kinds = (*BLOCK_TYPES, "f16", "bf16", "f32")
        floats = _theirs(path, {f"{kind}.weight": (kind, weights(24, 512, seed=n)) for n, kind in enumerate(kinds)})
        with GGUFFile(path) as file:
            found = BACKEND.find(file.tensors, {})
            assert {row.name: row.scheme for row in found} == {f"{kind}.weight": kind for kind in BLOCK_TYPES}
            assert len({row.evidence for row in found}) == 1 and "1 tensors q4_k" in found[0].evidence
            for row in found:
                packed = BACKEND.read(row, (24, 512), file.get)
                assert same_bits(BACKEND.decode(packed, torch.float32), floats[row.name])
                assert packed.parts["blocks"].shape == (24 * 512 // TYPES[row.scheme].block, TYPES[row.scheme].nbytes)
            for kind in ("f16", "bf16", "f32"):
                assert same_bits(file.get(f"{kind}.weight").float(), floats[f"{kind}.weight"])

    @pytest.mark.parametrize("name", BLOCK_TYPES)
    def test_convolution_through_our_own_file(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / "ours.gguf"
        torch.manual_seed(0)
        layer = nn.Conv2d(32, 16, 3, padding=1)
        packed = BACKEND.encode(layer.weight.data, backends.parse(name))
        write_gguf(path, [("conv.weight", (16, 32, 3, 3), name, packed.parts["blocks"])], {})
        with GGUFFile(path) as file:
            (found,) = BACKEND.find(file.tensors, {})
            read = BACKEND.read(found, (16, 32, 3, 3), file.get)
        assert torch.equal(read.parts["blocks"], packed.parts["blocks"])
        x = torch.randn(2, 32, 8, 8)
        expected = nn.functional.conv2d(x, BACKEND.decode(packed, torch.float32), layer.bias, padding=1)
        with torch.no_grad():
            out = quantized_layer(layer, read)(x)
            assert torch.equal(out, quantized_layer(layer, packed)(x))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)  # kernels may add up in another order
        (theirs,) = gguf.GGUFReader(path).tensors
        raw = torch.from_numpy(np.array(theirs.data)).view(-1, TYPES[name].nbytes)
        assert same_bits(reference(name, raw), BACKEND.decode(packed, torch.float32))

    def test_diffusers_reads_our_linear_layers(self, tmp_path: Path) -> None:
        from diffusers.models.model_loading_utils import load_gguf_checkpoint
        from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

        path = tmp_path / "ours.gguf"
        weight, bias = weights(64, 128), weights(64)
        packed = BACKEND.encode(weight, backends.parse("q8_0"))
        rows = [
            ("proj.weight", (64, 128), "q8_0", packed.parts["blocks"]),
            ("proj.bias", (64,), "f32", bias),
        ]
        write_gguf(path, rows, {"general.architecture": "flux"})
        theirs = load_gguf_checkpoint(str(path))
        assert torch.equal(theirs["proj.bias"], bias)
        got = dequantize_gguf_tensor(theirs["proj.weight"])
        # diffusers computes scale times code in half precision; the codes and scales are the same.
        assert torch.equal(got.float(), BACKEND.decode(packed, torch.float32).half().float())

    def test_dropped_dimensions_of_1(self) -> None:
        blocks = random_blocks("q8_0", 8)
        infos = {"w": TensorInfo(dtype="q8_0", shape=(16, 16), nbytes=blocks.numel())}
        (found,) = BACKEND.find(infos, {})
        packed = BACKEND.read(found, (1, 16, 16, 1), lambda _: blocks)
        assert BACKEND.decode(packed, torch.float32).shape == (1, 16, 16, 1)

    @pytest.mark.parametrize("shape", [(16, 8), (8, 32), (256,), (2, 128), (16, 17)], ids=str)
    def test_another_shape_is_refused(self, shape: tuple[int, ...]) -> None:
        blocks = random_blocks("q8_0", 8)
        (found,) = BACKEND.find({"w": TensorInfo(dtype="q8_0", shape=(16, 16), nbytes=blocks.numel())}, {})
        with pytest.raises(BadFileError, match="'w' as q8_0"):
            BACKEND.read(found, shape, lambda _: blocks)

    def test_blocks_that_are_not_the_headers_are_refused(self) -> None:
        (found,) = BACKEND.find({"w": TensorInfo(dtype="q8_0", shape=(16, 16), nbytes=8 * 34)}, {})
        with pytest.raises(BadFileError):
            BACKEND.read(found, (16, 16), lambda _: random_blocks("q8_0", 7))

    def test_safetensors_headers_hold_no_gguf(self) -> None:
        dtypes = ("float32", "float16", "bfloat16", "uint8", "int8", "float8_e4m3fn")
        infos = {name: TensorInfo(dtype=name, shape=(256, 256), nbytes=65536) for name in dtypes}
        assert BACKEND.find(infos, {}) == [] and undecodable(infos) == {}

    @pytest.mark.parametrize("name", [row.name for row in BACKEND.schemes if row.group and row.name in TYPES])
    def test_a_scheme_can_be_decoded_and_its_scales_checked(self, name: str) -> None:
        assert name in _gguf_decode.DECODERS
        assert bool(TYPES[name].halves) != (name in _gguf_blocks.OTHER_SCALES)

    def test_types_without_a_decoder_are_named(self) -> None:
        infos = {
            name: TensorInfo(dtype=kind, shape=(256,), nbytes=1)
            for name, kind in {"a": "q4_k", "b": "q1_0", "c": "i16", "d": "bfloat16", "e": "q1_0"}.items()
        }
        assert undecodable(infos) == {"q1_0": ["b", "e"], "i16": ["c"]}
        assert [row.name for row in BACKEND.find(infos, {})] == ["a"]


class TestMixes:
    @pytest.mark.parametrize(
        ("mix", "name", "kind"),
        [
            ("q4_k_m", "transformer_blocks.5.attn.to_q.weight", "q4_k"),
            ("q4_k_m", "transformer_blocks.5.attn.to_v.weight", "q6_k"),
            ("q4_k_m", "transformer_blocks.5.attn.add_v_proj.weight", "q6_k"),
            ("q4_k_m", "transformer_blocks.5.ff.net.2.weight", "q6_k"),
            ("q4_k_m", "transformer_blocks.5.ff_context.net.2.weight", "q6_k"),
            ("q4_k_m", "transformer_blocks.5.ff.net.0.proj.weight", "q4_k"),
            ("q4_k_m", "double_blocks.0.img_attn.qkv.weight", "q5_k"),
            ("q4_k_m", "double_blocks.0.txt_mlp.2.weight", "q6_k"),
            ("q4_k_m", "blk.3.ffn_down.weight", "q6_k"),
            ("q4_k_m", "text_model.encoder.layers.0.self_attn.v_proj.weight", "q6_k"),
            ("q4_k_m", "encoder.block.0.layer.0.SelfAttention.v.weight", "q6_k"),
            ("q4_k_m", "encoder.block.0.layer.1.DenseReluDense.wo.weight", "q6_k"),
            ("q4_k_s", "transformer_blocks.3.attn.to_v.weight", "q5_k"),
            ("q4_k_s", "transformer_blocks.4.attn.to_v.weight", "q4_k"),
            ("q4_k_s", "transformer_blocks.13.attn.to_v.weight", "q4_k"),
            ("q4_k_s", "blocks.9.ffn.2.weight", "q5_k"),
            ("q3_k_m", "transformer_blocks.0.attn.to_out.0.weight", "q4_k"),
            ("q3_k_l", "transformer_blocks.0.attn.to_out.0.weight", "q5_k"),
            ("q3_k_s", "transformer_blocks.0.attn.to_v.weight", "q3_k"),
            ("q5_k_m", "blk.0.attn_v.weight", "q6_k"),
            ("q5_k_s", "blk.0.attn_v.weight", "q5_k"),
            ("q8_0", "blk.0.attn_v.weight", "q8_0"),
        ],
    )
    def test_rows(self, mix: str, name: str, kind: str) -> None:
        assert mix_type(mix, name) == kind

    @pytest.mark.parametrize(
        ("types", "file_type", "name", "scheme"),
        [
            ({"q8_0": 100, "float32": 10}, None, "", "q8_0"),
            ({"q4_k": 10, "bfloat16": 100}, None, "", "q4_k"),
            ({"bfloat16": 10, "float32": 4}, None, "", "bf16"),
            ({"f16": 10, "float16": 10, "f32": 15}, None, "", "f16"),
            ({"q4_k": 90, "q6_k": 20}, 15, "", "q4_k_m"),
            ({"q4_k": 90, "q6_k": 20}, None, "flux1-dev-Q4_K_M.gguf", "q4_k_m"),
            ({"q4_k": 20, "q6_k": 90}, 15, "", "q4_k_m"),
            ({"q4_k": 90, "q5_k": 20}, 14, "wrong-Q2_K.gguf", "q4_k_s"),
            ({"q8_0": 90}, 15, "model-Q4_K_M.gguf", "q8_0"),
            ({"q4_k": 90}, 7, "model-q4_k_small.gguf", "q4_k"),
            ({"iq4_xs": 90, "q6_k": 5}, None, "", "iq4_xs"),
        ],
    )
    def test_dominant(self, types: dict[str, int], file_type: int | None, name: str, scheme: str) -> None:
        assert dominant(types, file_type, name) == scheme

    def test_dominant_of_nothing(self) -> None:
        with pytest.raises(ValueError, match="no weights"):
            dominant({"int64": 5})

    def test_file_types_are_those_of_gguf_py(self) -> None:
        for number, name in FILE_TYPES.items():
            assert gguf.LlamaFileType(number).name in (f"MOSTLY_{name.upper()}", f"ALL_{name.upper()}")
