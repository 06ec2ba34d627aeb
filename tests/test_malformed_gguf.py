"""GGUF files with a sound header and bad contents: scales of blocks that are no numbers, weights of another shape."""

from __future__ import annotations

import json
import math
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import sdquant
from sdquant import backends
from sdquant.core.gguf_types import TYPES as TYPE_ROWS
from sdquant.errors import BadFileError, SdquantError, UnsupportedFileError
from sdquant.formats.gguf.writer import write_gguf

from . import layouts
from .foreign import WEIGHTS
from .malformed import tiny

NAME = "time_text_embed.timestep_embedder.linear_1.weight"  # [64, 256], as wide as the largest blocks
BIAS = "time_text_embed.timestep_embedder.linear_1.bias"
TYPES = [row.name for row in backends.get("gguf").schemes if row.group and row.name in TYPE_ROWS]

# Where ggml's block structs have half-precision numbers: bytes of a block, offsets. By type; from ggml-common.h.
HALVES: dict[str, tuple[int, tuple[int, ...]]] = {
    "q4_0": (18, (0,)), "q4_1": (20, (0, 2)), "q5_0": (22, (0,)), "q5_1": (24, (0, 2)), "q8_0": (34, (0,)),
    "q2_k": (84, (80, 82)), "q3_k": (110, (108,)), "q4_k": (144, (0, 2)), "q5_k": (176, (0, 2)), "q6_k": (210, (208,)),
    "iq4_nl": (18, (0,)), "iq4_xs": (136, (0,)), "iq3_s": (110, (0,)), "iq3_xxs": (98, (0,)), "iq2_s": (82, (0,)),
    "iq2_xs": (74, (0,)), "iq2_xxs": (66, (0,)), "iq1_s": (50, (0,)), "tq2_0": (66, (64,)), "tq1_0": (54, (52,)),
}  # fmt: skip
NO_NUMBERS = {"NaN": 0x7E00, "minus NaN": 0xFE01, "infinity": 0x7C00, "minus infinity": 0xFC00}


@dataclass(frozen=True)
class Row:
    """One tensor of the file: logical shape, type, bytes."""

    shape: tuple[int, ...]
    type: str
    data: bytes


