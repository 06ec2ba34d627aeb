"""The vision of a language model, which llama.cpp keeps in a GGUF file of its own ("mmproj"), as transformers has it.

The file is looked for beside the language model, by what is in it; the word "mmproj" in its name only says which files
are worth a look. `vision_rows` has the names. No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import BadFileError, SdquantError
from ..folders import is_named_vision
from ..tensor_file import Recipe
from . import text_values
from .header import read_header
from .text_names import with_names
from .vision_rows import FRAMES, PATCH, ROWS, row_of

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..tensor_file import Header

_PART_OF_QKV = re.compile(r"\.attn\.[qkv]\.")
_Q_OR_K = re.compile(r"v\.blk\.\d+\.attn_[qk]\.\w+")
_FEED = re.compile(r"(v\.blk\.\d+\.)ffn_(up|down)(\.\w+)")
_SWAP = {"up": "down", "down": "up"}


def language_models_of(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return each `general.architecture` of the language models that a file's vision is for; none if that is
    unknown."""
    row = row_of(metadata)
    return () if row is None else row.of


def vision_of(src: Checkpoint, metadata: Mapping[str, Any]) -> Checkpoint | None:
    """Return a file of vision alone as transformers has it; None if its kind is unknown.

    Raises:
        UnsupportedFileError: what has to be put together or changed is quantized.
        BadFileError: some of that lacks, or has other shapes, or it is not known what a tensor is.
    """
    row = row_of(metadata)
    if row is None:
        return None
    deep = sorted({int(match[1]) for key in src.names if (match := re.match(r"v\.deepstack\.(\d{1,9})\.", key))})
    swapped = _is_swapped(src)
    names = {key: row.name(_unswapped(key) if swapped else key, deep) for key in src.names if key not in row.spare}
    strange = next((key for key, name in names.items() if name is None), None)
    if strange is not None or (row.in_frames and not {*FRAMES} <= src.names):
        why = f"of {strange!r} it is not known what it is" if strange else f"it lacks one of {' and '.join(FRAMES)}"
        raise _bad(src, why)
    vision = with_names(src, {key: str(name) for key, name in names.items()})
    if row.in_frames:
        return _put_together(vision, row.prefix)
    if row.in_pairs:
        vision = text_values.in_halves(vision, _heads(src, metadata, names), unit=4)  # two halves, of rows and columns
    vision = text_values.less_one(vision, [name for name in row.plus_one if name in vision.names])
    for norm in row.unread:
        vision = _with_norm(vision, norm)
    return vision


def _put_together(vision: Checkpoint, prefix: str) -> Checkpoint:
    """Return Qwen's with its kernel in one, which llama.cpp takes apart into two frames, and Qwen2's q, k and v."""
    vision = text_values.stacked(vision, prefix + PATCH, [f"{prefix}{key}" for key in FRAMES], 2)
    for whole in sorted({_PART_OF_QKV.sub(".attn.qkv.", name) for name in vision.names if _PART_OF_QKV.search(name)}):
        parts = [whole.replace(".attn.qkv.", f".attn.{part}.") for part in "qkv"]
        lack = [part for part in parts if part not in vision.names]
        if lack or whole in vision.names:
            raise _bad(
                vision, f"{whole!r} is in parts, and it lacks {lack[0]!r}" if lack else f"it has {whole!r} twice"
            )
        vision = text_values.one_after_another(vision, whole, parts)
    return vision


def _is_swapped(src: Checkpoint) -> bool:
    """Return whether a file has the first matrix after the attention under the second one's name, as the converter of
    LLaVA's and the first files of Gemma 3 had them: as llama.cpp tells it, by the number of columns."""
    down, norm = _shape(src, "v.blk.0.ffn_down.weight"), _shape(src, "v.blk.0.ln1.weight")
    up = _shape(src, "v.blk.0.ffn_up.weight")
    return len(down) == 2 and len(up) == 2 and down[1:] == norm != up[1:]


def _unswapped(key: str) -> str:
    return _FEED.sub(lambda match: f"{match[1]}ffn_{_SWAP[match[2]]}{match[3]}", key)


def _shape(src: Checkpoint, key: str) -> tuple[int, ...]:
    """Return the shape of a tensor; () if there is none."""
    packed = src.prequantized.get(key)
    if packed is not None:
        return tuple(packed.details["shape"])
    return src.tensors[key].shape if key in src.tensors else ()


