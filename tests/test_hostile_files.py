"""Files made to hang a reader or to fill its memory: `detect` takes 64 MB and twice the header at most, on each."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import detect_cost

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux' /proc")


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


Make = Callable[[Path], int]  # makes the file at a path; gives the length of its header


def _safetensors(header: Callable[[], Any], size: int = 0, length: int | None = None) -> Make:
    """A file with this header (bytes, or what JSON is made of) and `size` bytes of nothing, which take no room."""

    def make(path: Path) -> int:
        made = header()
        raw = made if isinstance(made, bytes) else _json(made)
        path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw)
        os.truncate(path, 8 + len(raw) + size)
        return min(length or len(raw), len(raw) + size)

    return make


def _row(shape: list[int], begin: int = 0) -> dict[str, Any]:
    size = 1
    for n in shape:
        size *= n
    return {"dtype": "U8", "shape": shape, "data_offsets": [begin, begin + size]}


def _rows(count: int) -> dict[str, Any]:
    return {f"{number:x}": _row([1], number) for number in range(count)}


def _text(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def _gguf(
    pairs: Callable[[], list[bytes]] = list,
    rows: Callable[[], list[bytes]] = lambda: [_tensor("w")],
    *,
    counts: tuple[int, int] | None = None,
    size: int = 32,
) -> Make:
    """A GGUF file of these metadata pairs and tensor rows, and `size` bytes of nothing, which take no room."""

    def make(path: Path) -> int:
        values, tensors = pairs(), rows()
        number = counts or (len(tensors), len(values))
        head = b"GGUF" + struct.pack("<IQQ", 3, *number) + b"".join(values + tensors)
        path.write_bytes(head)
        os.truncate(path, len(head) + -len(head) % 32 + size)
        return len(head)

    return make


def _array(name: str, kind: int, count: int, items: bytes) -> bytes:
    return _text(name.encode()) + struct.pack("<IIQ", 9, kind, count) + items


def _tensor(name: str, offset: int = 0) -> bytes:
    return _text(name.encode()) + struct.pack("<IQIQ", 1, 8, 0, offset)


def _folder(name: str, content: Callable[[], bytes]) -> Make:
    """A folder of a JSON file beside a small weight file; its length counts as that of a header."""

    def make(path: Path) -> int:
        path.mkdir()
        _safetensors(lambda: {"a.mask": _row([4])}, 4)(path / "model.safetensors")
        return (path / f"{name}.json").write_bytes(content())

    return make


def _special(make: Callable[[Path], Any]) -> Make:
    def made(path: Path) -> int:
        make(path)
        return 0

    return made


_BIG = 6 << 30  # bytes of sparse files: a reader that reads them would be noticed


def _value(name: str, text: bytes) -> bytes:
    return _text(name.encode()) + struct.pack("<I", 8) + _text(text)


# By name with suffix.
SOUND: dict[str, Make] = {
    "sparse.safetensors": _safetensors(lambda: {"a.mask": _row([_BIG])}, _BIG),
    "many tensors.safetensors": _safetensors(lambda: _rows(20_000), 20_000),
    "large text.safetensors": _safetensors(lambda: {"__metadata__": {"a": "x" * (12 << 20)}, "a": _row([4])}, 4),
    "a wide text.safetensors": _safetensors(
        lambda: json.dumps(
            {"__metadata__": {"a": "😀" + "x" * (6 << 20)}, "a": _row([4])}, ensure_ascii=False
        ).encode(),
        4,
    ),
    "sparse.gguf": _gguf(rows=lambda: [_text(b"w") + struct.pack("<IQIQ", 1, _BIG // 4, 0, 0)], size=_BIG),
    "many tensors.gguf": _gguf(rows=lambda: [_tensor(f"{n:x}", 32 * n) for n in range(20_000)], size=32 * 20_000),
    "many texts.gguf": _gguf(lambda: [_array("a", 8, 256_000, _text(b"token") * 256_000)]),
    "many numbers.gguf": _gguf(lambda: [_array("a", 4, 4 << 20, bytes(16 << 20))]),
}
HOSTILE: dict[str, Make] = {
    "length of 2^63.safetensors": _safetensors(lambda: b"{}", 100, 2**63),
    "length of 2^64 - 1.safetensors": _safetensors(lambda: b"{}", 100, 2**64 - 1),
    "length of 4 GB.safetensors": _safetensors(lambda: b"{", _BIG, 4 << 30),
    "length of 100 MB.safetensors": _safetensors(lambda: b"{", _BIG, 100_000_000),
    "data of 8 GB short.safetensors": _safetensors(lambda: {"a.mask": _row([8 << 30])}, 4),
    "data of 2^60 bytes.safetensors": _safetensors(lambda: {"a.mask": _row([2**60])}, 4),
    "overlaps.safetensors": _safetensors(lambda: {f"{n:x}": _row([1 << 20]) for n in range(10_000)}, 1 << 20),
    "open lists.safetensors": _safetensors(lambda: b"[" * (12 << 20)),
    "open tables.safetensors": _safetensors(lambda: b'{"a":' * (2 << 20)),
    "empty lists.safetensors": _safetensors(lambda: b'{"a":[' + b"[]," * (2 << 20) + b"[]]}"),
    "empty tables.safetensors": _safetensors(lambda: b'{"a":[' + b"{}," * (2 << 20) + b"{}]}"),
    "small keys.safetensors": _safetensors(lambda: b"{" + b",".join(b'"%x":0' % n for n in range(1 << 20)) + b"}"),
    "keys as allowed.safetensors": _safetensors(lambda: b"{" + b",".join(b'"%x":0' % n for n in range(240_000)) + b"}"),
    "numbers.safetensors": _safetensors(lambda: b'{"a":[' + b"999," * (4 << 20) + b"1]}"),
    "texts.safetensors": _safetensors(lambda: b'{"a":[' + b'"xyz",' * (2 << 20) + b'"a"]}'),
    "wide text.safetensors": _safetensors(lambda: '{"a":"😀'.encode() + b"x" * (15 << 20) + b'"}'),
    "a long name.safetensors": _safetensors(lambda: {"x" * (20 << 20): _row([4])}),
    "a long dtype.safetensors": _safetensors(lambda: {"a": {**_row([4]), "dtype": "x" * (20 << 20)}}),
    "an escape in a large text.safetensors": _safetensors(lambda: b'{"a":"' + b"x" * (15 << 20) + b'\\ud83d\\ude00"}'),
    "escapes.safetensors": _safetensors(lambda: b'{"a":"' + b"\\ud83d\\ude00" * (1 << 20) + b'"}'),
    "4300 digits.safetensors": _safetensors(lambda: b'{"a":' + b"9" * 4300 + b"}"),
    "12 million digits.safetensors": _safetensors(lambda: b'{"a":' + b"9" * (12 << 20) + b"}"),
    "exponent.safetensors": _safetensors(lambda: b'{"a":{"dtype":"U8","shape":[1e999999],"data_offsets":[0,4]}}', 4),
    "duplicate keys.safetensors": _safetensors(lambda: b"{" + b'"a":0,' * (2 << 20) + b'"a":0}'),
    "many dimensions.safetensors": _safetensors(
        lambda: b'{"a":{"dtype":"U8","shape":[' + b"1," * 200_000 + b'1],"data_offsets":[0,1]}}', 1
    ),
    "large dimensions.safetensors": _safetensors(
        lambda: b'{"a":{"dtype":"U8","shape":[' + b",".join([b"9" * 4000] * 64) + b'],"data_offsets":[0,1]}}', 1
    ),
    "large offsets.safetensors": _safetensors(
        lambda: b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[' + b"9" * 4299 + b"," + b"9" * 4300 + b"]}}", 1
    ),
    "metadata of lists.safetensors": _safetensors(
        lambda: {"__metadata__": {"sdquant": '{"weights": [' + "[]," * (2 << 20) + "[]]}"}, "a": _row([4])}, 4
    ),
    "metadata of open lists.safetensors": _safetensors(
        lambda: {"__metadata__": {"sdquant": "[" * (10 << 20)}, "a": _row([4])}, 4
    ),
    "2^40 numbers.gguf": _gguf(lambda: [_array("a", 4, 2**40, bytes(64))]),
    "2^40 texts.gguf": _gguf(lambda: [_array("a", 8, 2**40, bytes(64))]),
    "2^40 numbers in a sparse file.gguf": _gguf(lambda: [_array("a", 0, 2**40, b"")], list, size=_BIG),
    "2^63 texts in a sparse file.gguf": _gguf(lambda: [_array("a", 8, 2**63, b"")], list, size=_BIG),
    "2^26 texts in a sparse file.gguf": _gguf(lambda: [_array("a", 8, 1 << 26, b"")], list, size=_BIG),
    "2^24 texts in a sparse file.gguf": _gguf(lambda: [_array("a", 8, 1 << 24, b"")], list, size=_BIG),
    "arrays in arrays.gguf": _gguf(lambda: [_array("a", 9, 1, struct.pack("<IQ", 9, 1) * 100_000)]),
    "a text of 2^62.gguf": _gguf(lambda: [_text(b"a") + struct.pack("<IQ", 8, 2**62)], size=_BIG),
    "a key of 2^62.gguf": _gguf(lambda: [struct.pack("<Q", 2**62)], size=_BIG),
    "2^63 tensors.gguf": _gguf(counts=(2**63, 0), size=_BIG),
    "2^63 values.gguf": _gguf(counts=(1, 2**63), size=_BIG),
    "2^31 dimensions.gguf": _gguf(rows=lambda: [_text(b"w") + struct.pack("<I", 2**31)], size=_BIG),
    "65536 tensors and values.gguf": _gguf(
        lambda: [_text(b"%x" % n) + struct.pack("<IB", 0, 1) for n in range(65_536)],
        lambda: [_tensor(f"{n:x}") for n in range(65_536)],
    ),
    "many arrays of numbers.gguf": _gguf(
        lambda: [_array(f"{n:x}", 5, 1024, struct.pack("<1024i", *range(10**6, 10**6 + 1024))) for n in range(2_000)]
    ),
    "many arrays of texts.gguf": _gguf(
        lambda: [_array(f"{n:x}", 8, 1024, _text(b"%4x" % n) * 1024) for n in range(2_000)]
    ),
    "texts that are no UTF-8.gguf": _gguf(lambda: [_value(f"{n:x}", b"\xff" * 1_000_000) for n in range(20)], list),
    "wide texts.gguf": _gguf(lambda: [_value(f"{n:x}", "😀".encode() + b"x" * 1_000_000) for n in range(60)], list),
    "overlaps.gguf": _gguf(rows=lambda: [_tensor(f"{n:x}") for n in range(30_000)]),
    "pipe.safetensors": _special(os.mkfifo),
    "pipe.gguf": _special(os.mkfifo),
    "folder.safetensors": _special(Path.mkdir),
    "folder.gguf": _special(Path.mkdir),
    "zeros.safetensors": _special(lambda path: path.symlink_to("/dev/zero")),
    "zeros.gguf": _special(lambda path: path.symlink_to("/dev/zero")),
    "random.safetensors": _special(lambda path: path.symlink_to("/dev/urandom")),
    "terminal.safetensors": _special(lambda path: path.symlink_to("/dev/tty")),
    "circle.safetensors": _special(lambda path: path.symlink_to(path.name)),
    "config of lists": _folder("config", lambda: b'{"a":[' + b"[]," * (2 << 20) + b"[]]}"),
    "config of open lists": _folder("config", lambda: b'{"a":' + b"[" * (10 << 20)),
    "config of digits": _folder("config", lambda: b'{"a":' + b"9" * (10 << 20) + b"}"),
    "config of wide text": _folder("config", lambda: '{"a":"😀'.encode() + b"x" * (15 << 20) + b'"}'),
    "index of small keys": _folder(
        "model.safetensors.index",
        lambda: b'{"weight_map":{' + b",".join(b'"%x":"a"' % n for n in range(1 << 20)) + b"}}",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], dict[str, Any]]]:
    """looked(name): what `detect_cost` says of the file of that name. All are looked into by one process."""
    folder = tmp_path_factory.mktemp("hostile")
    sound = folder / "sound.safetensors"
    _safetensors(lambda: {"a.mask": _row([4])}, 4)(sound)
    words = [sys.executable, detect_cost.__file__, str(sound)]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    stdin, stdout = child.stdin, child.stdout

    def look(name: str) -> dict[str, Any]:
        path = folder / name
        header = (SOUND.get(name) or HOSTILE[name])(path)
        stdin.write(json.dumps([str(path), header]) + "\n")
        stdin.flush()
        answer = stdout.readline()
        assert answer, "a process ended without a word: by the alarm, or by a signal"
        if path.is_file() and not path.is_symlink():
            path.unlink()
        said: dict[str, Any] = json.loads(answer)
        return said | {"allowed": detect_cost.SPARE + 2 * header}

    yield look
    child.communicate(timeout=detect_cost.LIMIT)
    assert child.returncode == 0


def _within_limits(answer: dict[str, Any]) -> None:
    assert "raw" not in answer, answer["raw"]
    assert answer["bytes"] <= answer["allowed"], answer


@pytest.mark.parametrize("name", SOUND)
def test_large_and_sound(name: str, looked: Callable[[str], dict[str, Any]]) -> None:
    """The control: they are read, and within the same limits."""
    answer = looked(name)
    _within_limits(answer)
    assert not answer["refused"], answer["said"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str, looked: Callable[[str], dict[str, Any]]) -> None:
    answer = looked(name)
    _within_limits(answer)
    assert answer["refused"], answer["said"]
    assert answer["length"] < 100_000  # nobody wants a megabyte of somebody's header in a sentence


def test_the_limit_is_one(looked: Callable[[str], dict[str, Any]], tmp_path: Path) -> None:
    """What is measured is the memory of the reader: tables as Python makes them take more than is allowed."""
    path = tmp_path / "lists.json"
    path.write_bytes(b"[" + b"[]," * (2 << 20) + b"[]]")
    code = (
        f"import sys; sys.path.insert(0, {str(Path(detect_cost.__file__).parent)!r})\n"
        "import json, detect_cost\n"
        "before = detect_cost._memory()['VmRSS']\n"
        f"made = json.loads(open({str(path)!r}).read())\n"
        "print(detect_cost._memory()['VmHWM'] - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > detect_cost.SPARE + 2 * path.stat().st_size
