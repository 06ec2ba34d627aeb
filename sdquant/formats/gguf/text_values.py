"""Values of text encoders in GGUF that llama.cpp stores otherwise than transformers, undone while they are read.

Rows change places, and tensors are put one after another, with the blocks as they are: a block lies within a row.
Importing this module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import BadFileError, UnsupportedFileError
from ..tensor_file import Recipe
from .header import GGUFTensor

if TYPE_CHECKING:
    from torch import Tensor

    from ...core import TensorInfo
    from ..checkpoint import Checkpoint
    from ..tensor_file import Get

_OTHER = "Use a file that llama.cpp's convert_hf_to_gguf.py wrote, or a .safetensors file of the same model"


def in_halves(src: Checkpoint, heads: Mapping[str, int], width: object = None, unit: int = 2) -> Checkpoint:
    """Return the source with rows of q and k in transformers' order, each head's first halves before its second ones.

    llama.cpp has them in pairs, [heads, width / 2, 2] for transformers' [heads, 2, width / 2].

    Args:
        heads: their number, by the names of weights and biases that are in the source.
        width: of a head, if the header says it. unit: what has to divide it.

    Raises:
        BadFileError: the rows of a tensor cannot be divided so, or the heads are not all of one width. A wrong number
            that keeps to this cannot be told: in a file of a vision q and k have as many heads, and nothing else in it
            depends on how many.
    """
    tensors, recipes = dict(src.tensors), dict(src.recipes)
    known = width if type(width) is int else None
    for name, count in heads.items():
        packed = src.prequantized.get(name)
        key = name if packed is None else next(iter(packed.keys.values()))
        of, info = src.keys.get(key, key), src.tensors[key]
        rows = info.shape[0]
        known = rows // max(count, 1) if known is None else known
        whole = count > 0 and rows % (unit * count) == 0 and rows == known * count
        if not whole or (isinstance(info, GGUFTensor) and info.stored != info.shape):
            more = "" if rows % (unit * max(count, 1)) else f", each of {known} rows as others are or it says"
            raise BadFileError(
                f"Cannot load tensor {of!r} of {src.path}",
                f"it has {rows} rows, and the header says that they are of {count} heads{more}",
                "Download the file again from its source",
            )
        recipes[key] = _made(info, (of,), _halves(of, rows, count))
    return replace(src, tensors=tensors, recipes=recipes)


def _halves(key: str, rows: int, heads: int) -> Callable[[Get], Tensor]:
    def make(get: Get) -> Tensor:
        import torch

        tensor = get(key)
        index = torch.arange(rows, device="cpu").view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
        return tensor.reshape(rows, -1)[index].view(tensor.shape)

    return make


def less_one(src: Checkpoint, names: Sequence[str]) -> Checkpoint:
    """Return the source with 1 subtracted from these norms, in float32: llama.cpp's Gemma has the factor itself."""
    from ...core import TensorInfo

    tensors, recipes = dict(src.tensors), dict(src.recipes)
    for name in names:
        if name not in src.tensors:
            raise _quantized(src, name, "a norm")
        shape = src.tensors[name].shape
        tensors[name] = TensorInfo(dtype="float32", shape=shape, nbytes=4 * math.prod(shape))
        recipes[name] = _made(tensors[name], (src.keys[name],), _minus_one(src.keys[name]))
    return replace(src, tensors=tensors, recipes=recipes)


def _minus_one(key: str) -> Callable[[Get], Tensor]:
    return lambda get: get(key).float() - 1


