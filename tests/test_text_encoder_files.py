"""Text encoders as files of their own, as ComfyUI's and Forge's users have them, in the place of a pipeline's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

import sdquant
from sdquant import backends
from sdquant.errors import ConflictError, MissingComponentError
from sdquant.models.pipelines import weight_bytes, weight_parts
from sdquant.nn import QuantizedLayer
from sdquant.nn.weights import plain, quantized

from . import layouts
from .conftest import shell
from .test_load_modes import images

if TYPE_CHECKING:
    from .layouts import State

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class File:
    """A kind of file.

    Attributes:
        model, part: the pipeline and its component that the file stands for.
        write: makes the file's tensors of the component's.
        read: what the tensors are worth, once they are in the model; None as they were.
        quant: the scheme that it is found to hold.
    """

    model: str
    part: str
    write: Callable[[State], State]
    read: Callable[[str, torch.Tensor], torch.Tensor] | None = None
    quant: str | None = None


def clip_l(state: State) -> State:
    return layouts.clip(state) | {"text_model.embeddings.position_ids": torch.arange(77)[None]}


def t5xxl(state: State) -> State:
    """The table of embeddings is there twice."""
    return state | {"encoder.embed_tokens.weight": state["shared.weight"].clone()}


def only_embed_tokens(state: State) -> State:
    return {key.replace("shared.", "encoder.embed_tokens."): tensor for key, tensor in state.items()}


def fp8(state: State) -> State:
    """Everything in float8, norms and embeddings too."""
    return {key: tensor if tensor.dtype == torch.int64 else tensor.to(E4M3) for key, tensor in state.items()}


def scaled(state: State) -> State:
    made: State = {"scaled_fp8": torch.empty(0, dtype=E4M3)}
    for key, tensor in state.items():
        if not key.endswith(".weight") or tensor.ndim != 2 or "embed" in key or "shared" in key or "bias" in key:
            made[key] = tensor
            continue
        made[key] = (tensor.float() / _scale(tensor)).to(E4M3)
        made[key.removesuffix("weight") + "scale_weight"] = _scale(tensor)
    return made


def _scale(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().abs().max() / 448


def _rounded(key: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(E4M3).to(tensor.dtype)


def _rescaled(key: str, tensor: torch.Tensor) -> torch.Tensor:
    written = scaled({key: tensor})
    if len(written) == 2:
        return tensor
    return (written[key].float() * _scale(tensor)).to(tensor.dtype)


def _half(key: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half().to(tensor.dtype)


FILES = {
    "clip_l": File("digits-flux", "text_encoder", clip_l),
    "clip_l of sd": File("digits-sd", "text_encoder", clip_l),
    "clip_l_fp16": File(
        "digits-sd", "text_encoder", lambda s: {k: t.half() for k, t in layouts.clip(s).items()}, _half
    ),
    "clip_l_fp8_e4m3fn": File("digits-sd", "text_encoder", lambda s: fp8(clip_l(s)), _rounded, "fp8"),
    "t5xxl": File("digits-flux", "text_encoder_2", t5xxl),
    "t5xxl without shared": File("digits-flux", "text_encoder_2", only_embed_tokens),
    "t5xxl_fp16": File("digits-flux", "text_encoder_2", lambda s: {k: t.half() for k, t in t5xxl(s).items()}, _half),
    "t5xxl_fp8_e4m3fn": File("digits-flux", "text_encoder_2", lambda s: fp8(t5xxl(s)), _rounded, "fp8"),
    "t5xxl_fp8_e4m3fn without embed_tokens": File("digits-flux", "text_encoder_2", fp8, _rounded, "fp8"),
    "t5xxl_fp8_e4m3fn_scaled": File("digits-flux", "text_encoder_2", lambda s: scaled(t5xxl(s)), _rescaled, "fp8"),
}


def _other(folder: Path) -> State:
    """The component's weights, changed: those that are in the pipeline already would show."""
    return {key: tensor.neg() for key, tensor in layouts.weights(folder).items()}


@pytest.mark.parametrize(
    ("name", "lends"),
    [*((name, "configs") for name in FILES), ("clip_l of sd", "weights"), ("t5xxl_fp8_e4m3fn", "weights")],
)
def test_takes_the_place_of_its_kind(name: str, lends: str, tmp_path: Path, caplog: Any) -> None:
    row = FILES[name]
    path = sdquant.demo.path(row.model)
    state = _other(path / row.part)
    file = tmp_path / f"{name.split(' ')[0]}.safetensors"
    save_file(row.write(state), file)
    seen = sdquant.detect(file)
    assert (seen.component, seen.quant) == ("text_encoder", row.quant)
    base = path
    if lends == "configs":  # those of the text encoders; the others have weights
        base = Path(shutil.copytree(path, tmp_path / "base"))
        (base / row.part / "model.safetensors").unlink()
    # The same values as a folder.
    whole = Path(shutil.copytree(path, tmp_path / "whole"))
    worth = {key: row.read(key, tensor) if row.read else tensor for key, tensor in state.items()}
    save_file(worth, whole / row.part / "model.safetensors", {"format": "pt"})
    pipe = sdquant.load_model(file, base=base, progress=False)
    assert not [record for record in caplog.records if record.name.startswith("sdquant")]
    reference = sdquant.load_model(whole, progress=False)
    for path, layer in getattr(pipe, row.part).named_modules():
        if isinstance(layer, QuantizedLayer):
            assert torch.equal(layer.dequantize(), getattr(reference, row.part).get_submodule(path).weight), path
    apart = np.abs(images(pipe, 1).astype(int) - images(reference, 1).astype(int)).max()
    assert apart <= (6 if row.quant else 0)  # few rows are multiplied without decoding first: sums in another order
    assert weight_bytes(pipe) == pipe.sdquant.plan.bytes
    assert {part for part, module in weight_parts(pipe).items() if dict(quantized(module))} == (
        {row.part} if row.quant else set()
    )


