"""GGUF files that are no UNet or transformer are refused by name with what to do, by `load_model` and `inspect`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest

import sdquant
from sdquant import cli
from sdquant.errors import BadFileError, UnsupportedFileError
from sdquant.formats.checkpoint import single_file
from sdquant.formats.gguf.writer import write_gguf
from sdquant.models.gguf_encoders import vision_in

if TYPE_CHECKING:
    from gguf import GGUFWriter

UNET = "model.diffusion_model.input_blocks.0.0.weight"


@dataclass(frozen=True)
class Row:
    """A file: tensors, `general.architecture` and other values, and what its refusal must say."""

    names: tuple[str, ...]
    says: str
    fix: str
    architecture: str = ""
    values: dict[str, str | int] = field(default_factory=dict)


_ONE, _TEXT, _PROJECTOR, _LORA = "all-in-one checkpoint", "text encoder or language model", "vision projector", "LoRA"
_PART, _BOTH = "part of a split file", "beside it, or pass both"
_ALONE, _MERGE = "UNet/transformer", "llama-gguf-split --merge"
ROWS: dict[str, Row] = {
    "Stable Diffusion 1 of stable-diffusion.cpp": Row(
        (UNET, "first_stage_model.decoder.conv_in.weight", "cond_stage_model.transformer.x.bias", "alphas_cumprod"),
        _ONE, _ALONE,
    ),
    "the same, tagged": Row((UNET, "first_stage_model.decoder.conv_in.weight"), _ONE, _ALONE, "sd1"),
    "XL": Row((UNET, "conditioner.embedders.1.model.ln_final.weight"), _ONE, _ALONE, "sdxl"),
    "SD3": Row(("model.diffusion_model.pos_embed", "text_encoders.clip_l.transformer.x.weight"), _ONE, _ALONE),
    "Flux with a VAE": Row(("model.diffusion_model.img_in.weight", "vae.decoder.conv_in.weight"), _ONE, _ALONE, "flux"),
    "an autoencoder in it": Row(
        ("img_in.weight", "encoder.conv_in.weight", "decoder.conv_in.weight", "quant_conv.weight"), _ONE, _ALONE, "pig"
    ),
    "T5 with a name that llama.cpp has not": Row(
        ("token_embd.weight", "enc.blk.0.attn_q.weight", "enc.strange.weight"), _TEXT, _ALONE, "t5encoder"
    ),
    "T5 under transformers' names": Row(
        ("shared.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"), _TEXT, _ALONE, "pig"
    ),
    "Llama": Row(("token_embd.weight", "blk.0.attn_q.weight", "output_norm.weight"), _TEXT, _ALONE, "llama"),
    "Qwen2-VL": Row(("token_embd.weight", "blk.0.attn_q.bias"), _TEXT, _ALONE, "qwen2vl"),
    "a language model by its tag": Row(("model.layers.0.self_attn.q_proj.weight",), _TEXT, _ALONE, "gemma3"),
    "CLIP": Row(("text_model.embeddings.token_embedding.weight", "text_projection.weight"), _TEXT, _ALONE),
    "CLIP, tagged": Row(("text_model.encoder.layers.0.mlp.fc1.weight",), _TEXT, _ALONE, "clip"),
    "mmproj": Row(("v.blk.0.attn_q.weight", "mm.0.weight"), _PROJECTOR, _BOTH, "clip", {"general.type": "mmproj"}),
    "mmproj by its names": Row(("v.blk.0.ln1.weight", "v.patch_embd.weight", "mm.2.bias"), _PROJECTOR, _BOTH),
    "LoRA of llama.cpp": Row(("blk.0.x.weight.lora_a",), _LORA, "safetensors", "llama", {"general.type": "adapter"}),
    "LoRA of a trainer": Row(
        ("lora_unet_single_blocks_0_linear1.lora_up.weight", "lora_unet_single_blocks_0_linear1.alpha"),
        _LORA, "safetensors", "flux",
    ),
    "LoRA of diffusers": Row(("transformer.single_transformer_blocks.0.proj_mlp.lora_A.weight",), _LORA, "safetensors"),
    "the first of three parts": Row(
        ("double_blocks.0.img_attn.qkv.weight",), _PART, _MERGE, "flux", {"split.count": 3, "split.no": 0}
    ),
    "a first part without tensors": Row((), _PART, _MERGE, "flux", {"split.count": 2}),
}  # fmt: skip


def _write(row: Row, path: Path) -> Path:
    writer: GGUFWriter = gguf.GGUFWriter(path, row.architecture)  # no tag if it is empty
    for key, value in row.values.items():
        if isinstance(value, int):
            writer.add_uint16(key, value)
        else:
            writer.add_string(key, value)
    for name in row.names:
        writer.add_tensor(name, np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ROWS)
def test_by_name_with_what_to_do(name: str, sd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = ROWS[name]
    path = _write(row, tmp_path / "some-Q8_0.gguf")
    sentences = set()
    for base in (None, sd):
        with pytest.raises(UnsupportedFileError) as caught:
            sdquant.load_model(path, base=base, progress=False)
        assert str(path) in caught.value.what and row.says in caught.value.why and row.fix in caught.value.fix
        sentences.add(str(caught.value))
    for words in (("inspect",), ("inspect", "--json"), ("inspect", "--verify"), ("plan",)):
        assert cli.main([*words, str(path)]) == 2
        out, err = capsys.readouterr()
        told = err
        if "--json" in words:
            told = " ".join(json.loads(out)["error"].values())
        assert "Traceback" not in out + err and all(part in told for part in (str(path), row.says, row.fix))
    assert len(sentences) == 1


def test_the_evidence_is_named(sd: Path, tmp_path: Path) -> None:
    """Whoever does not believe it can look."""
    for name, evidence in (
        ("Llama", "token_embd.weight"),
        ("a language model by its tag", "general.architecture = gemma3"),
        ("LoRA of llama.cpp", "general.type = adapter"),
        ("the first of three parts", "split.count = 3"),
        ("XL", "conditioner.embedders.1.model.ln_final.weight"),
    ):
        with pytest.raises(UnsupportedFileError) as caught:
            sdquant.detect(_write(ROWS[name], tmp_path / "model.gguf"))
        assert evidence in caught.value.why


def test_what_looks_like_one_of_them_and_is_none_is_read(flux: Path, tmp_path: Path) -> None:
    """A lone part of one, and models whose tags or names resemble theirs."""
    for number, (names, architecture, values) in enumerate(
        (
            (("txt_norm.weight", "transformer_blocks.0.img_mod.1.weight"), "qwen_image", {"split.count": 1}),
            (("double_blocks.0.img_attn.qkv.weight", "single_blocks.0.linear1.weight"), "llama.flux", {}),
            ((UNET, "model.diffusion_model.label_emb.0.0.weight"), "", {"general.type": "model"}),
        )
    ):
        row = Row(names, "", "", architecture, dict(values))
        assert sdquant.detect(_write(row, tmp_path / f"{number}.gguf")).container == "gguf"


@pytest.mark.parametrize("name", ["Llama", "Qwen2-VL", "Flux with a VAE", "LoRA of diffusers"])
def test_parts_are_told_what_to_do_as_parts(name: str, flux: Path, tmp_path: Path) -> None:
    """What helps with the model's own file helps nobody with a text encoder."""
    row = ROWS[name]
    path = _write(row, tmp_path / "some-Q8_0.gguf")
    with pytest.raises(UnsupportedFileError) as caught:
        sdquant.plan(flux, parts=[path])
    assert "as a component" in caught.value.what and row.says in caught.value.why
    assert "base=" not in caught.value.fix
    assert ("one file per component" if row.says == _ONE else "safetensors") in caught.value.fix