@dataclass
class Model:
    """A GGUF file in memory, and the config.json beside it."""

    rows: dict[str, Row]
    metadata: dict[str, Any]
    config: dict[str, Any]

    def write(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        rows = [(name, row.shape, row.type, row.data) for name, row in self.rows.items()]
        write_gguf(folder / "model.gguf", rows, self.metadata)
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder / "model.gguf"

    def put(self, name: str, **changes: Any) -> None:
        self.rows[name] = replace(self.rows[name], **changes)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The tiny model in bf16."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what other libraries say while they are imported
        folder = tiny(tmp_path_factory.mktemp("tiny") / "float")
    rows = {
        name: Row(tuple(tensor.shape), "bf16", tensor.view(torch.uint8).numpy().tobytes())
        for name, tensor in load_file(folder / WEIGHTS).items()
    }
    return Model(rows, {"general.architecture": "flux"}, json.loads((folder / "config.json").read_text()))


@pytest.fixture(scope="module")
def quantized(plain: Model) -> Callable[[str], Model]:
    """quantized(type): the same with one weight in that type, of random codes and scales of about 1; a copy."""

    def get(kind: str) -> Model:
        model = Model(dict(plain.rows), dict(plain.metadata), dict(plain.config))
        model.put(NAME, type=kind, data=_blocks(kind))
        return model

    return get


@cache
def _blocks(kind: str) -> bytes:
    """The bytes of a sound weight of [64, 256]."""
    row = TYPE_ROWS[kind]
    generator = torch.Generator().manual_seed(0)
    shape = (64 * 256 // row.block, row.nbytes)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for at in HALVES[kind][1] if kind in HALVES else ():
        blocks[:, at : at + 2] = torch.tensor([0x00, 0x3C], dtype=torch.uint8)
    if kind == "iq1_m":
        blocks[:, 49:56:2] &= 0x3F  # no exponent of all ones
    if kind == "mxfp4":
        blocks[:, 0] = 127
    if kind == "nvfp4":
        blocks[:, :4] = 56
    return blocks.numpy().tobytes()


def _refused(call: Callable[..., Any], path: Path, *words: str, kind: type[SdquantError] = BadFileError) -> None:
    with pytest.raises(kind) as caught:
        call(path, progress=False)
    error = caught.value
    text = str(error)
    assert str(path) in text or str(path.parent) in text, text
    assert all(word in text for word in words), text
    assert error.what and error.why and error.fix


class TestScales:
    def test_every_type_is_here(self) -> None:
        assert set(HALVES) | {"iq1_m", "mxfp4", "nvfp4"} == set(TYPES)

    @pytest.mark.parametrize("kind", TYPES)
    def test_sound(self, kind: str, quantized: Callable[[str], Model], tmp_path: Path) -> None:
        """The control."""
        path = quantized(kind).write(tmp_path / "model")
        assert sdquant.verify(path).quant == kind
        model = sdquant.load_model(path.parent, progress=False)
        assert model.sdquant.plan.components[0].action == "found"

    @pytest.mark.parametrize("value", NO_NUMBERS)
    @pytest.mark.parametrize(("kind", "at"), [(kind, at) for kind, (_, places) in HALVES.items() for at in places])
    def test_no_number(self, kind: str, at: int, value: str, quantized: Callable[[str], Model], tmp_path: Path) -> None:
        """In the first, the last, or another block."""
        model = quantized(kind)
        data, size = bytearray(model.rows[NAME].data), HALVES[kind][0]
        blocks = len(data) // size
        assert blocks * size == len(data)
        block = {"NaN": blocks - 1, "infinity": 0}.get(value, blocks // 2)
        data[block * size + at : block * size + at + 2] = struct.pack("<H", NO_NUMBERS[value])
        model.put(NAME, data=bytes(data))
        _refused_scale(model.write(tmp_path / "model"), kind)

    @pytest.mark.parametrize("half", [0x7E00, 0x7C00, 0xFC00])
    def test_iq1_m(self, half: int, quantized: Callable[[str], Model], tmp_path: Path) -> None:
        """Its scale is in the highest four bits of the last four 16-bit numbers of a block."""
        model = quantized("iq1_m")
        data = bytearray(model.rows[NAME].data)
        for number in range(4):
            at = 56 * 3 + 48 + 2 * number
            low = struct.unpack_from("<H", data, at)[0] & 0x0FFF
            struct.pack_into("<H", data, at, low | (half >> 4 * number & 15) << 12)
        model.put(NAME, data=bytes(data))
        _refused_scale(model.write(tmp_path / "model"), "iq1_m")

    @pytest.mark.parametrize("exponent", [0xFF, 0xFE])
    def test_mxfp4(self, exponent: int, quantized: Callable[[str], Model], tmp_path: Path) -> None:
        """E8M0's NaN, and a power of two with which the largest codes are infinite; in the last block."""
        model = quantized("mxfp4")
        data = bytearray(model.rows[NAME].data)
        data[-17:] = bytes([exponent]) + b"\x77" * 16
        model.put(NAME, data=bytes(data))
        _refused_scale(model.write(tmp_path / "model"), "mxfp4")

    @pytest.mark.parametrize("scale", [0x7F, 0xFF])
    @pytest.mark.parametrize("place", range(4))
    def test_nvfp4(self, place: int, scale: int, quantized: Callable[[str], Model], tmp_path: Path) -> None:
        """E4M3 has no infinity; ggml takes its NaN for 0, which is not what was written."""
        model = quantized("nvfp4")
        data = bytearray(model.rows[NAME].data)
        data[len(data) - 36 + place] = scale
        model.put(NAME, data=bytes(data))
        _refused_scale(model.write(tmp_path / "model"), "nvfp4")

    @pytest.mark.parametrize("kind", TYPES)
    def test_the_largest_numbers_are_numbers(
        self, kind: str, quantized: Callable[[str], Model], tmp_path: Path
    ) -> None:
        """The control: the last before infinity, with either sign where there is one."""
        model = quantized(kind)
        data, size = bytearray(model.rows[NAME].data), TYPE_ROWS[kind].nbytes
        for at in HALVES[kind][1] if kind in HALVES else ():
            data[len(data) - size + at : len(data) - size + at + 2] = struct.pack("<H", 0x7BFF)
            data[at : at + 2] = struct.pack("<H", 0xFBFF)
        if kind == "iq1_m":
            for number, bits in enumerate((0xF, 0xF, 0xB, 0x7)):
                data[len(data) - 7 + 2 * number] = data[len(data) - 7 + 2 * number] & 0x0F | bits << 4
        if kind == "mxfp4":
            data[-17] = 252
        if kind == "nvfp4":
            data[-36:-32] = b"\x7e" * 4
        model.put(NAME, data=bytes(data))
        path = model.write(tmp_path / "model")
        assert sdquant.verify(path).quant == kind
        assert (sdquant.load_model(path, progress=False)).sdquant.plan.components[0].scheme == kind

    def test_the_rows_of_a_fused_weight(self, flux: Path, tmp_path: Path) -> None:
        """The layers are some rows of what the file has, which the error names; each row is looked at in its layer."""
        state = layouts.bfl(layouts.weights(flux / "transformer"))
        name = "double_blocks.0.img_attn.qkv.weight"
        out, columns = state[name].shape
        for row in (None, 0, out // 2, out - 1):
            rows = {}
            for key, tensor in state.items():
                if key != name:
                    rows[key] = Row(tuple(tensor.shape), "bf16", tensor.view(torch.uint8).numpy().tobytes())
                    continue
                blocks = bytearray((b"\x00\x3c" + bytes(32)) * (tensor.numel() // 32))
                if row is not None:
                    blocks[row * columns // 32 * 34 + 1] = 0x7C
                rows[key] = Row((out, columns), "q8_0", bytes(blocks))
            config = json.loads((flux / "transformer" / "config.json").read_text())
            path = Model(rows, {"general.architecture": "flux"}, config).write(tmp_path / "model")
            if row is None:
                sdquant.load_model(path, progress=False)
            else:
                _refused(sdquant.load_model, path, name, "q8_0", "not finite")


def _refused_scale(path: Path, kind: str) -> None:
    """By whom it is looked into, and by whom it is loaded; the headers show nothing."""
    assert sdquant.detect(path).prequantized
    sdquant.plan(path)
    for call in (sdquant.verify, sdquant.load_model):
        _refused(call, path, NAME, kind, "not finite")


def _turned(model: Model) -> None:
    """Rows for columns: the same bytes in another shape."""
    model.put(NAME, shape=(256, 64))


def _orig(*shape: int) -> Callable[[Model], None]:
    return lambda model: model.metadata.update({f"comfy.gguf.orig_shape.{NAME}": list(shape)})


def _rows(count: int) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        data = model.rows[NAME].data
        size = len(data) // 64
        model.put(NAME, shape=(count, 256), data=(data * 2)[: count * size])

    return change


def _numbers(name: str, kind: str, size: int) -> Callable[[Model], None]:
    return lambda model: model.put(name, type=kind, data=bytes(size * math.prod(model.rows[name].shape)))


def _longer(model: Model) -> None:
    model.put(BIAS, shape=(65,), data=bytes(130))


# By name: what is wrong, whether q8_0 or plain, what the error must name.
SHAPES: dict[str, tuple[Callable[[Model], None], str]] = {
    "turned": (_turned, NAME),
    "orig_shape turned": (_orig(256, 64), NAME),
    "orig_shape split": (_orig(64, 16, 16), NAME),
    "orig_shape flat": (_orig(64 * 256), NAME),
    "fewer rows": (_rows(63), NAME),
    "more rows": (_rows(65), NAME),
    "no weight": (lambda model: model.rows.pop(NAME) and None, NAME),
    "no bias": (lambda model: model.rows.pop(BIAS) and None, BIAS),
    "a longer bias": (_longer, BIAS),
    "a bias of i8": (_numbers(BIAS, "i8", 1), BIAS),
    "a bias of i16": (_numbers(BIAS, "i16", 2), BIAS),
    "a bias of i32": (_numbers(BIAS, "i32", 4), BIAS),
    "a weight of i8": (_numbers(NAME, "i8", 1), NAME),
    "a weight of i64": (_numbers(NAME, "i64", 8), NAME),
    "a scale beside it": (lambda model: model.rows.update({f"{NAME}_scale": Row((1,), "f32", bytes(4))}), NAME),
    "a wider model": (lambda model: model.config.update(num_attention_heads=8), ""),
    "a longer model": (lambda model: model.config.update(num_single_layers=2), ""),
    "metadata that is none": (lambda model: model.metadata.update(sdquant="{"), ""),
    "metadata without tables": (lambda model: model.metadata.update(sdquant='{"format": 1}'), ""),
    "metadata of deep nesting": (lambda model: model.metadata.update(sdquant="[" * 100_000), ""),
    "metadata with weights": (lambda model: model.metadata.update(sdquant=_own(shape=[64, 512])), NAME),
    "metadata with safetensors' parts": (lambda model: model.metadata.update(sdquant=_own(scheme="nf4")), NAME),
}


def _own(**changes: Any) -> str:
    row = {"scheme": "q8_0", "shape": [64, 256], "dtype": "bfloat16", "details": {"type": "q8_0"}}
    row |= {"parts": ["blocks"], "extra": []} | changes
    return json.dumps({"format": 1, "config": {}, "weights": {NAME: row}})


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", ["q8_0", "bf16"])
def test_what_does_not_fit(
    kind: str, name: str, plain: Model, quantized: Callable[[str], Model], tmp_path: Path
) -> None:
    model = quantized("q8_0")
    if kind == "bf16":
        model.rows[NAME] = plain.rows[NAME]
    change, says = SHAPES[name]
    change(model)
    path = model.write(tmp_path / "model")
    _refused(sdquant.verify, path.parent, says, kind=SdquantError)
    _refused(sdquant.load_model, path, says, kind=SdquantError)


@pytest.mark.parametrize(("kind", "form", "dtype"), [("f32", "f", 4), ("f16", "e", 2), ("f64", "d", 8)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [NAME, BIAS])
def test_a_plain_number_that_is_none(
    kind: str, form: str, dtype: int, value: float, name: str, plain: Model, tmp_path: Path
) -> None:
    count = math.prod(plain.rows[name].shape)
    model = Model(dict(plain.rows), plain.metadata, plain.config)
    for last in (0.0, value):
        data = bytes(dtype * (count - 1)) + struct.pack(f"<{form}", last)
        model.put(name, type=kind, data=data)
        path = model.write(tmp_path / "model")
        if last == 0:
            sdquant.verify(path)
        else:
            _refused(sdquant.verify, path, name, "not finite")
            _refused(sdquant.load_model, path, name, "not finite")


def test_a_type_that_nothing_decodes(plain: Model, tmp_path: Path) -> None:
    model = Model(dict(plain.rows), plain.metadata, plain.config)
    model.put(NAME, type="q1_0", data=bytes(64 * 2 * 18))
    path = model.write(tmp_path / "model")
    for call in (sdquant.verify, sdquant.load_model):
        _refused(call, path, "q1_0", kind=UnsupportedFileError)
