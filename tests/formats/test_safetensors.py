"""The safetensors header reader against files that lie, and against the safetensors library on the same files."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sdquant.errors import BadFileError, SettingsError
from sdquant.formats import safetensors, safetensors_writer

ROW = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
TWO = {"a": ROW, "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}}


def _file(header: Any, data: int | bytes = 0, *, length: int | None = None) -> bytes:
    """A file of this header (bytes, or what JSON is made of) and so many bytes of data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = data if isinstance(data, bytes) else bytes(data)
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + body


def _with(**changes: Any) -> dict[str, Any]:
    """One tensor of 24 bytes, with other values in its row; None removes the field."""
    row = {**ROW, **changes}
    return {"a": {name: value for name, value in row.items() if value is not None}}


def _raw(field: str, text: str) -> bytes:
    """The header of one tensor, with JSON text that `json.dumps` would not write as the value of a field."""
    return json.dumps(_with(**{field: "@"})).replace('"@"', text).encode()


# Name -> a file that must be refused.
BROKEN: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"\x08\0\0\0\0\0\0",
    "no header": bytes(8),
    "header longer than the file": _file(TWO, 32, length=10_000),
    "header of 2^63 bytes": _file(TWO, 32, length=2**63),
    "header of 2^64 - 1 bytes": _file(TWO, 32, length=2**64 - 1),
    "header longer than allowed": _file(TWO, 32, length=100_000_001),
    "not JSON": _file(b"not json at all"),
    "half of the JSON": _file(json.dumps(TWO).encode()[:-9], 32),
    "two JSON values": _file(json.dumps(TWO).encode() + b"{}", 32),
    "a list": _file([TWO], 32),
    "a number": _file(b"5"),
    "null": _file(b"null"),
    "UTF-16": _file(json.dumps(TWO).encode("utf-16"), 32),
    "UTF-32": _file(json.dumps(TWO).encode("utf-32"), 32),
    "byte order mark": _file(b"\xef\xbb\xbf" + json.dumps(TWO).encode(), 32),
    "not UTF-8": _file(b'{"\xff\xfe": 1}'),
    "deep nesting": _file(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "deep nesting in metadata": _file(b'{"__metadata__":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}"),
    "open nesting": _file(b"[" * 1_000_000),
    "a number of 5000 digits": _file(_raw("shape", "[" + "9" * 5000 + "]"), 24),
    "NaN as a value": _file(_raw("shape", "[NaN]"), 24),
    "Infinity as a value": _file(_raw("data_offsets", "[0, Infinity]"), 24),
    "duplicate tensor": _file(b'{"a":' + json.dumps(ROW).encode() + b',"a":' + json.dumps(ROW).encode() + b"}", 24),
    "duplicate field": _file(
        b'{"a":{"dtype":"F32","shape":[2,3],"shape":[3,2],"data_offsets":[0,24]}}', 24
    ),
    "half a letter in a name": _file(b'{"\\ud800":' + json.dumps(ROW).encode() + b"}", 24),
    "half a letter in the metadata": _file(
        b'{"__metadata__":{"a":"\\udfff"},"a":' + json.dumps(ROW).encode() + b"}", 24
    ),
    "metadata a list": _file({"__metadata__": ["a"], **TWO}, 32),
    "metadata a text": _file({"__metadata__": "a", **TWO}, 32),
    "metadata with a number": _file({"__metadata__": {"a": 1}, **TWO}, 32),
    "metadata with null": _file({"__metadata__": {"a": None}, **TWO}, 32),
    "metadata with a table": _file({"__metadata__": {"a": {"b": "c"}}, **TWO}, 32),
    "row a list": _file({"a": [1, 2]}, 24),
    "row null": _file({"a": None}, 24),
    "row a text": _file({"a": "F32"}, 24),
    "no dtype": _file(_with(dtype=None), 24),
    "dtype unknown": _file(_with(dtype="F33"), 24),
    "dtype of torch": _file(_with(dtype="float32"), 24),
    "dtype in lower case": _file(_with(dtype="f32"), 24),
    "dtype a number": _file(_with(dtype=32), 24),
    "dtype a list": _file(_with(dtype=["F32"]), 24),
    "no shape": _file(_with(shape=None), 24),
    "shape a number": _file(_with(shape=6), 24),
    "shape a text": _file(_with(shape="6"), 24),
    "shape a table": _file(_with(shape={"0": 6}), 24),
    "shape negative": _file(_with(shape=[-2, -3]), 24),
    "shape with a float": _file(_with(shape=[2.0, 3]), 24),
    "shape with a bool": _file(_with(shape=[6, True]), 24),
    "shape with a text": _file(_with(shape=["2", 3]), 24),
    "shape with null": _file(_raw("shape", "[null, 6]"), 24),
    "shape too large": _file(_with(shape=[2, 4]), 24),
    "shape too small": _file(_with(shape=[2, 2]), 24),
    "shape that overflows 64 bits": _file(_with(shape=[2**32, 2**32, 3]), 24),
    "shape that overflows to the right size": _file(_with(shape=[2**62 + 6]), 24),
    "shape with zero but bytes": _file(_with(shape=[0, 3]), 24),
    "no offsets": _file(_with(data_offsets=None), 24),
    "offsets a number": _file(_with(data_offsets=24), 24),
    "offsets a text": _file(_with(data_offsets="ab"), 24),
    "offsets a table": _file(_with(data_offsets={"0": 0, "1": 24}), 24),
    "one offset": _file(_with(data_offsets=[0]), 24),
    "three offsets": _file(_with(data_offsets=[0, 24, 24]), 24),
    "offsets negative": _file(_with(data_offsets=[-24, 0]), 24),
    "offsets swapped": _file(_with(data_offsets=[24, 0]), 24),
    "offset a float": _file(_with(data_offsets=[0, 24.0]), 24),
    "offset a bool": _file(_with(data_offsets=[False, 24]), 24),
    "offset a text": _file(_with(data_offsets=["0", "24"]), 24),
    "offset beyond the file": _file(_with(data_offsets=[0, 25]), 24),
    "offset of 2^64": _file(_with(data_offsets=[2**64, 2**64 + 24]), 24),
    "gap at the start": _file(_with(data_offsets=[4, 28]), 28),
    "gap": _file({"a": ROW, "b": {"dtype": "BF16", "shape": [4], "data_offsets": [26, 34]}}, 34),
    "overlap": _file({"a": ROW, "b": {"dtype": "BF16", "shape": [4], "data_offsets": [20, 28]}}, 28),
    "the same bytes twice": _file({"a": ROW, "b": ROW}, 24),
    "one byte short": _file(TWO, 31),
    "no data": _file(TWO),
    "one byte too many": _file(TWO, 33),
    "data without tensors": _file({}, 4),
    "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1234\n",
    "web page": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    "zip": b"PK\x03\x04\0\0\x08\x08" + bytes(100),
    "pickle": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(100),
}  # fmt: skip

SOUND: dict[str, bytes] = {
    "two tensors": _file(TWO, 32),
    "in another order": _file({"b": TWO["b"], "a": TWO["a"]}, 32),
    "with metadata": _file({"__metadata__": {"a": "b"}, **TWO}, 32),
    "metadata null": _file({"__metadata__": None, **TWO}, 32),
    "spaces after the header": _file(json.dumps(TWO).encode() + b" " * 7, 32),
    "no tensors": _file({}),
    "a scalar": _file(_with(shape=[], data_offsets=[0, 4]), 4),
    "an empty tensor": _file(_with(shape=[0, 3], data_offsets=[0, 0])),
    "an empty tensor before one": _file({"z": _with(shape=[0], data_offsets=[0, 0])["a"], "a": ROW}, 24),
    "an empty tensor after one": _file({"a": ROW, "z": _with(shape=[0], data_offsets=[24, 24])["a"]}, 24),
    "a name in Greek": _file({"βάρος": ROW}, 24),
}


def _write(folder: Path, content: bytes) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    return path


def _library_reads(path: Path) -> bool:
    try:
        with safe_open(str(path), framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  # it is no dict
                file.get_tensor(key)
    except (SafetensorError, OSError):
        return False
    return True


def _refusal(path: Path) -> BadFileError:
    begin = time.perf_counter()
    with pytest.raises(BadFileError) as caught:
        safetensors.read_header(path)
    assert time.perf_counter() - begin < 5
    error = caught.value
    assert str(path) in error.what and error.why and error.fix
    return error


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused(name: str, tmp_path: Path) -> None:
    _refusal(_write(tmp_path, BROKEN[name]))


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_file_is_read(name: str, tmp_path: Path) -> None:
    path = _write(tmp_path, SOUND[name])
    infos = safetensors.read_header(path).tensors
    assert _library_reads(path)
    with safetensors.SafetensorsFile(path) as file:
        assert dict(file.tensors) == infos
        for key, info in infos.items():
            tensor = file.get(key)
            assert (tuple(tensor.shape), tensor.nbytes) == (info.shape, info.nbytes)
            assert str(tensor.dtype) == f"torch.{info.dtype}"


@pytest.mark.parametrize("cut", range(len(SOUND["with metadata"])))
def test_a_file_cut_at_any_byte_is_refused(cut: int, tmp_path: Path) -> None:
    path = _write(tmp_path, SOUND["with metadata"][:cut])
    _refusal(path)
    assert not _library_reads(path)


def test_what_is_missing_is_said_in_bytes(tmp_path: Path) -> None:
    whole = SOUND["two tensors"]
    assert "5 bytes short" in _refusal(_write(tmp_path, whole[:-5])).why
    assert "3 bytes follow" in _refusal(_write(tmp_path, whole + b"abc")).why
    assert f"{len(whole) - 40} bytes short" not in _refusal(_write(tmp_path, whole[:40])).why
    assert "short of the end of its own header" in _refusal(_write(tmp_path, whole[:40])).why


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "Git LFS pointer": "Git LFS pointer",
        "web page": "web page",
        "zip": "zip archive",
        "pickle": "pickle",
        "overlap": "'b' overlaps",
        "gap": "2 bytes before it unused",
        "dtype unknown": "'F33'",
        "duplicate tensor": "'a' appears twice",
        "shape too large": "24 bytes, but F32 [2, 4] takes 32",
        "NaN as a value": "NaN",
    }.items(),
)
def test_the_fault_is_named(name: str, said: str, tmp_path: Path) -> None:
    assert said in _refusal(_write(tmp_path, BROKEN[name])).why