@pytest.mark.parametrize(
    ("scheme", "metadata"), [("nf4", True), ("nf4", False), ("qint8", False), ("bnb-int8", False), ("int8", True)]
)
def test_quantized(scheme: str, metadata: bool, flux: Path, tmp_path: Path) -> None:
    """As sdquant writes it, and, without its metadata, as others do. NNCF has no files but ours."""
    part, file = "text_encoder_2", tmp_path / f"t5xxl-{scheme}.safetensors"
    whole = sdquant.load_model(flux, {part: scheme}, progress=False)
    sdquant.save(whole.text_encoder_2, file)
    if not metadata:
        save_file(load_file(file), file)
    assert sdquant.detect(file).quant == scheme
    base = shell(flux, tmp_path / "base")
    for name in ("transformer", "vae", "text_encoder"):
        (weights,) = (flux / name).glob("*.safetensors")
        shutil.copy(weights, base / name)
    pipe = sdquant.load_model(file, base=base, progress=False)
    mine, others = dict(quantized(pipe.text_encoder_2)), dict(quantized(whole.text_encoder_2))
    assert mine and mine.keys() == others.keys()
    for key, packed in mine.items():
        assert all(torch.equal(tensor, others[key].parts[name]) for name, tensor in packed.parts.items())
    assert np.array_equal(images(pipe, 1), images(whole, 1))
    assert weight_bytes(pipe) == pipe.sdquant.plan.bytes
    both = sdquant.load_model(file, {"transformer": "int8"}, base=flux, progress=False)
    assert dict(quantized(both.transformer)) and dict(quantized(both.text_encoder_2)).keys() == mine.keys()
    with pytest.raises(ConflictError):
        sdquant.load_model(file, "int4", base=flux, progress=False)
    if metadata:
        assert type(sdquant.load_model(file, progress=False)).__name__ == "T5EncoderModel"
    else:
        with pytest.raises(MissingComponentError, match="t5 text_encoder"):
            sdquant.load_model(file, progress=False)


@pytest.mark.parametrize("name", ["clip_l", "t5xxl_fp16"])
def test_alone_it_needs_a_config(name: str, tmp_path: Path) -> None:
    row = FILES[name]
    folder = sdquant.demo.path(row.model) / row.part
    state = layouts.weights(folder)
    save_file(row.write(state), tmp_path / f"{name}.safetensors")
    with pytest.raises(MissingComponentError) as error:
        sdquant.load_model(tmp_path / f"{name}.safetensors", progress=False)
    assert f"{'t5' if 't5' in name else 'clip'} text_encoder" in error.value.why and "base=" in error.value.fix
    shutil.copy(folder / "config.json", tmp_path)  # which the fix names too
    model = sdquant.load_model(tmp_path / f"{name}.safetensors", dtype="bfloat16", progress=False)
    got = {key.removeprefix("text_model."): tensor for key, tensor in plain(model).items()}
    assert all(torch.equal(got[key], row.read(key, tensor) if row.read else tensor) for key, tensor in state.items())


def open_clip(state: State) -> State:
    """As OpenCLIP's own files, which have the half that sees as well."""
    more = {"logit_scale": torch.tensor(4.6), "visual.ln_post.weight": torch.ones(8)}
    return {key: tensor.contiguous() for key, tensor in layouts.openclip(state).items()} | more


PLACES = [
    ("sdxl", "text_encoder", layouts.clip), ("sdxl", "text_encoder_2", layouts.clip),
    ("sdxl", "text_encoder_2", open_clip), ("sd3", "text_encoder", layouts.clip),
    ("sd3", "text_encoder_2", layouts.clip), ("sd3", "text_encoder_3", t5xxl),
]  # fmt: skip