def _heads(src: Checkpoint, metadata: Mapping[str, Any], names: Mapping[str, str | None]) -> dict[str, int]:
    """Return the number of heads of each weight and bias of q and k."""
    count = metadata.get("clip.vision.attention.head_count")
    if type(count) is not int:  # nor a bool
        raise _bad(
            src,
            "its header does not say how many heads the layers have (clip.vision.attention.head_count), by which the "
            "rows of its weights are ordered",
        )
    return {str(name): count for key, name in names.items() if _Q_OR_K.fullmatch(key)}


def _with_norm(vision: Checkpoint, norm: str) -> Checkpoint:
    """Return the source with a norm whose output nobody reads, if it has none."""
    from ...core import TensorInfo

    width = _shape(vision, next((name for name in vision.names if name.endswith(".layer_norm1.weight")), ""))
    if f"{norm}.weight" in vision.names or len(width) != 1:
        return vision
    info = TensorInfo(dtype="float32", shape=width, nbytes=4 * math.prod(width))
    rows = {f"{norm}.{leaf}": value for leaf, value in (("weight", 1.0), ("bias", 0.0))}
    return replace(
        vision,
        tensors={**vision.tensors, **dict.fromkeys(rows, info)},
        home={**vision.home, **dict.fromkeys(rows, vision.files[0])},
        recipes={**vision.recipes, **{name: _constant(width, value) for name, value in rows.items()}},
    )


def _constant(shape: tuple[int, ...], value: float) -> Recipe:
    def make(_: Any) -> Any:
        import torch

        return torch.full(shape, value, dtype=torch.float32, device="cpu")

    return Recipe((), None, shape, "float32", make)


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
    seen = {name for name, one in text.prequantized.items() if any(text.home[key] != file for key in one.keys.values())}
    mine = {key for key, home in text.home.items() if home == file}
    return replace(
        text,
        files=(file,),
        tensors={key: info for key, info in text.tensors.items() if key in mine},
        home={key: file for key in mine},
        prequantized={name: one for name, one in text.prequantized.items() if name not in seen},
        keys={key: one for key, one in text.keys.items() if key in mine},
        recipes={key: one for key, one in text.recipes.items() if key in mine},
        headers={file: text.headers[file]},
    )


def beside(text: Checkpoint, architecture: str) -> list[Path]:
    """Return the files in a language model's folder that hold a vision for it.

    Of several those count whose names contain the model's, without the type at its end, as ComfyUI-GGUF has it.
    """
    if not any(architecture in row.of for row in ROWS.values()):
        return []
    path, header = text.files[0], text.headers[text.files[0]]
    there = [one for one in _named(path) if _is_for(one, architecture, header)]
    stem = _TYPE.sub("", path.stem).lower()
    return [one for one in there if stem in one.stem.lower()] or there


def fits(vision: Checkpoint, text: Checkpoint) -> bool:
    """Return whether a vision is for a language model as wide as this one, as far as their files say it."""
    return _fits(vision.headers[vision.files[0]], text.headers[text.files[0]])


def _fits(vision: Header, text: Header) -> bool:
    wide, made = _width_of_text(text), _made_width(vision)
    return wide is None or made is None or wide == made


def _width_of_text(header: Header) -> int | None:
    table = header.tensors.get("token_embd.weight")
    return table.shape[-1] if table is not None and len(table.shape) == 2 else None


def _made_width(header: Header) -> int | None:
    """Return how wide what a vision puts among the embedded tokens is."""
    if (last := header.tensors.get("mm.input_projection.weight")) is not None:
        return last.shape[-1] if len(last.shape) == 2 else None  # Gemma's, which is multiplied from the right
    last = header.tensors.get("mm.2.weight")
    return last.shape[0] if last is not None and len(last.shape) == 2 else None


_TYPE = re.compile(r"[-_.](?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4|NVFP4|BF16|F16|F32)$", re.I)


def _named(path: Path) -> Iterable[Path]:
    return sorted(one for one in path.parent.iterdir() if one != path and is_named_vision(one) and one.is_file())


def _is_for(path: Path, architecture: str, text: Header) -> bool:
    try:
        header = read_header(path, complete=False)
    except (SdquantError, OSError):
        return False
    return architecture in language_models_of(header.metadata) and _fits(header, text)