def test_the_size_of_the_file_can_be_left_for_later(tmp_path: Path) -> None:
    path = _write(tmp_path, BROKEN["no data"])
    infos = safetensors.read_header(path, complete=False).tensors
    assert set(infos) == {"a", "b"}
    _refusal(path)


def test_whatever_the_library_refuses_is_refused(tmp_path: Path) -> None:
    """The files above, and 1000 made of sound ones by changing, moving or cutting a few bytes."""
    made = random.Random(7)
    corpus = [*BROKEN.values(), *SOUND.values()]
    seeds = [SOUND["with metadata"], SOUND["two tensors"], SOUND["an empty tensor before one"]]
    for _ in range(1000):
        mutant = bytearray(made.choice(seeds))
        for _ in range(made.randint(1, 3)):
            at = made.randrange(len(mutant))
            kind = made.randrange(4)
            if kind == 0:
                mutant[at] = made.randrange(256)
            elif kind == 1:
                mutant[at] = made.choice(b'0123456789{}[]",:.-eE ')
            elif kind == 2:
                del mutant[at : at + made.randint(1, 4)]
            else:
                mutant[at:at] = mutant[made.randrange(len(mutant)) :][: made.randint(1, 6)]
            if not mutant:
                break
        corpus.append(bytes(mutant))
    ours_only = 0
    for content in corpus:
        path = _write(tmp_path, content)
        library = _library_reads(path)
        try:
            safetensors.read_header(path)
        except BadFileError:
            ours_only += library
        else:
            assert library, content
    # What is stricter here: names that stand there twice. (The library takes some of those.)
    assert ours_only < 20


