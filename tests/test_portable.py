"""`save(..., portable=True)` and `sdquant quantize --portable`: what is written as floats, said and refused.

That plain diffusers loads it is seen in `test_plain_libraries`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import sdquant
from sdquant import backends, cli
from sdquant.cli import _common
from sdquant.errors import ConflictError, SettingsError
from sdquant.nn.weights import quantized
from sdquant.saving import portable


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in the weight files below a folder, by file and name."""
    return {
        f"{path.parent.name}/{name}": tensor
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


@pytest.mark.parametrize("runtime", ["library", "plain"])
def test_floats_are_what_the_codes_stand_for(runtime: str, sd: Path, tmp_path: Path) -> None:
    encoder = sdquant.load_model(sd / "text_encoder", "qint8", runtime=runtime, progress=False)
    sdquant.save(encoder, tmp_path / "out", portable=True)
    floats = load_file(tmp_path / "out" / "model.safetensors")
    for name, packed in quantized(encoder):
        assert torch.equal(floats[name], backends.get("quanto").decode(packed, torch.bfloat16))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert not dict(quantized(sdquant.load_model(tmp_path / "out", progress=False)))


def test_floats_have_the_dtype_that_the_layer_computes_in(sd: Path, tmp_path: Path) -> None:
    encoder = sdquant.load_model(sd / "text_encoder", "qint8", runtime="plain", progress=False).to(torch.float16)
    sdquant.save(encoder, tmp_path / "out", portable=True)
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float16}


def test_a_name_that_means_more_layers_than_one(flux: Path, tmp_path: Path) -> None:
    """The libraries know `proj_out`, left out, by the end of its path, which other layers have as well."""
    model = sdquant.load_model(flux / "transformer", "nf4", progress=False)
    layer = torch.nn.Linear(model.proj_out.in_features, model.proj_out.out_features, dtype=torch.bfloat16)
    model.proj_out = layer.requires_grad_(False)
    (row,) = portable.of_model(model)
    packed = dict(quantized(model))
    assert row.names == {name for name in packed if name.endswith(".proj_out.weight")} and row.names
    sdquant.save(model, tmp_path / "out", portable=True)
    again = sdquant.load_model(tmp_path / "out", progress=False)
    assert set(dict(quantized(again))) == set(packed) - row.names


@pytest.mark.parametrize("scheme", ["int8", "fp8", "qint3", "sdnq-uint4"])
def test_schemes_that_no_library_reads_are_refused(scheme: str, sd: Path, tmp_path: Path) -> None:
    encoder = sdquant.load_model(sd / "text_encoder", scheme, progress=False)
    with pytest.raises(ConflictError, match=scheme) as error:
        sdquant.save(encoder, tmp_path / "out", portable=True)
    assert ("sdnq" in error.value.why.lower()) == scheme.startswith("sdnq") and "nf4" in error.value.fix
    assert not (tmp_path / "out").exists()


def test_gguf_is_refused(saved: Callable[..., Path], tmp_path: Path) -> None:
    pipe = sdquant.load_model(saved("q8_0", "digits-flux") / "transformer", progress=False)
    with pytest.raises(ConflictError, match="q8_0"):
        sdquant.save(pipe, tmp_path / "out", portable=True)


def test_a_file_alone_is_refused(sd: Path, tmp_path: Path) -> None:
    encoder = sdquant.load_model(sd / "text_encoder", "nf4", progress=False)
    with pytest.raises(SettingsError, match="folder"):
        sdquant.save(encoder, tmp_path / "out.safetensors", portable=True)


def test_nothing_changes_where_all_is_read(sd: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    encoder = sdquant.load_model(sd / "text_encoder", "nf4", progress=False)
    one, other = (sdquant.save(encoder, tmp_path / name, portable=name == "a") for name in "ab")
    assert {path.name: path.read_bytes() for path in one.iterdir()} == {
        path.name: path.read_bytes() for path in other.iterdir()
    }
    assert not caplog.records
    floats = sdquant.load_model(sd / "text_encoder", progress=False)
    sdquant.save(floats, tmp_path / "c", portable=True)
    assert not caplog.records


def test_saving_says_what_needs_sdquant(
    loaded: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sdquant.save(loaded("qint8"), tmp_path / "out")
    (record,) = caplog.records
    assert "text_encoder (" in record.getMessage() and "unet (" in record.getMessage()
    assert "--portable" in record.getMessage() and record.levelname == "WARNING"
    caplog.clear()
    sdquant.save(loaded("qint8"), tmp_path / "portable", portable=True)
    sdquant.save(loaded("int8"), tmp_path / "int8")  # nothing would make this portable
    assert not caplog.records


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path, loaded: Callable[..., Any]) -> None:
    arguments = ["digits-sd", str(tmp_path / "out"), "-q", "qint8", "--no-progress"]
    assert cli.main(["quantize", *arguments, "--portable"]) == 0
    done = capsys.readouterr()
    last = done.out.splitlines()[-1]
    assert "text_encoder" in last and "unet" in last and "sdquant" not in done.err
    # What it says of the bytes is what the files have more than those of the same model, all in codes.
    sdquant.save(loaded("qint8"), tmp_path / "codes")
    sizes = [sum(t.numel() * t.itemsize for t in tensors(tmp_path / name).values()) for name in ("out", "codes")]
    scales = sum(name.endswith(("input_scale", "output_scale")) for name in tensors(tmp_path / "codes"))
    scales -= sum(name.endswith(("input_scale", "output_scale")) for name in tensors(tmp_path / "out"))
    more = sizes[0] - sizes[1] + 2 * scales  # quanto's buffers, which hold nothing: bfloat16
    assert sum(row.nbytes for row in portable.of_model(loaded("qint8"))) == more and _common.size(more) in last


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["out", "-q", "int8"], "int8"),
        (["out", "-q", "unet=nf4", "-q", "text_encoder=int4"], "int4"),
        (["out.gguf", "-q", "q8_0"], "q8_0"),
        (["out", "-q", "sdnq-int8"], "sdnq"),
        (["out.safetensors", "-q", "nf4"], "folder"),
    ],
)
def test_the_command_refuses_before_the_work(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target, *rest = arguments
    assert cli.main(["quantize", "digits-sd", str(tmp_path / target), *rest, "--portable"]) == 2
    assert why in capsys.readouterr().err and not list(tmp_path.iterdir())
