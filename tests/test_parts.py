"""`parts=`: files of single components, as ComfyUI's and Forge's users have them, each in its place in a pipeline."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import sdquant
from sdquant.cli import main
from sdquant.errors import ConflictError, MissingComponentError, UnsupportedFileError
from sdquant.kernels import fp32_gemm
from sdquant.models.pipelines import weight_bytes, weight_parts
from sdquant.nn.weights import plain, quantized

from . import layouts
from .conftest import shell
from .test_load_modes import images
from .test_text_encoder_files import clip_l, fp8, t5xxl

if TYPE_CHECKING:
    from .layouts import State


@pytest.fixture(scope="module")
def comfy(flux: Path, saved: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files that a ComfyUI user has in place of digits-flux: each in another format, the VAE in its authors'."""
    folder = tmp_path_factory.mktemp("comfy")
    names = {
        "transformer": "flux1-Q8_0.gguf", "text_encoder": "clip_l-nf4.safetensors",
        "text_encoder_2": "t5xxl_fp8_e4m3fn.safetensors", "vae": "ae.safetensors",
    }  # fmt: skip
    files = {part: folder / name for part, name in names.items()}
    (lone,) = (saved("q8_0", "digits-flux") / "transformer").glob("*.gguf")
    shutil.copy(lone, files["transformer"])
    nf4 = sdquant.load_model(flux / "text_encoder", "nf4", progress=False)
    sdquant.save(nf4, files["text_encoder"])
    save_file(load_file(files["text_encoder"]), files["text_encoder"])  # without sdquant's metadata, as others have it
    save_file(fp8(t5xxl(layouts.weights(flux / "text_encoder_2"))), files["text_encoder_2"])
    vae = layouts.vae(layouts.weights(flux / "vae"), layouts.config(flux / "vae"))
    save_file({key: tensor.float().neg() for key, tensor in vae.items()}, files["vae"])
    return files