@pytest.mark.parametrize(
    "make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "folder", "device"]
)
def test_what_is_no_regular_file_is_refused_at_once(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    make(path)
    assert "not a regular file" in _refusal(path).why


@pytest.mark.skipif(os.name != "posix", reason="other systems name files in UTF-16")
def test_a_path_that_is_not_utf_8(tmp_path: Path) -> None:
    """Its header could be read, and then the library said no: as if the file were damaged."""
    folder = tmp_path / os.fsdecode("モデル".encode("shift_jis"))
    folder.mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    path = (tmp_path / "model.safetensors").rename(folder / "model.safetensors")
    assert "Rename" in _refusal(path).fix


def test_no_such_file(tmp_path: Path) -> None:
    assert "No such file" in _refusal(tmp_path / "model.safetensors").why


def test_every_dtype_of_the_library_that_torch_has(tmp_path: Path) -> None:
    dtypes = [getattr(torch, name) for name in safetensors.DTYPES.values()]
    tensors = {str(dtype): torch.zeros(3, dtype=torch.uint8).to(dtype) for dtype in dtypes if dtype.itemsize > 1}
    tensors |= {str(dtype): torch.zeros(3, dtype=torch.uint8).view(dtype) for dtype in dtypes if dtype.itemsize == 1}
    save_file(tensors, tmp_path / "model.safetensors")
    infos = safetensors.read_header(tmp_path / "model.safetensors").tensors
    assert {name: f"torch.{info.dtype}" for name, info in infos.items()} == {name: name for name in tensors}


def test_a_file_that_was_replaced_while_it_was_open_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path, SOUND["two tensors"])
    real = safetensors.read_header

    def read_then_replace(path: Path, **values: Any) -> Any:
        seen = real(path, **values)
        _write(tmp_path, SOUND["a scalar"])
        return seen

    monkeypatch.setattr(safetensors, "read_header", read_then_replace)
    with pytest.raises(BadFileError, match="replaced"):
        safetensors.SafetensorsFile(path)
    (tmp_path / "model.safetensors").write_bytes(SOUND["two tensors"])
    header = real(path)
    swapped = replace(header, tensors={**header.tensors, "a": header.tensors["b"]})
    monkeypatch.setattr(safetensors, "read_header", lambda path: swapped)
    with pytest.raises(BadFileError, match="replaced"):
        safetensors.SafetensorsFile(path).get("a")


