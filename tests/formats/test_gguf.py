"""The GGUF reader against files of gguf-py, against files that lie, and against its own writer."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tracemalloc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch

from sdquant.core.gguf_types import BY_ID, REFUSED, TYPES
from sdquant.errors import BadFileError, SdquantError, UnsupportedFileError
from sdquant.formats.gguf import _values
from sdquant.formats.gguf.file import GGUFFile, Skipped, classify, read_header, write_gguf

if TYPE_CHECKING:
    from pathlib import Path

U32, I32, BOOL, STRING, ARRAY, U64, I64 = 4, 5, 7, 8, 9, 10, 11


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(name: str, kind: int, count: int, items: bytes) -> bytes:
    return pair(name, ARRAY, struct.pack("<IQ", kind, count) + items)


def row(name: str | bytes = "w", ne: tuple[int, ...] = (32, 2), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, kind, offset)


@dataclass
class Raw:
    """A GGUF file byte by byte: sound as it is (one 2x32 f32 tensor), each test makes one thing wrong."""

    pairs: list[bytes] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=lambda: [row()])
    data: bytes = bytes(256)
    magic: bytes = b"GGUF"
    version: int = 3
    tensor_count: int | None = None
    pair_count: int | None = None

    def bytes(self) -> bytes:
        tensors = len(self.rows) if self.tensor_count is None else self.tensor_count
        pairs = len(self.pairs) if self.pair_count is None else self.pair_count
        head = self.magic + struct.pack("<IQQ", self.version, tensors, pairs) + b"".join(self.pairs + self.rows)
        return head + bytes(-len(head) % 32) + self.data

    def write(self, folder: Path) -> Path:
        path = folder / "model.gguf"
        path.write_bytes(self.bytes())
        return path


def shape_of(name: str, dims: tuple[int, ...], kind: int = I32) -> bytes:
    items = struct.pack(f"<{len(dims)}{'i' if kind == I32 else 'q'}", *dims)
    return array(f"comfy.gguf.orig_shape.{name}", kind, len(dims), items)


def u32(name: str, value: int) -> bytes:
    return pair(name, U32, struct.pack("<I", value))


class TestSound:
    def test_the_sound_file_is_read(self, tmp_path: Path) -> None:
        header = read_header(Raw(pairs=[pair("general.architecture", STRING, text("flux"))]).write(tmp_path))
        assert header.version == 3 and header.alignment == 32 and not header.notes
        assert header.metadata == {"general.architecture": "flux"}
        (info,) = header.tensors.values()
        assert (info.dtype, info.shape, info.nbytes, info.offset) == ("float32", (2, 32), 256, header.data_offset)

    def test_version_2(self, tmp_path: Path) -> None:
        assert read_header(Raw(version=2).write(tmp_path)).version == 2

    @pytest.mark.parametrize("kind", [TYPES["f32"], TYPES["f16"], TYPES["bf16"]], ids=lambda kind: kind.name)
    def test_five_dimensions_of_plain_numbers(self, tmp_path: Path, kind: Any) -> None:
        path = Raw(rows=[row(ne=(2, 2, 1, 4, 4), kind=kind.id)], data=bytes(64 * kind.nbytes)).write(tmp_path)
        with GGUFFile(path) as file:
            assert file.get("w").shape == (4, 4, 1, 2, 2)

    @pytest.mark.parametrize("kind", [I32, I64])
    def test_orig_shape(self, tmp_path: Path, kind: int) -> None:
        path = Raw(
            pairs=[shape_of("w", (16, 2, 3, 3), kind)], rows=[row(ne=(32, 9), kind=8)], data=bytes(9 * 34)
        ).write(tmp_path)
        info = read_header(path).tensors["w"]
        assert (info.dtype, info.shape, info.stored, info.nbytes) == ("q8_0", (16, 2, 3, 3), (9, 32), 306)

    def test_all_value_types(self, tmp_path: Path) -> None:
        forms = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
        pairs = [pair(f"k{kind}", kind, struct.pack("<" + form, 5)) for kind, form in forms.items()]
        pairs += [pair("yes", BOOL, b"\1"), array("list", STRING, 2, text("a") + text("ü")), array("none", I32, 0, b"")]
        metadata = read_header(Raw(pairs=pairs).write(tmp_path)).metadata
        assert metadata == {f"k{kind}": 5 for kind in forms} | {"yes": True, "list": ["a", "ü"], "none": []}

    def test_odd_but_harmless_is_noted(self, tmp_path: Path) -> None:
        long = "n" * 100
        header = read_header(Raw(rows=[row(long, offset=64)], data=bytes(64 + 256 + 99)).write(tmp_path))
        assert len(header.notes) == 3
        assert "longer than 63" in header.notes[0] and "64 unused" in header.notes[1] and "99 bytes" in header.notes[2]

    def test_alignment(self, tmp_path: Path) -> None:
        raw = Raw(pairs=[u32("general.alignment", 8)], rows=[row("a", (2,)), row("b", (2,), offset=8)], data=bytes(16))
        header = read_header(raw.write(tmp_path))
        assert header.alignment == 8 and header.tensors["b"].offset == header.data_offset + 8

    def test_types_and_sizes_are_those_of_gguf_py(self) -> None:
        ours = {kind.name.upper(): (kind.id, kind.block, kind.nbytes) for kind in BY_ID.values()}
        theirs = {
            kind.name: (kind.value, *gguf.GGML_QUANT_SIZES[kind])
            for kind in gguf.GGMLQuantizationType
            if kind.value not in REFUSED
        }
        assert {name: ours[name] for name in theirs} == theirs


FAULTS: dict[str, tuple[Raw, str]] = {
    "magic": (Raw(magic=b"GGML"), "does not start with 'GGUF'"),
    "lfs pointer": (Raw(magic=b"version https://git-lfs.github.com/spec/v1"), "Git LFS pointer"),
    "web page": (Raw(magic=b"<!DOCTYPE html>"), "web page"),
    "tensor count": (Raw(tensor_count=2**63), "claims 9223372036854775808 tensors"),
    "tensor count within the limit": (Raw(tensor_count=60_000), "a header of 60000 tensors"),
    "value count": (Raw(pair_count=65_537), "claims 65537 metadata values"),
    "no tensors": (Raw(rows=[]), "holds no tensors"),
    "key length": (Raw(pairs=[struct.pack("<Q", 2**64 - 1) + b"x" * 64]), "which must be 1 to 65535"),
    "empty key": (Raw(pairs=[u32("", 1)]), "has 0 bytes"),
    "key not utf-8": (Raw(pairs=[pair(b"\xff\xfe", U32, bytes(4))]), "not UTF-8"),
    "key with NUL": (Raw(pairs=[u32("a\0b", 1)]), "control characters"),
    "key twice": (Raw(pairs=[u32("a", 1), u32("a", 2)]), "the key 'a' twice"),
    "value type": (Raw(pairs=[pair("a", 13, bytes(8))]), "type number 13"),
    "string length": (Raw(pairs=[pair("a", STRING, struct.pack("<Q", 2**40) + bytes(64))]), "ends inside its header"),
    "bool": (Raw(pairs=[pair("a", BOOL, b"\2")]), "neither 0 nor 1"),
    "bool in array": (Raw(pairs=[array("a", BOOL, 2, b"\1\3")]), "neither 0 nor 1"),
    "array of arrays": (Raw(pairs=[array("a", ARRAY, 1, bytes(32))]), "arrays inside arrays"),
    "array type": (Raw(pairs=[array("a", 99, 1, bytes(32))]), "type number 99"),
    "array length 2^40": (Raw(pairs=[array("a", U32, 2**40, bytes(64))]), "ends inside its header"),
    "array length 2^63": (Raw(pairs=[array("a", 0, 2**63, bytes(64))]), "ends inside its header"),
    "string array 2^61": (Raw(pairs=[array("a", STRING, 2**61, bytes(64))]), "ends inside its header"),
    "string in skipped array": (
        Raw(pairs=[array("a", STRING, 2000, text("x") * 1999 + struct.pack("<Q", 2**62))]),
        "beyond the end of the file",
    ),
    "architecture type": (Raw(pairs=[u32("general.architecture", 1)]), "of type uint32"),
    "alignment type": (Raw(pairs=[pair("general.alignment", U64, struct.pack("<Q", 32))]), "of type uint64"),
    "file_type type": (Raw(pairs=[pair("general.file_type", STRING, text("x"))]), "of type string"),
    "alignment 0": (Raw(pairs=[u32("general.alignment", 0)]), "its alignment is 0"),
    "alignment 3": (Raw(pairs=[u32("general.alignment", 3)]), "its alignment is 3"),
    "alignment 4": (Raw(pairs=[u32("general.alignment", 4)]), "its alignment is 4"),
    "alignment 2^31": (Raw(pairs=[u32("general.alignment", 2**31)]), "its alignment is 2147483648"),
    "empty name": (Raw(rows=[row("")]), "has 0 bytes"),
    "long name": (Raw(rows=[row("n" * 128)]), "128 bytes, which must be 1 to 127"),
    "name not utf-8": (Raw(rows=[row(b"\xc3(")]), "not UTF-8"),
    "name with control characters": (Raw(rows=[row("a\x1b[2J")]), "control characters"),
    "name twice": (Raw(rows=[row(), row(offset=256)], data=bytes(512)), "two tensors are called 'w'"),
    "no dimensions": (Raw(rows=[row(ne=())]), "has 0 dimensions"),
    "six dimensions": (Raw(rows=[row(ne=(1,) * 6)]), "has 6 dimensions"),
    "2^31 dimensions": (Raw(rows=[text("w") + struct.pack("<I", 2**31) + bytes(64)]), "dimensions, which must"),
    "dimension 0": (Raw(rows=[row(ne=(32, 0))]), "impossible shape [0, 32]"),
    "dimension 2^63": (Raw(rows=[row(ne=(2**63, 2))]), "impossible shape"),
    "product wraps to 0": (Raw(rows=[row(ne=(2**32, 2**32))]), "impossible shape"),
    "product wraps to 64": (Raw(rows=[row(ne=(2**40, 2**40, 64))]), "impossible shape"),
    "row not in blocks": (Raw(rows=[row(ne=(16, 4), kind=2)]), "not a multiple of q4_0's block of 32"),
    "5-D blocks": (Raw(rows=[row(ne=(32, 1, 1, 1, 2), kind=8)]), "5 dimensions and type q8_0"),
    "misaligned": (Raw(rows=[row(offset=16)], data=bytes(512)), "is at offset 16"),
    "offset 2^64-64": (Raw(rows=[row(offset=2**64 - 64)]), "bytes short"),
    "overlap": (Raw(rows=[row("a"), row("b", offset=224)], data=bytes(512)), "'a' and 'b' overlap"),
    "same place": (Raw(rows=[row("a"), row("b")]), "overlap"),
    "data short": (Raw(data=bytes(255)), "1 bytes short"),
    "orig_shape of another size": (Raw(pairs=[shape_of("w", (2, 31))]), "not 64 weights"),
    "orig_shape with zeros": (Raw(pairs=[shape_of("w", (0, 0))]), "not 64 weights"),
    "orig_shape negative": (Raw(pairs=[shape_of("w", (-2, -32))]), "not 64 weights"),
    "orig_shape six dimensions": (Raw(pairs=[shape_of("w", (2, 2, 2, 2, 2, 2))]), "not 64 weights"),
    "orig_shape empty": (Raw(pairs=[shape_of("w", ())]), "not 64 weights"),
    "orig_shape type": (
        Raw(pairs=[array("comfy.gguf.orig_shape.w", STRING, 1, text("64"))]),
        "must be an array of int32 or int64",
    ),
    "orig_shape too long": (
        Raw(pairs=[array("comfy.gguf.orig_shape.w", I32, 2000, bytes(8000))]),
        "must be an array of int32 or int64",
    ),
    "too many kept items": (
        Raw(pairs=[array(f"a{n}", 0, 1024, bytes(1024)) for n in range(1025)]),
        "more than 1048576 array items",
    ),
}


class TestFaults:
    @pytest.mark.parametrize("name", FAULTS)
    def test_damaged(self, tmp_path: Path, name: str) -> None:
        raw, words = FAULTS[name]
        path = raw.write(tmp_path)
        with pytest.raises(BadFileError) as caught:
            read_header(path)
        assert words in caught.value.why
        assert str(path) in caught.value.what and caught.value.fix

    @pytest.mark.parametrize("version", [0, 1, 4, 3 << 24, 2 << 24])
    def test_versions(self, tmp_path: Path, version: int) -> None:
        with pytest.raises(UnsupportedFileError) as caught:
            read_header(Raw(version=version).write(tmp_path))
        assert ("big-endian" if version >= 1 << 24 else f"version {version}") in caught.value.why

    @pytest.mark.parametrize("number", sorted(REFUSED))
    def test_removed_types_are_refused_by_name(self, tmp_path: Path, number: int) -> None:
        with pytest.raises(UnsupportedFileError) as caught:
            read_header(Raw(rows=[row(ne=(256,), kind=number)]).write(tmp_path))
        assert REFUSED[number] == caught.value.why and "'w'" in caught.value.what

    def test_unknown_type(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedFileError, match="type number 77"):
            read_header(Raw(rows=[row(kind=77)]).write(tmp_path))

    def test_cut_off_at_every_byte(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_values, "KEPT_ITEMS", 4)  # so that a skipped array is a few bytes long
        pairs = [
            pair("general.architecture", STRING, text("flux")),
            array("tokens", STRING, 3, text("a") * 3),
            array("skipped", STRING, 5, text("b") * 5),
            shape_of("w", (2, 32)),
        ]
        whole = Raw(pairs=pairs, rows=[row(), row("v", offset=256)], data=bytes(512)).bytes()
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole)
        assert len(read_header(path).tensors) == 2
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            with pytest.raises(BadFileError) as caught:
                read_header(path)
            assert "short" in caught.value.why or "ends inside" in caught.value.why or length == 0
        assert "1 bytes short" in caught.value.why

    def test_random_bytes_give_typed_errors(self, tmp_path: Path) -> None:
        whole = Raw(pairs=[u32("general.alignment", 32), shape_of("w", (2, 32))]).bytes()
        random = np.random.default_rng(0)
        path = tmp_path / "fuzz.gguf"
        refused = 0
        for _ in range(500):
            changed = bytearray(whole)
            for at in random.integers(0, len(whole) - 256, size=random.integers(1, 4)):
                changed[at] = random.integers(0, 256)
            path.write_bytes(changed)
            try:
                read_header(path)
            except SdquantError:
                refused += 1
        assert refused > 250  # most changes matter; whatever is not an SdquantError has failed the test already

    def test_empty_file(self, tmp_path: Path) -> None:
        path = tmp_path / "empty.gguf"
        path.touch()
        with pytest.raises(BadFileError, match="it is empty"):
            read_header(path)

    def test_file_that_shrank(self, tmp_path: Path) -> None:
        path = Raw().write(tmp_path)
        file = GGUFFile(path)
        os.truncate(path, 100)
        with pytest.raises(BadFileError, match="352 bytes when it was opened and has 100 now"):
            file.get("w")


class TestLazy:
    def test_a_tokenizer_is_not_materialised(self, tmp_path: Path) -> None:
        count = 256_000
        words = b"".join(text(f"token{n}") for n in range(count))
        pairs = [array(f"tokens{n}", STRING, count, words) for n in range(3)]
        pairs += [array("scores", 6, count, bytes(4 * count)), pair("long", STRING, text("x" * (1 << 21)))]
        pairs.append(u32("after", 7))
        path = Raw(pairs=pairs).write(tmp_path)
        del words, pairs
        tracemalloc.start()
        header = read_header(path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 5 << 20
        assert header.metadata["tokens2"] == Skipped("string", count)
        assert header.metadata["scores"] == Skipped("float32", count)
        assert header.metadata["long"] == Skipped("string", 1 << 21)
        assert header.metadata["after"] == 7 and "w" in header.tensors

    def test_reading_a_header_imports_no_torch(self, tmp_path: Path) -> None:
        path = Raw().write(tmp_path)
        code = (
            f"import sys; from sdquant.formats.gguf.file import GGUFFile; GGUFFile({str(path)!r});"
            "print([m for m in ('torch', 'numpy', 'gguf') if m in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"


class TestTensors:
    def test_tensors_are_private_and_outlive_the_file(self, tmp_path: Path) -> None:
        path = Raw(data=np.arange(64, dtype=np.float32).tobytes()).write(tmp_path)
        before = path.read_bytes()
        with GGUFFile(path) as file:
            tensor = file.get("w")
        tensor += 1
        assert torch.equal(tensor, torch.arange(1, 65).float().view(2, 32))
        assert path.read_bytes() == before
        with GGUFFile(path) as file:
            assert torch.equal(file.get("w"), torch.arange(64).float().view(2, 32))

    def test_unknown_key(self, tmp_path: Path) -> None:
        with GGUFFile(Raw().write(tmp_path)) as file, pytest.raises(BadFileError, match="no tensor 'x'"):
            file.get("x")

    @pytest.mark.parametrize("name", ["f32", "f16", "f64", "i8", "i16", "i32", "i64"])
    def test_plain_numbers_of_gguf_py(self, tmp_path: Path, name: str) -> None:
        values = np.arange(-6, 6).reshape(3, 4).astype(np.dtype(TYPES[name].dtype))
        path = tmp_path / "plain.gguf"
        writer = gguf.GGUFWriter(path, "flux")
        writer.add_tensor("w", values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with GGUFFile(path) as file:
            got = file.get("w")
            assert str(got.dtype) == f"torch.{file.tensors['w'].dtype}" == f"torch.{TYPES[name].dtype}"
            assert np.array_equal(got.numpy(), values)


KINDS: dict[str, tuple[list[str], list[bytes]]] = {
    "diffusion": (["double_blocks.0.img_attn.qkv.weight"], []),
    "diffusion with a prefix": (["model.diffusion_model.input_blocks.0.0.weight"], []),
    "diffusion of qwen": (["transformer_blocks.0.w"], [pair("general.architecture", STRING, text("qwen_image"))]),
    "diffusion of patched tools": (["blocks.0.w"], [pair("general.architecture", STRING, text("pig"))]),
    "all-in-one of sd.cpp": (["model.diffusion_model.x", "first_stage_model.x", "cond_stage_model.x"], []),
    "all-in-one sdxl": (["model.diffusion_model.x", "conditioner.embedders.0.x"], []),
    "all-in-one vae": (["x.y", "encoder.a", "decoder.a", "quant_conv.weight"], []),
    "text-encoder llama": (["token_embd.weight", "blk.0.attn_q.weight", "output_norm.weight"], []),
    "text-encoder t5": (["token_embd.weight", "enc.blk.0.attn_q.weight", "enc.output_norm.weight"], []),
    "text-encoder by architecture": (["layers.0.w"], [pair("general.architecture", STRING, text("qwen3vl"))]),
    "text-encoder clip": (["text_model.encoder.layers.0.w"], []),
    "projector": (["v.blk.0.w", "mm.0.weight"], []),
    "projector by type": (["x"], [pair("general.type", STRING, text("mmproj"))]),
    "adapter": (["x.weight.lora_a", "x.weight.lora_b"], []),
    "adapter by type": (["x"], [pair("general.type", STRING, text("adapter"))]),
    "split": (["blk.0.x"], [pair("split.count", 2, struct.pack("<H", 3))]),
}


@pytest.mark.parametrize("name", KINDS)
def test_classify(tmp_path: Path, name: str) -> None:
    names, pairs = KINDS[name]
    rows = [row(tensor, offset=256 * n) for n, tensor in enumerate(names)]
    kind = classify(read_header(Raw(pairs=pairs, rows=rows, data=bytes(256 * len(rows))).write(tmp_path)))
    assert kind == name.split(" ")[0]
    assert kind.evidence


class TestWriter:
    def test_gguf_py_reads_it(self, tmp_path: Path) -> None:
        path = tmp_path / "out.gguf"
        floats = torch.randn(3, 5)
        half = torch.randn(7).bfloat16()
        blocks = torch.randint(0, 255, (12, 34), dtype=torch.uint8)
        metadata = {"general.architecture": "flux", "n": 5, "neg": -1, "big": 2**40, "f": 0.5, "yes": True,
                    "words": ["a", "b"], "none": []}  # fmt: skip
        write_gguf(
            path,
            [
                ("a", (3, 5), "f32", floats),
                ("b", (7,), "bf16", half),
                ("c", (4, 96), "q8_0", blocks),
                ("d", (4, 96), "q8_0", lambda: blocks.numpy().tobytes()),
            ],
            metadata,
        )
        reader = gguf.GGUFReader(path)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        assert np.array_equal(tensors["a"].data, floats.numpy())
        assert np.array_equal(tensors["b"].data.view(np.int16), half.view(torch.int16).numpy())
        for name in "cd":
            assert list(tensors[name].shape) == [96, 4] and tensors[name].tensor_type.name == "Q8_0"
            assert np.array_equal(tensors[name].data.reshape(12, 34), blocks.numpy())
        assert {name: reader.get_field(name).contents() for name in metadata if name != "none"} == {
            name: value for name, value in metadata.items() if name != "none"
        }
        with GGUFFile(path) as file:
            assert file.metadata == metadata
            assert torch.equal(file.get("c"), blocks) and torch.equal(file.get("b"), half)
            assert file.header.notes == ()

    def test_convolutions_are_folded_and_keep_their_shape(self, tmp_path: Path) -> None:
        path = tmp_path / "out.gguf"
        shape = (64, 32, 3, 3)
        q4_k = torch.randint(0, 255, (72, 144), dtype=torch.uint8)
        q8_0 = torch.randint(0, 255, (9, 34), dtype=torch.uint8)
        video = torch.randn(2, 3, 1, 2, 2)
        write_gguf(
            path,
            [
                ("k", shape, "q4_k", q4_k),
                ("small", (32, 1, 3, 3), "q8_0", q8_0),
                ("5d", (2, 3, 1, 2, 2), "f32", video),
                ("scalar", (), "f32", torch.tensor(2.0)),
            ],
            {},
        )
        with GGUFFile(path) as file:
            assert file.header.tensors["k"].stored == (72, 256) and file.tensors["k"].shape == shape
            assert file.header.tensors["small"].stored == (9, 32) and file.tensors["small"].shape == (32, 1, 3, 3)
            assert file.metadata["comfy.gguf.orig_shape.k"] == list(shape)
            assert torch.equal(file.get("k"), q4_k) and torch.equal(file.get("5d"), video)
            assert file.get("scalar").shape == (1,)

    def test_a_failure_leaves_nothing_and_keeps_the_old_file(self, tmp_path: Path) -> None:
        path = tmp_path / "out.gguf"
        path.write_bytes(b"old")

        def fail() -> bytes:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_gguf(path, [("a", (1,), "f32", bytes(4)), ("b", (1,), "f32", fail)], {})
        assert [file.name for file in tmp_path.iterdir()] == ["out.gguf"]
        assert path.read_bytes() == b"old"

    @pytest.mark.parametrize(
        ("tensors", "words"),
        [
            ([("a", (2,), "f32", bytes(4))], "takes 8"),
            ([("a", (2,), "f32", torch.zeros(2).half())], "f32 is not stored in that dtype"),
            ([("a", (33,), "q8_0", bytes(34))], "not a whole number of q8_0 blocks"),
            ([("a", (1,), "f32", bytes(4)), ("a", (1,), "f32", bytes(4))], "two tensors are called"),
        ],
        ids=["bytes", "dtype", "blocks", "twice"],
    )
    def test_what_does_not_belong_together_is_not_written(self, tmp_path: Path, tensors: Any, words: str) -> None:
        with pytest.raises((ValueError, BadFileError), match=words):
            write_gguf(tmp_path / "out.gguf", tensors, {})
        assert not list(tmp_path.iterdir())

    def test_progress_counts_all_bytes(self, tmp_path: Path) -> None:
        done: list[int] = []
        rows = [("a", (8,), "f32", bytes(32)), ("b", (4,), "f16", bytes(8))]
        write_gguf(tmp_path / "out.gguf", rows, {}, progress=done.append)
        assert done == [32, 8]