@pytest.fixture(scope="module")
def whole(flux: Path, saved: Callable[..., Path], comfy: dict[str, Path], tmp_path_factory: Any) -> Any:
    """What they stand for, loaded from folders."""
    folder = Path(shutil.copytree(flux, tmp_path_factory.mktemp("whole") / "flux"))
    state = layouts.weights(flux / "text_encoder_2")
    rounded = {key: t.to(torch.float8_e4m3fn).to(t.dtype) for key, t in state.items()}
    save_file(rounded, folder / "text_encoder_2" / "model.safetensors", {"format": "pt"})
    negated = {key: t.neg() for key, t in layouts.weights(flux / "vae").items()}
    save_file(negated, folder / "vae" / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    shutil.rmtree(folder / "transformer")
    shutil.copytree(saved("q8_0", "digits-flux") / "transformer", folder / "transformer")
    return sdquant.load_model(folder, {"text_encoder": "nf4"}, progress=False)


ORDERS = {
    "the transformer first": ("transformer", ("text_encoder", "text_encoder_2", "vae")),
    "the VAE first": ("vae", ("text_encoder_2", "transformer", "text_encoder")),
    "the folder first": (None, ("vae", "text_encoder_2", "transformer", "text_encoder")),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("lends", ["configs", "weights"])
def test_all_of_a_pipeline(
    lends: str, order: str, flux: Path, comfy: dict[str, Path], whole: Any, tmp_path: Path
) -> None:
    """The base, or the folder, has configs alone, or weights of its own that give way."""
    first, others = ORDERS[order]
    base = flux if lends == "weights" else shell(flux, tmp_path / "flux")
    path = base if first is None else comfy[first]
    asked: dict[str, Any] = {"base": None if first is None else base, "parts": [comfy[name] for name in others]}
    made = sdquant.plan(path, **asked)
    schemes = {"transformer": "q8_0", "text_encoder": "nf4", "text_encoder_2": "fp8", "vae": None}
    assert {part.name: part.scheme for part in made.components} == schemes
    pipe = sdquant.load_model(path, progress=False, **asked)
    assert weight_bytes(pipe) == made.bytes == pipe.sdquant.plan.bytes
    seen = made.detected
    each = {name: sdquant.detect(file) for name, file in comfy.items()}
    assert {name: part.quant for name, part in seen.parts.items()} == schemes
    assert {name: part.path for name, part in seen.parts.items()} == {name: str(file) for name, file in comfy.items()}
    assert {name: part["bytes"] for name, part in seen.to_dict()["parts"].items()} == {
        name: one.bytes for name, one in each.items()
    }
    assert seen.quant == "q8_0" and seen.prequantized and seen.container == "pipeline"
    for name, module in weight_parts(whole).items():
        mine = weight_parts(pipe)[name]
        assert bool(dict(quantized(mine))) == (name != "vae")
        if name != "text_encoder_2":  # float8 codes there, their values here
            assert all(torch.equal(plain(mine)[key], tensor) for key, tensor in plain(module).items()), name
    drawn, wanted = images(pipe, 1).astype(int), images(whole, 1).astype(int)
    if fp32_gemm.is_profitable(
        torch.bfloat16
    ):  # what float8 codes are multiplied with is summed as torch sums it elsewhere alone
        assert np.abs(drawn - wanted).max() <= 4
    else:
        assert np.array_equal(drawn, wanted)


def test_on_the_fly_with_one_scheme(flux: Path, comfy: dict[str, Path], tmp_path: Path) -> None:
    """Float parts are quantized as those of a folder, and kept in the cache by their own bytes."""
    negated: dict[str, State] = {
        part: {key: tensor.neg() for key, tensor in layouts.weights(flux / part).items()}
        for part in ("text_encoder", "text_encoder_2")
    }
    save_file(clip_l(negated["text_encoder"]), tmp_path / "clip_l.safetensors")
    save_file(t5xxl(negated["text_encoder_2"]), tmp_path / "t5xxl.safetensors")
    folder = Path(shutil.copytree(flux, tmp_path / "flux"))
    for part, state in negated.items():
        save_file(state, folder / part / "model.safetensors", {"format": "pt"})
    parts = [tmp_path / "clip_l.safetensors", str(tmp_path / "t5xxl.safetensors")]
    reference = sdquant.load_model(folder, "int8", progress=False)
    for mode in ("pre", "post"):
        for cached in ((), ("text_encoder", "text_encoder_2", "transformer")):
            cache = tmp_path / mode
            pipe = sdquant.load_model(flux, "int8", mode=mode, parts=parts, cache=cache, progress=False)
            assert tuple(sorted(pipe.sdquant.cached)) == cached
            assert weight_bytes(pipe) == pipe.sdquant.plan.bytes == reference.sdquant.plan.bytes
            assert np.array_equal(images(pipe, 1), images(reference, 1))
    with pytest.raises(ConflictError, match="fp8"):  # the same scheme for all, and one of them has another
        sdquant.plan(flux, "int8", parts=comfy["text_encoder_2"])
    with pytest.raises(sdquant.IncompatibleError):  # the matrix sees what a part holds
        sdquant.plan(flux, offload="sequential", parts=comfy["text_encoder"])


def test_a_checkpoint_gives_way(sd: Path, tmp_path: Path, caplog: Any) -> None:
    """A VAE and a text encoder beside a checkpoint that has its own, as users of A1111 have them."""
    file = layouts.checkpoint(sd, tmp_path / "model.safetensors")
    vae = {key: tensor.neg() for key, tensor in layouts.weights(sd / "vae").items()}
    text = {key: tensor.neg() for key, tensor in layouts.weights(sd / "text_encoder").items()}
    save_file(layouts.vae(vae, layouts.config(sd / "vae")), tmp_path / "vae.safetensors")
    save_file(clip_l(text), tmp_path / "clip_l.safetensors")
    folder = Path(shutil.copytree(sd, tmp_path / "sd"))
    save_file(vae, folder / "vae" / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    save_file(text, folder / "text_encoder" / "model.safetensors", {"format": "pt"})
    base = shell(sd, tmp_path / "base")
    parts = (tmp_path / "vae.safetensors", tmp_path / "clip_l.safetensors")
    pipe = sdquant.load_model(file, "int8", base=base, parts=parts, progress=False)
    assert np.array_equal(images(pipe, 1), images(sdquant.load_model(folder, "int8", progress=False), 1))
    assert weight_bytes(pipe) == pipe.sdquant.plan.bytes
    assert not [record for record in caplog.records if record.name.startswith("sdquant")]


def test_component_folders_are_parts_too(sd: Path, tmp_path: Path) -> None:
    pipe = sdquant.load_model(shell(sd, tmp_path / "sd"), parts=[sd / name for name in weight_parts_of(sd)])
    assert np.array_equal(images(pipe, 1), images(sdquant.load_model(sd, progress=False), 1))


def weight_parts_of(folder: Path) -> list[str]:
    return sorted(file.parent.name for file in folder.rglob("*.safetensors"))


class TestRefused:
    def test_two_for_one_place(self, flux: Path, comfy: dict[str, Path], tmp_path: Path) -> None:
        other = Path(shutil.copy(comfy["text_encoder_2"], tmp_path / "t5-other.safetensors"))
        for path, base, parts in (
            (flux, None, (comfy["text_encoder_2"], comfy["vae"], other)),
            (comfy["transformer"], flux, (other, comfy["text_encoder_2"])),
            (other, flux, (comfy["text_encoder_2"],)),
        ):
            with pytest.raises(ConflictError) as error:
                sdquant.plan(path, base=base, parts=parts)
            said = str(error.value)
            assert str(other) in said and str(comfy["text_encoder_2"]) in said and "text_encoder_2" in said

    def test_without_a_place(self, sd: Path, flux: Path, comfy: dict[str, Path], tmp_path: Path) -> None:
        unet = sd / "unet" / "diffusion_pytorch_model.safetensors"
        checkpoint = layouts.checkpoint(sd, tmp_path / "sd15.safetensors")
        for path, part, words in (
            (sd, comfy["text_encoder_2"], "a T5 text encoder of width"),
            (flux, unet, "unet"),
            (sd, checkpoint, "a checkpoint of several components"),
            (sd, sd, "a pipeline of several components"),
        ):
            with pytest.raises(MissingComponentError) as error:
                sdquant.plan(path, parts=[part])
            assert str(part) in error.value.what and words in str(error.value)

    def test_a_file_that_is_not_there(self, flux: Path, tmp_path: Path) -> None:
        with pytest.raises(MissingComponentError, match=r"Cannot load .*clip_l\.safetensors: there is no such file"):
            sdquant.plan(flux, parts=[tmp_path / "clip_l.safetensors"])

    def test_without_a_base(self, flux: Path, comfy: dict[str, Path]) -> None:
        """Nothing in lone files tells tokenizers and schedulers."""
        for path in (comfy["transformer"], flux / "transformer"):
            with pytest.raises(MissingComponentError, match="base=<pipeline folder"):
                sdquant.plan(path, parts=[comfy["vae"]])

    def test_what_is_still_missing(self, flux: Path, comfy: dict[str, Path], tmp_path: Path) -> None:
        base = shell(flux, tmp_path / "flux")
        for path, asked in ((base, {}), (comfy["transformer"], {"base": base})):
            with pytest.raises(MissingComponentError) as error:
                sdquant.plan(path, parts=[comfy["text_encoder_2"], comfy["transformer"]][: 2 - len(asked)], **asked)
            lacks = error.value.why.removeprefix("none of them has weights for ")
            assert sorted(lacks.split(" and ")) == ["text_encoder", "vae"]
            assert str(base / "vae") in error.value.fix and "parts=" in error.value.fix

    def test_a_text_encoder_in_gguf(self, flux: Path, tmp_path: Path) -> None:
        writer = gguf.GGUFWriter(tmp_path / "t5.gguf", "t5encoder")
        writer.add_tensor("enc.blk.0.attn_q.weight", np.zeros((32, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(UnsupportedFileError, match=r"t5\.gguf.*\n?.*text encoder"):
            sdquant.plan(flux, parts=[tmp_path / "t5.gguf"])


def test_by_the_command_line(flux: Path, comfy: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    base = shell(flux, tmp_path / "flux")
    words = [str(comfy["transformer"]), "--base", str(base)]
    for name in ("vae", "text_encoder", "text_encoder_2"):
        words += ["--part", str(comfy[name])]
    assert main(["plan", *words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["components"]
    assert {row["name"]: row["scheme"] for row in rows} == {
        "transformer": "q8_0", "text_encoder": "nf4", "text_encoder_2": "fp8", "vae": None,
    }  # fmt: skip
    out = tmp_path / "made"
    assert main(["quantize", str(base), str(out), "-q", "vae=int8", *words[3:], "--part", words[0]]) == 0
    assert sdquant.detect(out).parts["vae"].quant == "int8"
    assert main(["quantize", str(flux), str(tmp_path / "x.gguf"), "-q", "q8_0", "--part", words[0]]) == 2
    assert "Cannot use --part" in capsys.readouterr().err


def test_a_part_that_does_not_say_what_it_is(flux: Path, tmp_path: Path) -> None:
    """`config=` is for the model's own file: the error of a part names the file that says it instead, and is right."""
    state = t5xxl(layouts.weights(flux / "text_encoder_2"))
    name = next(key for key in state if key.endswith("SelfAttention.q.weight"))
    scale = state[name].abs().max().float() / 127
    file = tmp_path / "alone" / "t5xxl-int8.safetensors"
    file.parent.mkdir()
    codes = (state[name].float() / scale).round().to(torch.int8)
    save_file({**state, name: codes, f"{name}_scale": scale}, file)
    for part in ([file], {"text_encoder_2": file}):
        with pytest.raises(UnsupportedFileError, match="no comfy_quant marker") as caught:
            sdquant.plan(flux, parts=part)
        assert "config=" not in caught.value.fix and str(caught.value.fix).count("beside the file") == 2
    said = re.findall(r"(\{.*?\}\}) in a config.json", caught.value.fix)
    (file.parent / "config.json").write_text(said[0])
    (row,) = (one for one in sdquant.plan(flux, parts=[file]).components if one.name == "text_encoder_2")
    assert row.scheme == "int8_tensor"
    pipe = sdquant.load_model(flux, parts={"text_encoder_2": file}, dtype="float32", progress=False)
    ((_, packed),) = quantized(pipe.text_encoder_2)
    assert torch.equal(sdquant.backends.get("comfy").decode(packed, torch.float32), codes.float() * scale)