class TestWriter:
    def test_what_is_written_is_read(self, tmp_path: Path) -> None:
        base = torch.arange(12.0)
        tensors = {"a": base.view(3, 4), "shared": base.view(3, 4), "turned": base.view(3, 4).t(), "none": base[:0]}
        path = tmp_path / "model.safetensors"
        safetensors_writer.write(path, tensors, {"who": "me"})
        with safetensors.SafetensorsFile(path) as file:
            assert file.metadata == {"who": "me"}
            for name, tensor in tensors.items():
                assert torch.equal(file.get(name), tensor)

    def test_what_can_be_is_aligned(self, tmp_path: Path) -> None:
        tensors = {
            "b": torch.ones(3), "c": torch.ones(16), "a": torch.ones(64, dtype=torch.int8), "d": torch.ones(5).half(),
            "e": torch.ones(128).bfloat16(), "f": torch.ones(()), "g": torch.ones(7, dtype=torch.bool),
        }  # fmt: skip
        path = tmp_path / "model.safetensors"
        safetensors_writer.write(path, tensors, {})
        with safe_open(path, "pt") as file:  # the library reads it
            assert all(torch.equal(file.get_tensor(key), tensor) for key, tensor in tensors.items())
        with safetensors.SafetensorsFile(path) as file:
            for key, tensor in tensors.items():
                got = file.get(key)
                align = 64 if tensor.numel() * tensor.itemsize % 64 == 0 else tensor.itemsize
                assert got.data_ptr() % align == 0, key
                assert torch.equal(got, tensor)

    def test_a_few_at_a_time_in_any_order(self, tmp_path: Path) -> None:
        tensors = {"a": torch.arange(16.0), "b": torch.ones(3, dtype=torch.int8), "c": torch.arange(64).view(8, 8)}
        parts = {key: safetensors_writer.part_of(tensor.to("meta")) for key, tensor in tensors.items()}
        for order in (("c", "a", "b"), ("b", "c", "a")):
            safetensors_writer.write_parts(
                tmp_path / "few.safetensors", parts, ({key: tensors[key]} for key in order), {"who": "me"}
            )
            safetensors_writer.write(tmp_path / "all.safetensors", tensors, {"who": "me"})
            assert (tmp_path / "few.safetensors").read_bytes() == (tmp_path / "all.safetensors").read_bytes()

    @pytest.mark.parametrize(
        "come", [{}, {"a": torch.ones(3)}, {"a": torch.ones(2, dtype=torch.int8)}, {"b": torch.ones(2)}], ids=str
    )
    def test_what_comes_must_be_what_was_said(self, come: dict[str, torch.Tensor], tmp_path: Path) -> None:
        part = safetensors_writer.part_of(torch.ones(2))
        for some in ([come], [{"a": torch.ones(2)}, {"a": torch.ones(2)}]):  # twice is wrong as well
            with pytest.raises(ValueError, match=r"^tensor '[ab]' (is .*, expected |was announced but not written$)"):
                safetensors_writer.write_parts(tmp_path / "a.safetensors", {"a": part}, some, {})
        assert list(tmp_path.iterdir()) == []

    def test_a_failure_leaves_the_old_file_and_nothing_else(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "model.safetensors"
        safetensors_writer.write(path, {"a": torch.ones(2)}, {})
        before = path.read_bytes()

        def fail(descriptor: int) -> None:
            raise OSError("the disk is full")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(SettingsError, match="full"):
            safetensors_writer.write(path, {"a": torch.zeros(2)}, {})
        assert path.read_bytes() == before
        assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