@pytest.mark.parametrize(("name", "part", "write"), PLACES)
def test_of_several_the_one_of_its_sizes(name: str, part: str, write: Any, small: Any, tmp_path: Path) -> None:
    """CLIP-L and CLIP-G have the same names in their first layers."""
    state = _other(small(name) / part)
    save_file(write(state), tmp_path / "text.safetensors")
    base = Path(shutil.copytree(small(name), tmp_path / "base"))
    for lends in ("weights", "config"):
        if lends == "config":
            (base / part / "model.safetensors").unlink()
        pipe = sdquant.load_model(tmp_path / "text.safetensors", base=base, progress=False)
        for other, module in weight_parts(pipe).items():
            written = state if other == part else layouts.weights(small(name) / other)
            got = {key.removeprefix("text_model."): tensor for key, tensor in plain(module).items()}
            written = {key.removeprefix("text_model."): tensor for key, tensor in written.items()}
            assert all(torch.equal(got[key], tensor) for key, tensor in written.items()), other


CLIP_G = {"clip": layouts.clip, "openclip": layouts.openclip}


@pytest.mark.parametrize("kind", ["fp8", "fp4_mixed", "gguf"])
@pytest.mark.parametrize("names", CLIP_G)
def test_clip_g_quantized(names: str, kind: str, small: Any, tmp_path: Path, caplog: Any) -> None:
    """As Comfy-Org's file is named, and under OpenCLIP's names, whose q, k and v are one weight."""
    from .gguf_text_encoders import File as GGUFFile
    from .test_language_encoder_files import fp4_mixed, marked

    state = _other(small("sdxl") / "text_encoder_2")
    there = {key: tensor.contiguous() for key, tensor in CLIP_G[names](state).items()}
    file = tmp_path / "clip_g.safetensors"
    if kind == "gguf":
        file, made = tmp_path / "clip_g.gguf", GGUFFile(tmp_path / "clip_g.gguf", "")
        for key, tensor in there.items():
            rows = tensor.ndim == 2 and ("mlp" in key or "attn" in key)
            made.add(key, tensor.float().numpy(), GGMLQuantizationType.Q8_0 if rows else None)
        made.close()
    else:
        save_file(marked(there) if kind == "fp8" else fp4_mixed(there)[0], file)
    seen = sdquant.verify(file)
    assert (seen.component, seen.family, bool(seen.quant)) == ("text_encoder", "clip", True)
    pipe = sdquant.load_model(small("sdxl"), parts=[file], dtype="float32", progress=False)
    assert not [record for record in caplog.records if record.name.startswith("sdquant")]
    packs = {key.removeprefix("text_model."): packed for key, packed in quantized(pipe.text_encoder_2)}
    assert packs and not dict(quantized(pipe.text_encoder))
    for key, tensor in state.items():
        packed = packs.get(key.removeprefix("text_model."))
        if packed is not None:
            value = packed.spec.scheme.codec.decode(packed, torch.float32)
            assert (value - tensor.float()).norm() < 0.2 * tensor.float().norm(), key


def test_clip_l_without_its_projection(small: Any, tmp_path: Path) -> None:
    """ComfyUI's clip_l.safetensors has none; diffusers' Stable Diffusion 3 has a module for it."""
    state = layouts.clip(_other(small("sd3") / "text_encoder"))
    width, _ = state.pop("text_projection.weight").shape
    save_file(state, tmp_path / "clip_l.safetensors")
    pipe = sdquant.load_model(tmp_path / "clip_l.safetensors", "int8", base=small("sd3"), progress=False)
    packed = dict(quantized(pipe.text_encoder))["text_projection.weight"]
    wanted = backends.get("nncf").encode(torch.eye(width, dtype=torch.bfloat16), backends.parse("int8"))
    assert all(torch.equal(tensor, wanted.parts[name]) for name, tensor in packed.parts.items())


def test_a_projection_too_many_is_left_out(sd: Path, tmp_path: Path, caplog: Any) -> None:
    state = layouts.clip(layouts.weights(sd / "text_encoder"))
    state |= {"text_projection.weight": torch.eye(128, dtype=torch.bfloat16), "logit_scale": torch.tensor(4.6)}
    save_file(state, tmp_path / "clip_l.safetensors")
    pipe = sdquant.load_model(tmp_path / "clip_l.safetensors", base=sd, progress=False)
    assert not [record for record in caplog.records if record.name.startswith("sdquant")]
    assert np.array_equal(images(pipe), images(sdquant.load_model(sd, progress=False)))
    assert weight_bytes(pipe) == pipe.sdquant.plan.bytes


def test_of_no_fitting_size_it_says_so(small: Any, sd: Path, tmp_path: Path) -> None:
    save_file(layouts.clip(layouts.weights(sd / "text_encoder")), tmp_path / "clip.safetensors")
    with pytest.raises(MissingComponentError) as error:
        sdquant.plan(tmp_path / "clip.safetensors", base=small("sdxl"))
    for words in ("width 128 and 2 layers", "text_encoder (width 32 and 2 layers)", "text_encoder_2 (width 64 and 3"):
        assert words in error.value.why


def test_of_no_fitting_kind_it_says_so(sd: Path, flux: Path, tmp_path: Path) -> None:
    save_file(layouts.weights(flux / "text_encoder_2"), tmp_path / "t5.safetensors")
    with pytest.raises(MissingComponentError, match="the pipeline has none of that kind"):
        sdquant.plan(tmp_path / "t5.safetensors", base=sd)
