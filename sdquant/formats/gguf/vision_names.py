"""The vision of a language model, which llama.cpp keeps in a GGUF file of its own ("mmproj"), as transformers has it.

Rows for Qwen's, which diffusers' pipelines show pictures to. The file is looked for beside the language model, by what
is in it; the word "mmproj" in its name only says which files are worth a look. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import BadFileError, SdquantError
from ..folders import is_named_vision
from . import text_values
from .header import read_header
from .text_names import with_names

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

PREFIX = "model.visual."
_PATCH, _FRAMES = "patch_embed.proj.weight", ("v.patch_embd.weight", "v.patch_embd.weight.1")
_BLOCK: Mapping[str, str] = {
    "ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_q": "attn.q", "attn_k": "attn.k", "attn_v": "attn.v",
    "attn_out": "attn.proj",
}  # fmt: skip
_PART_OF_QKV = re.compile(r"\.attn\.[qkv]\.")
_QWEN2_ENDS = {"v.post_ln": "merger.ln_q", "mm.0": "merger.mlp.0", "mm.2": "merger.mlp.2"}


@dataclass(frozen=True)
class _Row:
    """A kind of vision.

    Attributes:
        of: `general.architecture` of the language models that it is for.
        block, ends: names in a block and outside of blocks, without "weight" and "bias".
    """

    of: str
    block: Mapping[str, str]
    ends: Mapping[str, str]


_ROWS: Mapping[str, _Row] = {  # by `clip.projector_type`
    "qwen2vl_merger": _Row("qwen2vl", {**_BLOCK, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}, _QWEN2_ENDS),
    "qwen2.5vl_merger": _Row(
        "qwen2vl",
        {**_BLOCK, "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        _QWEN2_ENDS,
    ),
    "qwen3vl_merger": _Row(
        "qwen3vl",
        {**_BLOCK, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
        {
            "v.patch_embd": "patch_embed.proj", "v.position_embd": "pos_embed", "v.post_ln": "merger.norm",
            "mm.0": "merger.linear_fc1", "mm.2": "merger.linear_fc2",
        },
    ),
}  # fmt: skip
_DEEP = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}  # after v.deepstack.<number of a block>


def language_model_of(metadata: Mapping[str, Any]) -> str | None:
    """Return the `general.architecture` of the language models that a file's vision is for; None if that is unknown."""
    row = _row(metadata)
    return None if row is None else row.of


def vision_of(src: Checkpoint, metadata: Mapping[str, Any]) -> Checkpoint | None:
    """Return a file of vision alone as transformers has it; None if its kind is unknown.

    Raises:
        UnsupportedFileError: what has to be put together is quantized to several types.
        BadFileError: some of that lacks, or has other shapes, or it is not known what a tensor is.
    """
    row = _row(metadata)
    if row is None:
        return None
    deep = sorted({int(match[1]) for key in src.names if (match := re.match(r"v\.deepstack\.(\d{1,9})\.", key))})
    names = {key: _name(key, row, deep) for key in src.names}
    strange = next((key for key, name in names.items() if name is None), None)
    if strange is not None or not {*_FRAMES} <= src.names:
        why = f"of {strange!r} it is not known what it is" if strange else f"it lacks one of {' and '.join(_FRAMES)}"
        raise _bad(src, why)
    vision = with_names(src, {key: str(name) for key, name in names.items()})
    # llama.cpp takes the kernel apart into its two frames, and Qwen2's q, k and v.
    vision = text_values.stacked(vision, PREFIX + _PATCH, [f"{PREFIX}{key}" for key in _FRAMES], 2)
    for whole in sorted({_PART_OF_QKV.sub(".attn.qkv.", name) for name in vision.names if _PART_OF_QKV.search(name)}):
        parts = [whole.replace(".attn.qkv.", f".attn.{part}.") for part in "qkv"]
        lack = [part for part in parts if part not in vision.names]
        if lack or whole in vision.names:
            raise _bad(src, f"{whole!r} is in parts, and it lacks {lack[0]!r}" if lack else f"it has {whole!r} twice")
        vision = text_values.one_after_another(vision, whole, parts)
    return vision


def _bad(src: Checkpoint, why: str) -> BadFileError:
    return BadFileError(
        f"Cannot load {src.path} as the vision of a language model", why, "Download the file again from its source"
    )


def with_vision(text: Checkpoint, vision: Checkpoint) -> Checkpoint:
    """Return a language model with the vision of another file."""
    text = without_vision(text)
    return replace(
        text,
        files=(*text.files, *vision.files),
        tensors={**text.tensors, **vision.tensors},
        home={**text.home, **vision.home},
        prequantized={**text.prequantized, **vision.prequantized},
        specs={**text.specs, **vision.specs},
        keys={**text.keys, **vision.keys},
        recipes={**text.recipes, **vision.recipes},
        headers={**text.headers, **vision.headers},
    )


def without_vision(text: Checkpoint) -> Checkpoint:
    """Return a language model of llama.cpp's without the vision that was found beside it."""
    file = text.files[0]
    mine = {key for key, home in text.home.items() if home == file}
    return replace(
        text,
        files=(file,),
        tensors={key: info for key, info in text.tensors.items() if key in mine},
        home={key: file for key in mine},
        prequantized={name: one for name, one in text.prequantized.items() if not name.startswith(PREFIX)},
        keys={key: one for key, one in text.keys.items() if key in mine},
        recipes={key: one for key, one in text.recipes.items() if key in mine},
        headers={file: text.headers[file]},
    )


def beside(path: Path, architecture: str) -> list[Path]:
    """Return the files in a language model's folder that hold a vision for it.

    Of several those count whose names contain the model's, without the type at its end, as ComfyUI-GGUF has it.
    """
    if architecture not in {row.of for row in _ROWS.values()}:
        return []
    there = [one for one in _named(path) if _is_for(one, architecture)]
    stem = _TYPE.sub("", path.stem).lower()
    return [one for one in there if stem in one.stem.lower()] or there


_TYPE = re.compile(r"[-_.](?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4|NVFP4|BF16|F16|F32)$", re.I)


def _named(path: Path) -> Iterable[Path]:
    return sorted(one for one in path.parent.iterdir() if one != path and is_named_vision(one) and one.is_file())


def _is_for(path: Path, architecture: str) -> bool:
    try:
        header = read_header(path, complete=False)
    except (SdquantError, OSError):
        return False
    return language_model_of(header.metadata) == architecture


def _row(metadata: Mapping[str, Any]) -> _Row | None:
    kind = metadata.get("clip.projector_type", metadata.get("clip.vision.projector_type"))
    return _ROWS.get(kind) if isinstance(kind, str) else None


def _name(key: str, row: _Row, deep: list[int]) -> str | None:
    """Return the name of a tensor; of the parts of one tensor a name that no model has."""
    if key in _FRAMES:
        return PREFIX + key
    base, _, leaf = key.rpartition(".")
    if leaf not in ("weight", "bias"):
        return None
    if base in row.ends:
        return f"{PREFIX}{row.ends[base]}.{leaf}"
    block = re.fullmatch(r"v\.blk\.(\d+)\.(\w+)", base)
    if block is not None and block[2] in row.block:
        return f"{PREFIX}blocks.{block[1]}.{row.block[block[2]]}.{leaf}"
    more = re.fullmatch(r"v\.deepstack\.(\d{1,9})\.(\w+)", base)
    if more is not None and more[2] in _DEEP:
        return f"{PREFIX}deepstack_merger_list.{deep.index(int(more[1]))}.{_DEEP[more[2]]}.{leaf}"
    return None
