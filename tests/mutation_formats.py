"""Small files for `test_mutations`: of formats without golden vectors, and text encoders, read in a pipeline."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor

import sdquant
from sdquant import backends

from . import hub_formats
from . import test_file_tokenizers as tokenizers
from . import test_language_encoder_files as encoders
from .backends import torchao_layers
from .gguf_text_encoders import ARCH, write_text, write_vision
from .test_text_encoder_files import scaled

_TABLE = tokenizers._charsmap("\ufb01", "fi")
Q8_0 = gguf.GGMLQuantizationType.Q8_0
File = tuple[Mapping[str, Tensor], Mapping[str, str]]  # tensors and metadata


def _weight() -> Tensor:
    return torch.randn(128, 128, generator=torch.Generator().manual_seed(0)) * 0.05


def _torchao(kind: str) -> File:
    return torchao_layers.flattened({"layer.weight": torchao_layers.KINDS[kind][1](_weight())})


def _hub(kind: str) -> File:
    return {f"layer.{key}": tensor for key, tensor in hub_formats.KINDS[kind].make(_weight())[0].items()}, {}


def _told(kind: str) -> File:
    """A format that is refused without the config, which is in the file's metadata here."""
    tensors, _ = _hub(kind)
    return tensors, {"quantization_config": json.dumps(hub_formats.KINDS[kind].config)}


def _scaled() -> File:
    """ComfyUI's scaled float8 of 2025, with a scale for activations."""
    return {**scaled({"layer.weight": _weight()}), "layer.scale_input": torch.tensor(0.25)}, {}


def _nunchaku_lite(scheme: str) -> File:
    packed = backends.get("comfy").encode(_weight().bfloat16(), backends.parse(scheme))
    made = backends.nunchaku_lite(packed, "bfloat16", torch.zeros(128, dtype=torch.bfloat16))
    return {f"layer.{key}": tensor for key, tensor in made.items()}, {}


MADE: Mapping[str, Callable[[], File]] = {
    "autoround_fp8_rows": lambda: _told("auto-round fp8 rows"),
    "ct_mxfp4": lambda: _hub("ct mxfp4"),
    "ct_mxfp6": lambda: _hub("ct mxfp6"),
    "ct_mxfp8": lambda: _told("ct mxfp8"),
    "fp8_scaled_with_input": _scaled,
    "hqq_axis_0": lambda: _told("hqq axis 0"),
    "nunchaku_lite_svdq_int4": lambda: _nunchaku_lite("svdq-int4"),
    "nunchaku_lite_svdq_nvfp4": lambda: _nunchaku_lite("svdq-nvfp4"),
    "torchao_int4": lambda: _torchao("int4"),
    "torchao_mxfp4_tiles": lambda: _torchao("mxfp4 in tiles"),
    "torchao_nvfp4_tiles": lambda: _torchao("nvfp4 in tiles"),
}


def write_layers(folder: Path) -> None:
    """Write a file of one layer of each format in `MADE`."""
    for name, make in MADE.items():
        tensors, metadata = make()
        tensors = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
        save_file(tensors, folder / f"{name}.safetensors", {"format": "pt", **metadata})


# By the name of a file: the model, and the class of the tokenizer that its pipeline lacks.
IN_PIPELINES: Mapping[str, tuple[str, str | None]] = {
    "mmproj-qwen2.5-vl.gguf": ("qwen_2.5_vl_7b", None),
    "t5-tokenizer.gguf": ("umt5_xxl", "T5TokenizerFast"),
    "qwen3-tokenizer.gguf": ("qwen_3_4b", "Qwen2Tokenizer"),
    "qwen3-tokenizer-tensor.safetensors": ("qwen_3_4b", "PreTrainedTokenizerFast"),
}


@functools.cache
def _place() -> Path:
    """A folder until the end of the process."""
    place = Path(tempfile.mkdtemp(prefix="sdquant-mutations-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place


@functools.cache
def _case(name: str) -> encoders.Case:
    return encoders._case(encoders.FILES[name], _place() / name)


@functools.cache
def _base(name: str) -> tuple[Path, tuple[Path, ...]]:
    """The pipeline that a file is read into, and what it is read with."""
    model, tokenizer = IN_PIPELINES[name]
    case = _case(model)
    if tokenizer is not None:
        return tokenizers._base(case, _place() / f"for-{name}", tokenizer), ()
    language = _place() / f"{name}-language.gguf"
    write_text(case.model, language, ARCH.QWEN2VL, Q8_0)
    return case.base, (language,)


def _pieces(writer: gguf.GGUFWriter) -> None:
    """A tokenizer as T5's, with the table of spellings."""
    writer.add_tokenizer_model("t5")
    writer.add_token_list(["<pad>", "</s>", "<unk>", "\u2581", "\u2581fi", "x", "\u2581fix"])
    writer.add_token_scores([0.0, 0.0, 0.0, -2.0, -1.0, -3.0, -0.5])
    writer.add_token_types([3, 3, 2, 1, 1, 1, 1])
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_precompiled_charsmap(_TABLE)


def write_encoders(folder: Path) -> None:
    """Write the files of `IN_PIPELINES`."""
    for name, (model, _) in IN_PIPELINES.items():
        case, file = _case(model), folder / name
        if name.startswith("mmproj"):
            write_vision(case.model, file, ARCH.QWEN2VL, Q8_0)
        elif name.startswith("t5"):
            write_text(case.model, file, ARCH.T5ENCODER, Q8_0, fields=_pieces)
        elif name.endswith("gguf"):
            write_text(case.model, file, ARCH.QWEN3, Q8_0, fields=tokenizers._fields_of(tokenizers._byte_level()))
        else:
            tokenizer = tokenizers._byte_level()
            tokenizer.add_special_tokens(["<|endoftext|>"])  # or there were nothing to pad texts with
            tokenizers._in_a_tensor(case, file, "tokenizer_json", tokenizer.to_str().encode())


def look(path: Path, *, whole: bool) -> None:
    """Plan, or load, a pipeline with this file, and use the tokenizer that came of it."""
    base, others = _base(path.name)
    options: dict[str, Any] = {"parts": [*others, path], "dtype": "float32"}
    if not whole:
        sdquant.plan(base, **options)
        return
    pipe = sdquant.load_model(base, **options, progress=False)
    if not others:
        pads = pipe.tokenizer.pad_token is not None  # without an end of texts there is nothing to pad with
        pipe.tokenizer(["a quick \ufb01x", "\u00fcber"], padding=pads)