def stacked(src: Checkpoint, name: str, parts: Sequence[str], dim: int) -> Checkpoint:
    """Return the source with tensors in one of a new dimension: the frames of a patch's kernel.

    Raises:
        UnsupportedFileError: one is quantized. BadFileError: they differ in shape, or have no such dimension.
    """
    from ...core import TensorInfo

    for part in parts:
        if part in src.prequantized:
            raise _quantized(src, part, "a kernel for pixels")
    one = src.tensors[parts[0]]
    for part in parts:
        info = src.tensors[part]
        if len(info.shape) < dim or info.shape != one.shape:
            raise _shaped(src, part, f"its shape is {list(info.shape)}, beside {list(one.shape)}: no parts of a kernel")
    shape = (*one.shape[:dim], len(parts), *one.shape[dim:])
    keys = tuple(src.keys.get(part, part) for part in parts)

    def make(get: Get) -> Tensor:
        import torch

        return torch.stack([get(key) for key in keys], dim)

    info = TensorInfo(dtype=one.dtype, shape=shape, nbytes=sum(src.tensors[part].nbytes for part in parts))
    return _instead(src, parts, name, info, _made(info, keys, make))


def one_after_another(src: Checkpoint, name: str, parts: Sequence[str]) -> Checkpoint:
    """Return the source with tensors joined along their rows: q, k and v. Quantized ones stay as they are.

    Raises:
        UnsupportedFileError: they are not of one type. BadFileError: they have no rows.
    """
    from ...core import TensorInfo

    packs = [src.prequantized.get(part) for part in parts]
    held = [part if pack is None else next(iter(pack.keys.values())) for part, pack in zip(parts, packs, strict=True)]
    infos = [src.tensors[key] for key in held]
    if len({(info.dtype, info.shape[1:]) for info in infos}) > 1:
        types = ", ".join(f"{src.keys.get(key, key)} {info.dtype}" for key, info in zip(held, infos, strict=True))
        raise UnsupportedFileError(
            f"Cannot load {src.path}",
            f"the model has in one tensor what the file has in several types: {types}",
            _OTHER,
        )
    if not infos[0].shape:
        raise _shaped(src, held[0], "it is one number, and the model has a matrix or vector of it")
    shape = (sum(info.shape[0] for info in infos), *infos[0].shape[1:])
    keys = tuple(src.keys.get(key, key) for key in held)

    def make(get: Get) -> Tensor:
        import torch

        return torch.cat([get(key) for key in keys])

    info = TensorInfo(dtype=infos[0].dtype, shape=shape, nbytes=sum(one.nbytes for one in infos))
    recipe, first = _made(info, keys, make), packs[0]
    if first is None:
        return _instead(src, parts, name, info, recipe)
    whole = f"{keys[0]}+"  # which no file has
    match = replace(
        first, name=name, keys=dict.fromkeys(first.keys, whole), details={**first.details, "shape": list(shape)}
    )
    joined = _instead(src, held, whole, info, recipe)
    rest = {key: one for key, one in src.prequantized.items() if key not in parts}
    return replace(joined, prequantized={**rest, name: match})


def _instead(src: Checkpoint, parts: Sequence[str], name: str, info: TensorInfo, recipe: Recipe) -> Checkpoint:
    """Return the source with a tensor instead of others."""
    return replace(
        src,
        tensors={**{key: one for key, one in src.tensors.items() if key not in parts}, name: info},
        home={**{key: file for key, file in src.home.items() if key not in parts}, name: src.home[parts[0]]},
        keys={key: one for key, one in src.keys.items() if key not in parts},
        recipes={**src.recipes, name: recipe},
    )


def _made(info: TensorInfo, sources: tuple[str, ...], make: Callable[[Get], Tensor]) -> Recipe:
    return Recipe(sources, None, info.shape, info.dtype, make)


def _shaped(src: Checkpoint, key: str, why: str) -> BadFileError:
    return BadFileError(
        f"Cannot load tensor {src.keys.get(key, key)!r} of {src.path}", why, "Download the file again from its source"
    )


def _quantized(src: Checkpoint, name: str, what: str) -> UnsupportedFileError:
    kind = src.prequantized[name].scheme
    return UnsupportedFileError(
        f"Cannot load {src.path}", f"its {src.prequantized[name].name!r} is {what}, and quantized to {kind}", _OTHER
    )