class TestOneOfSeveral:
    """Some tools split files and write no `split.count`: the name tells it, where nothing in the file is known."""

    def test_by_its_name(self, flux: Path, tmp_path: Path) -> None:
        row = Row(("blk.7.weight", "blk.8.weight"), "", "")
        path = _write(row, tmp_path / "flux1-dev-Q8_0-00002-of-00003.gguf")
        for asked, values in ((path, {}), (path, {"base": flux}), (flux, {"parts": [path]})):
            with pytest.raises(UnsupportedFileError) as caught:
                sdquant.plan(asked, **values)
            assert str(path) in caught.value.what and "part 2 of 3" in caught.value.why and _MERGE in caught.value.fix

    def test_known_tensors_count_more_than_a_name(self, tmp_path: Path) -> None:
        """Until the others are seen beside it."""
        row = Row(("double_blocks.0.img_attn.qkv.weight", "single_blocks.0.linear1.weight"), "", "")
        path = _write(row, tmp_path / "flux1-00001-of-00002.gguf")
        assert sdquant.detect(path).family == "flux"
        _write(row, tmp_path / "flux1-00002-of-00002.gguf")
        with pytest.raises(UnsupportedFileError, match="part 1 of 2"):
            sdquant.detect(path)
        whole = _write(row, tmp_path / "flux1-00001-of-00001.gguf")
        assert sdquant.detect(whole).family == "flux"

    def test_of_safetensors(self, sd: Path, tmp_path: Path) -> None:
        """A shard of a folder, given by its own path."""
        from safetensors.torch import save_file

        from . import layouts

        state = layouts.weights(sd / "unet")
        for number, half in enumerate((sorted(state)[::2], sorted(state)[1::2])):
            path = tmp_path / f"diffusion_pytorch_model-{number + 1:05}-of-00002.safetensors"
            save_file({key: state[key] for key in half}, path)
        with pytest.raises(UnsupportedFileError) as caught:
            sdquant.load_model(path, base=sd, progress=False)
        assert "part 2 of 2" in caught.value.why and str(tmp_path) in caught.value.fix


_FRAME, _OTHER_FRAME = "v.patch_embd.weight", "v.patch_embd.weight.1"
_FRAMES = {_FRAME: (4, 3, 2, 2), _OTHER_FRAME: (4, 3, 2, 2)}


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({**_FRAMES, "v.blk.0.attn_q.weight": (4, 32)}, r"lacks 'model\.visual\.blocks\.0\.attn\.k\.weight'"),
        ({**_FRAMES, "v.blk.0.attn_v.bias": (4,)}, "lacks 'model.visual.blocks.0.attn.q.bias'"),
        ({_FRAME: (4,), _OTHER_FRAME: (4,)}, r"its shape is \[4\]"),
        ({**_FRAMES, _OTHER_FRAME: (4, 3, 2, 4)}, r"its shape is \[4, 3, 2, 4\], beside \[4, 3, 2, 2\]"),
    ],
)
def test_a_damaged_vision(shapes: dict[str, tuple[int, ...]], words: str, tmp_path: Path) -> None:
    """It is found beside a sound language model: these came up as KeyError, IndexError and RuntimeError there."""
    path = tmp_path / "mmproj.gguf"
    rows = [(name, shape, "f32", bytes(4 * math.prod(shape))) for name, shape in shapes.items()]
    values = {"general.architecture": "clip", "general.type": "mmproj", "clip.projector_type": "qwen2.5vl_merger"}
    write_gguf(path, rows, values)
    with pytest.raises(BadFileError, match=words) as caught:
        vision_in(single_file(path))
    assert str(path) in caught.value.what
