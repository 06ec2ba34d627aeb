"""A component's quantized weights as floats: each is read and dequantized when it is asked for.

The rest of sdquant takes the result for a component of float weights, whose tensors are made by recipes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..core import DTYPE_BITS, TensorInfo, Unfit, dtype_named, is_range, packed_reader, require_sound
from ..errors import BadFileError, UnsupportedFileError
from ..formats import Recipe, without_quantization
from ..utils.tensors import is_finite
from . import fitting
from .keep_in_fp32 import float32_of_class
from .names import to_model
from .weight_loader import read_packed

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from ..core import Packed, PackedSpec
    from ..formats import Checkpoint, Get, TensorFile

_FLOAT8 = "bfloat16"  # what float8 tensors become without a dtype: it has all of their values
MAX_FLOAT16 = 65504.0


def with_float_weights(src: Checkpoint, dtype: str | None = None) -> Checkpoint:
    """Return the component with float tensors in place of its quantized weights, under the weights' names.

    Scales, markers and whatever else belongs to a quantized weight are not among its tensors; nor are the ranges of
    quantized activations.

    Args:
        src: its quantized weights may be cuts. If its config names a class that is known here, the model's shapes
            count where a file leaves out dimensions of 1 or, as optimum-quanto does below 8 bits, the whole shape.
        dtype: torch name of what all floats become. None: each weight gets the dtype that it was quantized from (or
            bfloat16 if the file does not say), and the others keep theirs, except float8, which becomes bfloat16. Those
            that their library keeps in float32 whatever the dtype is stay in that.

    Raises:
        BadFileError: the parts of a weight are inconsistent. UnsupportedFileError: a weight's shape is unknown.
    """
    twice = src.plain.keys() & src.prequantized.keys()
    if twice:
        raise _bad(src, min(twice), "it is there both as it is and quantized")
    shapes = _shapes_of_model(src)
    owner = {key: name for name, match in src.prequantized.items() for key in (*match.keys.values(), *match.extra)}
    tensors: dict[str, TensorInfo] = {}
    recipes: dict[str, Recipe] = {}
    files = src.open() if src.prequantized else {}
    in_float32 = float32_of_class(src.class_name)

    def of(name: str, own: str) -> str | None:
        """Return the dtype that a tensor is cast to; its own if that is float32, and its library keeps it in that."""
        return dtype if dtype is None or own != "float32" else in_float32.dtype(name, dtype)

    try:
        for key, info in src.tensors.items():  # in the order of the files
            name = owner.get(key)
            if name is None and not is_range(key):
                tensors[key], recipe = _plain(src, key, info, shapes.get(key), of(key, info.dtype))
            elif name is not None and name not in tensors:
                spec = _spec(src, name, shapes.get(name), files)
                tensors[name], recipe = _weight(src, name, spec, of(name, spec.dtype))
                key = name
            else:
                continue
            if recipe is not None:
                recipes[key] = recipe
        for name in src.prequantized.keys() - tensors.keys():  # further cuts of weights that several models share
            spec = _spec(src, name, shapes.get(name), files)
            tensors[name], recipes[name] = _weight(src, name, spec, of(name, spec.dtype))
    finally:
        for file in files.values():
            file.close()
    home = {key: src.home[key if key in src.home else _first_key(src, key)] for key in tensors}
    origins = {name: match.scheme for name, match in src.prequantized.items()}
    return replace(
        src, tensors=tensors, home=home, recipes=recipes, prequantized={}, specs={}, rules=(), origins=origins,
        config=without_quantization(src.config),
    )  # fmt: skip


def _plain(
    src: Checkpoint, key: str, info: TensorInfo, shape: tuple[int, ...] | None, dtype: str | None
) -> tuple[TensorInfo, Recipe | None]:
    """Return a float or other unquantized tensor as it will be, and the recipe, None if it is as in the file."""
    is_float = info.dtype.startswith(("float", "bfloat"))
    wanted = (dtype or (_FLOAT8 if DTYPE_BITS[info.dtype] == 8 else info.dtype)) if is_float else info.dtype
    size = shape if shape is not None and _same_but_ones(shape, info.shape) else info.shape
    own = src.recipes.get(key)
    if (wanted, size) == (info.dtype, info.shape):
        return info, own
    source = src.keys.get(key, key)

    def make(get: Get) -> Tensor:
        tensor = own(get) if own is not None else get(source)
        return _cast(src, key, tensor, wanted).reshape(size)

    return _info(wanted, size), Recipe(own.sources if own else (source,), None, size, dtype_named(wanted), make)


def _weight(src: Checkpoint, name: str, spec: PackedSpec, dtype: str | None) -> tuple[TensorInfo, Recipe]:
    """Return a quantized weight as floats."""
    match = src.prequantized[name]
    wanted = dtype or src.recorded_dtype or spec.dtype

    def make(get: Get, dtype: str = wanted) -> Tensor:
        packed = _read(src, name, spec.shape, lambda key: _part(src, key, get), complete=True)
        try:
            tensor = packed.spec.scheme.codec.decode(packed, dtype_named(dtype))
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
            raise _bad(src, name, f"its tensors do not fit together: {error}") from error
        if not is_finite(tensor):
            raise _bad(src, name, f"{packed_reader.NOT_FINITE}, as {dtype}")
        return tensor

    sources = (*match.keys.values(), *match.extra)
    return _info(wanted, spec.shape), Recipe(
        sources, None, spec.shape, dtype_named(wanted), make, exact=lambda get: make(get, "float32")
    )


def _part(src: Checkpoint, key: str, get: Get) -> Tensor:
    """Return a part of a quantized weight."""
    recipe = src.recipes.get(key)
    return get(key) if recipe is None else recipe(get)


def _spec(src: Checkpoint, name: str, shape: tuple[int, ...] | None, files: Mapping[Path, TensorFile]) -> PackedSpec:
    """Return the description of a quantized weight; the file is read as far as that takes."""
    recorded = src.specs.get(name)
    return recorded or _read(src, name, shape, lambda key: src.read(files, key)).spec


def _read(src: Checkpoint, name: str, shape: tuple[int, ...] | None, get: Get, *, complete: bool = False) -> Packed:
    """Read a quantized weight; errors name the file.

    Args:
        complete: also check the scales among its codes, for which all of it is read.

    Raises:
        BadFileError: see `read_packed`. UnsupportedFileError: the file does not give the weight's shape.
    """
    match, file = src.prequantized[name], src.home[_first_key(src, name)]
    try:
        packed = read_packed(match, src.specs.get(name), shape, get)
        if complete:
            require_sound(match, packed)
    except BadFileError as error:
        raise BadFileError(f"Cannot dequantize {file}: {error.inner}", error.why, error.fix) from error
    except (Unfit, NotImplementedError) as error:
        raise UnsupportedFileError(
            f"Cannot dequantize weight {name!r} of {file}",
            f"{error}, and no model is known that has it",
            "Pass the folder with the model's config.json, or that file as config",
        ) from error
    return packed


def _cast(src: Checkpoint, key: str, tensor: Tensor, dtype: str) -> Tensor:
    """Cast a tensor. Raise BadFileError if values become infinite that are not."""
    import torch

    result = tensor.to(dtype_named(dtype))
    if not result.is_floating_point() or not tensor.is_floating_point():
        return result
    largest = torch.finfo(result.dtype).max
    if largest < torch.finfo(tensor.dtype).max and not is_finite(result) and is_finite(tensor):
        raise _bad(src, key, f"it has values that {dtype} does not reach (it ends at {largest:g})")
    return result


def _shapes_of_model(src: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in the model of the component's config, by the file's names; {} if there is no
    config, or it names a class that diffusers and transformers do not have here."""
    try:
        model = fitting.shell(src)
    except UnsupportedFileError:
        return {}
    if model is None:
        return {}
    mapped = to_model(model.model, [key for key in (*src.plain, *src.prequantized) if not is_range(key)], model.known)
    return {key: tuple(model.tensor(name).shape) for name, key in mapped.names.items() if name in model.known}


def _same_but_ones(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return [n for n in one if n != 1] == [n for n in other if n != 1]


def _first_key(src: Checkpoint, name: str) -> str:
    """Return the file key of a quantized weight's first part."""
    return next(iter(src.prequantized[name].keys.values()))


def _info(dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(dtype=dtype, shape=shape, nbytes=math.prod(shape) * DTYPE_BITS[dtype] // 8)


def _bad(src: Checkpoint, name: str, why: str) -> BadFileError:
    file = src.home[name if name in src.home else _first_key(src, name)]
    return BadFileError(
        f"Cannot dequantize tensor {name!r} of {file}",
        why,
        "Use dtype bfloat16 or float32 if it was float16; otherwise download or quantize the model again",
    )
