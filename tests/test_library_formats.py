"""`save(..., portable="torchao")` and "bfl": read by the real torchao, diffusers and transformers, bit for bit.

They run in a process of their own (`library_readers`), with torchao from `.libraries`, or where it is installed; the
tests of torchao are skipped where it is in neither place.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sdquant
from sdquant import backends, cli, demo
from sdquant.errors import ConflictError, SettingsError
from sdquant.nn import quantized

from . import libraries
from .library_readers import output

WHOLE = ("transformer", "text_encoder", "text_encoder_2")

# By the name of a saved place: the format, the options of loading, the components that are read, and their class there.
Row = tuple[str, dict[str, Any], tuple[str, ...], str]
ROWS: dict[str, Row] = {
    "int8_row": ("torchao", {"quant": "int8_row"}, WHOLE, "Int8Tensor"),
    "bfl nvfp4": ("bfl", {"quant": "comfy:nvfp4"}, ("transformer",), "nvfp4"),
    "bfl fp8": ("bfl", {"quant": "fp8,packing=float8", "skip": ["to_out"]}, ("transformer",), "fp8r"),
}
SLOW: dict[str, Row] = {
    "int8_tensor": ("torchao", {"quant": "int8_tensor"}, WHOLE, "Int8Tensor"),
    "int8_row in float32": ("torchao", {"quant": "int8_row", "skip": ["to_q"]}, ("transformer",), "Int8Tensor"),
    "tables too": ("torchao", {"quant": "fp8,packing=float8,embeddings"}, WHOLE, "Float8Tensor"),
    "mxfp8": ("torchao", {"quant": "mxfp8"}, WHOLE, "MXTensor"),
    "nvfp4": ("torchao", {"quant": "comfy:nvfp4"}, WHOLE, "NVFP4Tensor"),
    "bfl in float32": ("bfl", {"quant": "comfy:nvfp4"}, ("transformer",), "nvfp4"),
}
CASES = [
    pytest.param(name, marks=[libraries.NEEDS_TORCHAO] * (row[0] == "torchao") + [pytest.mark.slow] * (name in SLOW))
    for name, row in (ROWS | SLOW).items()
]

pytestmark = pytest.mark.xdist_group("library formats")  # one worker: what they share takes seconds


class Readings:
    """The pipelines of some rows, saved, and what became of them in a process without sdquant."""

    def __init__(self, rows: dict[str, Row], folder: Path) -> None:
        self.pipes: dict[str, Any] = {}
        self.places: dict[tuple[str, str], Path] = {}
        for name, (form, options, parts, _) in rows.items():
            pipe = self.pipes[name] = sdquant.load_model(demo.path("digits-flux"), **options, progress=False)
            place = folder / name.replace("in float32", "float32").replace(" ", "-")
            if form == "bfl":
                place.mkdir()
                shutil.copy(demo.path("digits-flux") / "transformer" / "config.json", place)
                sdquant.save(pipe.transformer, place / "model.safetensors", portable=form)
                self.places[name, "transformer"] = place / "model.safetensors"
            else:
                sdquant.save(pipe, place, portable=form)
                self.places |= {(name, part): place / part for part in parts}
        readable = [
            str(place) for (name, _), place in self.places.items() if libraries.HAS_TORCHAO or rows[name][0] == "bfl"
        ]
        self.outcome: dict[str, dict[str, Any]] = libraries.run_script("library_readers.py", *readable)


@pytest.fixture(scope="module")
def readings(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Readings]:
    made: dict[bool, Readings] = {}

    def of(name: str) -> Readings:
        slow = name in SLOW
        if slow not in made:
            made[slow] = Readings(SLOW if slow else ROWS, tmp_path_factory.mktemp("formats"))
        return made[slow]

    return of


# The layers whose quantized weights are written as floats: embeddings, and what T5 keeps in float32.
FLOATS = {"wo", "shared", "embed_tokens", "relative_attention_bias", "token_embedding", "position_embedding"}


@pytest.mark.parametrize("name", CASES)
def test_read_by_the_library(name: str, readings: Callable[[str], Readings]) -> None:
    """The same weights, bit for bit, in the library's own tensors; the others, and the output, as sdquant has them."""
    made, (_, _, parts, kind) = readings(name), (ROWS | SLOW)[name]
    for part in parts:
        model, got = getattr(made.pipes[name], part), made.outcome[str(made.places[name, part])]
        assert "error" not in got, got
        assert got["classes"] == [kind]
        theirs, packs = load_file(got["tensors"]), dict(quantized(model))
        same = 0
        for weight, packed in packs.items():
            want = packed.spec.scheme.codec.decode(packed, torch.float32)
            floats = weight.split(".")[-2] in FLOATS
            assert torch.equal(theirs[weight], want.bfloat16().float() if floats else want), weight
            same += not floats
        assert same >= 10
        state = model.state_dict()
        plain = [key for key in theirs if key in state and key not in packs]
        assert plain and all(torch.equal(theirs[key], state[key].float()) for key in plain)
        if name == "mxfp8":  # torchao's product of MXFP8 needs Blackwell
            assert got["stops"].startswith("ValueError: Invalid scaling configuration")
            continue
        assert not got["stops"]
        want = output(copy.deepcopy(model).float(), torch.float32) if "float32" in name else output(model)
        assert (theirs["output"] - want).norm() <= (1e-3 if "float32" in name else 2e-2) * want.norm()


