"""Read quantized weights as loading does, but by their headers alone: with tensors without memory for the codes.

So a plan refuses a weight whose parts do not fit the model, as reading it would: the reader is the same. What it asks
of values decides nothing here, but for the few that are as small as a line of JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..core import Unfit, dtype_named, gguf_types, read_weight, registry
from ..errors import BadFileError, UnsupportedFileError
from ..formats import closing_files, safetensors
from .weight_loader import read_packed

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from ..core import PrequantizedWeight, TensorInfo
    from ..formats import Checkpoint

_SETTING = 64  # bytes of a few numbers, such as HQQ's bits and shapes, which are read
_LINE = 1024  # bytes of a line of JSON, which is read
_TABLES = (16, 256)  # values of a code table, which is, too
_SCALES = 1 << 20  # bytes of what has the values of a sound one: readers look at scales, and at no code
_FINITE = 0x38  # a number in each format of one byte


def refuse_unreadable(src: Checkpoint, model: nn.Module, ties: Container[str]) -> None:
    """Raise BadFileError for the first quantized weight that cannot be read into its model, by dtypes and shapes.

    Args:
        src: under the model's names. ties: the names of the model's parameters.
    """
    weights = {name: match for name, match in src.prequantized.items() if match.cut is None and name in ties}
    lines = _lines(src, weights.values())
    for name, match in weights.items():
        shape = tuple(model.get_parameter(name).shape)
        if not _is_refused(src, name, shape, lambda key: lines[key] if key in lines else _stand_in(src.tensors[key])):
            continue
        try:  # the error that loading raises, if it does
            with closing_files(src.open()) as files:
                read_packed(match, src.specs.get(name), shape, partial(src.read, files))
        except BadFileError as error:
            file = src.home[next(iter(match.keys.values()))]
            raise BadFileError(f"Cannot load {file}: {error.inner}", error.why, error.fix) from error
        except (Unfit, RuntimeError, OSError):  # of a file that cannot be mapped into so little memory, too
            continue


def _is_refused(src: Checkpoint, name: str, shape: tuple[int, ...], get: Callable[[str], Tensor]) -> bool:
    """Return whether the reader of a weight refuses it before it needs a value."""
    match, spec = src.prequantized[name], src.specs.get(name)
    try:
        if spec is None:
            registry.of_scheme(match.scheme).read(match, shape, get)
        else:
            read_weight(match, spec, shape, get)
    except (BadFileError, UnsupportedFileError):
        return True
    except (Unfit, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
        return False
    return False


def _lines(src: Checkpoint, weights: Iterable[PrequantizedWeight]) -> dict[str, Tensor]:
    """Return the parts of weights that are settings, lines of JSON or code tables, by key."""
    homes: dict[Path, dict[str, str]] = {}
    for match in weights:
        for key in (*match.keys.values(), *match.extra):
            if key not in src.recipes and _is_line(src.tensors[key]):
                homes.setdefault(src.home[key], {})[src.keys.get(key, key)] = key
    tensors = {}
    for path, keys in homes.items():
        header = src.headers.get(path)
        if isinstance(header, safetensors.SafetensorsHeader):
            for there, raw in safetensors.peek(header, keys).items():
                info = src.tensors[keys[there]]
                dtype, buffer = dtype_named(info.dtype), bytearray(raw)
                values = torch.frombuffer(buffer, dtype=dtype) if raw else torch.empty(0, dtype=dtype, device="cpu")
                tensors[keys[there]] = values.reshape(info.shape)
    return tensors


def _is_line(info: TensorInfo) -> bool:
    if info.dtype in gguf_types.TYPES or info.nbytes > _LINE or len(info.shape) > 1:
        return False
    if info.nbytes <= _SETTING:
        return True
    return info.dtype == "uint8" or info.shape[0] in _TABLES


def _stand_in(info: TensorInfo) -> Tensor:
    """Return a tensor of the same shape and dtype as one of a file: without memory, or with values that are sound."""
    shape, dtype = _stored(info), _dtype(info)
    if info.nbytes > _SCALES:
        return torch.empty(shape, dtype=dtype, device="meta")
    if dtype.itemsize == 1:
        return torch.full(shape, _FINITE, dtype=torch.uint8, device="cpu").view(dtype)
    return torch.ones(shape, dtype=torch.float32, device="cpu").to(dtype)


def _stored(info: TensorInfo) -> tuple[int, ...]:
    """Return the shape of a tensor as its file gives it: of GGUF's types [blocks, bytes]."""
    kind = gguf_types.TYPES.get(info.dtype)
    return info.shape if kind is None else (info.nbytes // kind.nbytes, kind.nbytes)


def _dtype(info: TensorInfo) -> torch.dtype:
    return torch.uint8 if info.dtype in gguf_types.TYPES else dtype_named(info.dtype)