@pytest.mark.parametrize("name", CASES)
def test_read_again_here(name: str, readings: Callable[[str], Readings]) -> None:
    """In the same schemes, without torchao; what `detect` and `verify` say of it."""
    made, (_, options, parts, _) = readings(name), (ROWS | SLOW)[name]
    scheme = str(options["quant"]).split(",")[0]
    for part in parts:
        place = made.places[name, part]
        assert sdquant.verify(place).quant == scheme and sdquant.detect(place).warnings == []
        mine, again = dict(quantized(getattr(made.pipes[name], part))), dict(sdquant.dequantize(place))
        for weight, packed in mine.items():
            if weight.split(".")[-2] not in FLOATS:
                assert torch.equal(again[weight], packed.spec.scheme.codec.decode(packed, torch.float32))
    base = {} if place.is_dir() else {"base": demo.path("digits-flux")}
    assert dict(quantized(sdquant.load_model(place.parent if not base else place, **base, progress=False).transformer))


@pytest.mark.parametrize(
    ("scheme", "form", "target", "words"),
    [
        ("int8_convrot", "torchao", "out", "int8_convrot.*torchao is int8_row"),
        ("fp8", "torchao", "out", "blocks of 256.*packing=float8"),
        ("int8_row", "bfl", "out.safetensors", "Black Forest Labs' files is fp8"),
        ("nf4", "bfl", "out.safetensors", "nf4"),
        ("int8_row", "torchao", "out.safetensors", "config.json"),
        ("comfy:nvfp4", "bfl", "out", "from_single_file"),
    ],
)
def test_the_command_refuses_before_the_work(
    scheme: str, form: str, target: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(demo.path("digits-flux") / "transformer"), str(tmp_path / target), "-q", scheme]
    assert cli.main(["quantize", *arguments, "--portable-as", form, "--no-progress"]) == 2
    assert re.search(f"(?s){words}", capsys.readouterr().err) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("scheme", "form", "target", "error", "words"),
    [
        ("int8_convrot", "torchao", "out", ConflictError, "int8_convrot.*torchao is int8_row"),
        ("int8_convrot", "torchao", "out.safetensors", SettingsError, "config.json"),
        ("int8_convrot", "torcho", "out", SettingsError, "Did you mean 'torchao'"),
        ("int8_convrot", "modelopt", "out", ConflictError, "pickle"),
        ("nf4", "bfl", "out.safetensors", ConflictError, "nf4"),
        ("fp8", "torchao", "out", ConflictError, "blocks of 256.*packing=float8"),
        ("comfy:nvfp4", "bfl", "out.safetensors", ConflictError, "transformers does not read"),
    ],
)
def test_refused(scheme: str, form: str, target: str, error: type[Exception], words: str, tmp_path: Path) -> None:
    encoder = sdquant.load_model(demo.path("digits-sd") / "text_encoder", scheme, progress=False)
    with pytest.raises(error, match=f"(?s){words}"):
        sdquant.save(encoder, tmp_path / target, portable=form)
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A component for which diffusers alone is enough is written as `portable=True` has it."""
    arguments = ["-q", "transformer=int8_row", "-q", "text_encoder=nf4", "--portable-as", "torchao", "--no-progress"]
    assert cli.main(["quantize", str(demo.path("digits-flux")), str(tmp_path / "out"), *arguments]) == 0
    assert "nf4 and int8_row" in capsys.readouterr().out
    configs = {part: json.loads((tmp_path / "out" / part / "config.json").read_text()) for part in WHOLE}
    said = {part: config.get("quantization_config", {}).get("quant_method") for part, config in configs.items()}
    assert said == {"transformer": "torchao", "text_encoder": "bitsandbytes", "text_encoder_2": None}


def test_svdquant_beside_it_is_written_once(tmp_path: Path) -> None:
    """As floats: nunchaku_lite's tensors, which a portable folder has elsewhere, are not torchao's."""
    given: dict[str, Any] = {"components": ("transformer",), "progress": False}
    model, other = (
        sdquant.load_model(demo.path("digits-flux"), quant, **given).transformer for quant in ("int8_row", "svdq-int4")
    )
    path = "single_transformer_blocks.0.proj_out"
    model.set_submodule(path, other.get_submodule(path))
    sdquant.save(model, tmp_path / "out", portable="torchao")
    keys = load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors").keys()
    assert {key for key in keys if key.startswith(path)} == {f"{path}.weight", f"{path}.bias"}
    assert path + ".weight" not in dict(quantized(sdquant.load_model(tmp_path / "out", progress=False)))


def test_portable_refuses_to_write_most_weights_as_floats(tmp_path: Path) -> None:
    """One layer that diffusers reads does not make the others floats without a word."""
    given: dict[str, Any] = {"components": ("transformer",), "progress": False}
    path = "single_transformer_blocks.0.proj_out"
    model = sdquant.load_model(demo.path("digits-flux"), "int8_row", **given).transformer
    for scheme in ("svdq-int4", "nf4"):
        other = sdquant.load_model(demo.path("digits-flux"), scheme, **given).transformer
        model.set_submodule(path, other.get_submodule(path))
        with pytest.raises(ConflictError, match=r"(?s)int8_row.*portable='torchao'"):
            sdquant.save(model, tmp_path / scheme, portable=True)
    assert not list(tmp_path.iterdir())


@libraries.NEEDS_TORCHAO
def test_what_is_made_is_what_torchao_makes(tmp_path: Path) -> None:
    """Bit for bit where the formulas are the same. torchao rounds scales and quotients to a weight's dtype, where
    sdquant has float32 as comfy-kitchen does, so most are float32 here; its int8 scales are absmax / 127.5, not 127."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(64, 128, generator=generator)
    heavy = normal * (1 + 20 * (torch.rand(normal.shape, generator=generator) < 0.01))
    weights = {"normal": normal, "heavy": heavy, "small": normal * 1e-3, "bfloat16": heavy.bfloat16()}
    save_file(weights, tmp_path / "weights.safetensors")
    libraries.run_script("torchao_codes.py", str(tmp_path / "weights.safetensors"), str(tmp_path / "codes.safetensors"))
    theirs = load_file(tmp_path / "codes.safetensors")
    for name, weight in weights.items():
        for quant in ("mxfp8",) if name == "bfloat16" else ("mxfp8", "fp8,packing=float8", "comfy:nvfp4"):
            for part, got in encoded(weight, quant).items():
                want = theirs[f"{name}.{quant.partition(',')[0]}.{part}"]
                assert torch.equal(got.contiguous().view(want.dtype).flatten(), want.flatten()), (name, quant, part)
        mine, other = encoded(weight, "int8_row")["scale"], theirs[f"{name}.int8_row.scale"].float()
        torch.testing.assert_close(other.flatten() * 127.5 / 127, mine.flatten(), rtol=4e-3, atol=0)


def encoded(weight: torch.Tensor, quant: str) -> dict[str, torch.Tensor]:
    spec = backends.parse(quant)
    return dict(spec.scheme.codec.encode(weight, spec).parts)
