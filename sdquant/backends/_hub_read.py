"""Read the hub's integer weights: unpack each format, once, into the parts that `hub.Hub` describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import Packed, PackedSpec, Unfit, dtype_name, registry
from . import _hub_mxfp6
from ._bnb_codec import bad, require, scales
from ._comfy_codec import dtype_of
from ._hub_codes import AXIS, ZERO, integers, packed, unit
from ._hub_find import (
    AWQ,
    BYTES,
    COMPRESSED,
    GPTQ,
    HIGH_FIRST,
    HQQ,
    MXFP6,
    NIBBLES,
    OFFSET,
    PACKING,
    PAIRS,
    SYMMETRIC,
    unread,
)
from ._hub_hqq import IN_BYTES
from ._hub_signed import unpack
from ._hub_unpacked import Get, Size, Unpacked

if TYPE_CHECKING:
    from ..core import PrequantizedWeight

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each nibble of a word


def read(weight: PrequantizedWeight, shape: tuple[int, ...] | None, get: Get) -> Packed:
    """See `Backend.read`; of sdquant's own files, whose parts are as they are in memory, too."""
    scheme = registry.scheme(weight.scheme)
    bits, packing = int(scheme.bits), weight.details.get(PACKING)
    if packing is None:
        return _own(weight, shape, bits, get)
    if shape is not None and len(shape) != 2:
        raise bad(weight.name, f"it is the weight of a linear layer, but the model needs {list(shape)}")
    size = (shape[0], shape[1]) if shape is not None else None
    one = _READERS[packing](weight, bits, size, get)
    rows, columns = len(one.codes), one.codes.shape[1] * 8 // bits
    if size is not None and size != (rows, columns):
        raise bad(weight.name, f"it has {bits}-bit codes of {[rows, columns]}, but the model needs {list(size)}")
    if columns % unit(bits):
        raise unread(weight.name, f"it has {columns} columns, and sdquant reads multiples of {unit(bits)}")
    codes, order = one.codes, None
    if one.groups is not None:
        codes, order = _sorted(one.groups, codes, bits, one.scale.shape[1])
    parts = {"codes": codes, "scale": one.scale, "zero": one.zero, "shift": one.shift, "order": order}
    parts["columns"] = one.columns
    spec = PackedSpec(scheme=scheme, shape=(rows, columns), dtype=dtype_of(weight), details=one.details)
    return Packed(spec=spec, parts={name: part for name, part in parts.items() if part is not None})


def _own(weight: PrequantizedWeight, shape: tuple[int, ...] | None, bits: int, get: Get) -> Packed:
    """Read a weight of sdquant's own file."""
    parts = {part: get(key) for part, key in weight.keys.items()}
    if shape is None or len(shape) != 2 or not parts.keys() >= {"codes", "scale"}:
        raise bad(weight.name, f"its parts ({', '.join(parts)}) are not those of {weight.scheme}")
    rows, columns = shape
    grid: tuple[int, ...] = tuple(parts["scale"].shape)
    fits = len(grid) == 2 and (grid[0] == rows and columns % grid[1] == 0)
    if AXIS in weight.details:
        fits = len(grid) == 2 and grid[0] == 1 and rows * columns % grid[1] == 0
    needed = {"codes": (rows, columns * bits // 8), "scale": grid, "zero": grid, "shift": grid}
    needed |= {"order": (columns,), "columns": (columns,)}
    dtypes = {"codes": torch.uint8, "shift": torch.float32, "order": torch.int32, "columns": torch.float32}
    if "zero" in parts:
        dtypes["zero"] = torch.float32 if parts["zero"].is_floating_point() else torch.uint8
    for part, tensor in parts.items():
        if part not in needed or tuple(tensor.shape) != needed[part] or not fits or columns % unit(bits):
            raise bad(weight.keys[part], f"its shape is {list(tensor.shape)}, which no weight of {list(shape)} has")
        if tensor.dtype != dtypes.get(part, tensor.dtype):
            raise bad(weight.keys[part], f"it is {dtype_name(tensor.dtype)}, but {dtype_name(dtypes[part])} is needed")
    scales(weight.keys["scale"], parts["scale"])
    if "order" in parts and not torch.equal(parts["order"].sort().values.long(), torch.arange(columns, device="cpu")):
        raise bad(weight.keys["order"], "it does not have each column once")
    details = {key: 0 for key in (AXIS, ZERO) if key in weight.details}
    spec = PackedSpec(
        scheme=registry.scheme(weight.scheme), shape=(rows, columns), dtype=dtype_of(weight), details=details
    )
    return Packed(spec=spec, parts=parts)


def _sorted(groups: tuple[str, Tensor], codes: Tensor, bits: int, count: int) -> tuple[Tensor, Tensor | None]:
    """Return codes with the columns of each group side by side, and the column that each is; None if they were so."""
    key, group = groups
    columns = codes.shape[1] * 8 // bits
    if group.dtype not in (torch.int32, torch.int64):
        raise bad(key, f"it is {dtype_name(group.dtype)}, not int32")
    group = group.long()
    if tuple(group.shape) != (columns,):
        raise bad(key, f"its shape is {list(group.shape)}, but the weight has {columns} columns")
    if bool((group == -1).all()):  # as compressed-tensors begins with
        return codes, None
    is_in_range = bool(((group >= 0) & (group < count)).all())
    if not is_in_range or bool((group.bincount(minlength=count) != columns // count).any()):
        raise bad(key, f"it does not put {columns // count} columns into each of {count} groups")
    order = group.argsort(stable=True)
    if torch.equal(order, torch.arange(columns, device=order.device)):
        return codes, None
    return packed(integers(codes, bits)[:, order], bits), order.to(torch.int32)


def _scale(weight: PrequantizedWeight, get: Get, grid: tuple[int, ...] | None = None) -> Tensor:
    key, scale = require(weight, "scale", get)
    scales(key, scale)
    if grid is not None and tuple(scale.shape) != grid:
        raise bad(key, f"its shape is {list(scale.shape)}, but {list(grid)} belongs to the weight")
    return scale


def _groups(weight: PrequantizedWeight, get: Get) -> tuple[str, Tensor] | None:
    key = weight.keys.get("order")
    return None if key is None else (key, get(key))


def _bytes(words: Tensor) -> Tensor:
    """View int32 [rows, n] as uint8 [rows, 4 n], in the order of the bits of their numbers."""
    return words.contiguous().view(torch.uint8)


def _words(weight: PrequantizedWeight, part: str, get: Get) -> tuple[str, Tensor]:
    key, words = require(weight, part, get)
    if words.dtype != torch.int32 or words.ndim != 2 or not words.numel():
        raise bad(key, f"it is {dtype_name(words.dtype)} {list(words.shape)}, not a matrix of int32")
    return key, words


def _zeros(zero: Tensor, bits: int) -> Tensor | None:
    """Return zero points; None where all are the middle of the range, which need not be kept."""
    return None if bool((zero == 1 << bits - 1).all()) else zero


def _gptq(weight: PrequantizedWeight, bits: int, size: Size | None, get: Get) -> Unpacked:
    _, words = _words(weight, "codes", get)
    scale = _scale(weight, get)
    key, zeros = _words(weight, "zero", get)
    codes = _bytes(words.T)
    out, groups = len(codes), len(scale)
    if tuple(scale.shape) != (groups, out) or tuple(zeros.shape) != (groups, out * bits // 32):
        raise bad(key, f"its shape is {list(zeros.shape)}, but the scales have {list(scale.shape)}")
    if codes.shape[1] * 8 // bits % groups:
        raise unread(weight.name, f"its {groups} groups of columns are not of one size")
    zero = integers(_bytes(zeros), bits) + weight.details[OFFSET] & (1 << bits) - 1
    middle = 1 << bits - 1
    if weight.details.get(SYMMETRIC) and bool((zero != middle).any()):
        other = 1 - 2 * weight.details[OFFSET]
        if bool((zero + other & (1 << bits) - 1 == middle).all()):
            raise unread(
                weight.name,
                "its config says that it is symmetric, but its zero points are in the middle only if they are "
                + ("stored as they are (gptq_v2, AutoRound)" if other < 0 else "stored less one (GPTQ's first version)")
                + ", which the config does not say",
            )
    return Unpacked(
        codes=codes, scale=scale.T.contiguous(), zero=_zeros(zero.T.contiguous(), bits), groups=_groups(weight, get)
    )


def _awq(weight: PrequantizedWeight, bits: int, size: Size | None, get: Get) -> Unpacked:
    _, words = _words(weight, "codes", get)
    key, zeros = _words(weight, "zero", get)
    scale = _scale(weight, get)
    columns, out, groups = len(words), words.shape[1] * 8, len(scale)
    if tuple(scale.shape) != (groups, out) or tuple(zeros.shape) != (groups, words.shape[1]):
        raise bad(key, f"its shape is {list(zeros.shape)}, but the scales have {list(scale.shape)}")
    if columns % groups or columns % unit(bits):
        raise unread(weight.name, f"its {columns} columns are not whole groups, of which there are {groups}")
    codes = packed(_awq_columns(words).T.contiguous(), bits)
    return Unpacked(codes=codes, scale=scale.T.contiguous(), zero=_zeros(_awq_columns(zeros).T.contiguous(), bits))


def _awq_columns(words: Tensor) -> Tensor:
    """Unpack AWQ's words, int32 [rows, n]: uint8 [rows, 8 n] in the order of the weight."""
    stored = integers(_bytes(words), 4).view(len(words), -1, 8)
    values = torch.empty_like(stored)
    values[..., list(_AWQ_ORDER)] = stored
    return values.flatten(1)


def _compressed(weight: PrequantizedWeight, bits: int, size: Size | None, get: Get) -> Unpacked:
    key, words = _words(weight, "codes", get)
    dims = tuple(get(weight.keys["shape"]).tolist()) if "shape" in weight.keys else size
    if dims is None:
        raise Unfit(f"the tensors of {weight.name} alone do not tell its shape")
    if len(dims) != 2 or dims[0] != len(words) or -(-dims[1] * bits // 32) != words.shape[1]:
        raise bad(
            key, f"it has {words.shape[1]} words a row, which do not make a weight of {list(dims)} with {bits} bits"
        )
    rows, columns = int(dims[0]), int(dims[1])
    if columns % unit(bits):
        raise unread(weight.name, f"it has {columns} columns, and sdquant reads multiples of {unit(bits)}")
    codes = _bytes(words)[:, : columns * bits // 8].contiguous()
    scale = _grouped(weight, rows, columns, get)
    zero = None
    if "zero" in weight.keys:
        key, zeros = _words(weight, "zero", get)
        if tuple(zeros.shape) != (-(-rows * bits // 32), scale.shape[1]):
            raise bad(key, f"its shape is {list(zeros.shape)}, but the scales have {list(scale.shape)}")
        # The words of a column need not be whole units of codes, which those of 3 bits are unpacked by.
        stored, needed = _bytes(zeros.T), -(-rows // 8) * bits
        stored = F.pad(stored[:, :needed], (0, max(0, needed - stored.shape[1])))
        zero = _zeros(integers(stored, bits)[:, :rows].T.contiguous(), bits)
    return Unpacked(codes=codes, scale=scale, zero=zero, groups=_groups(weight, get))


def _grouped(weight: PrequantizedWeight, rows: int, columns: int, get: Get) -> Tensor:
    """Return compressed-tensors' scales, [rows, groups]."""
    scale = _scale(weight, get)
    scale = scale.reshape(1, 1).expand(rows, 1).contiguous() if scale.numel() == 1 else scale
    scale = scale.unsqueeze(1) if scale.ndim == 1 else scale
    if scale.ndim != 2 or len(scale) != rows or columns % scale.shape[1]:
        raise bad(weight.keys["scale"], f"its shape is {list(scale.shape)}, but the weight has {[rows, columns]}")
    return scale


def _hqq(weight: PrequantizedWeight, bits: int, size: Size | None, get: Get) -> Unpacked:
    facts: Mapping[str, Any] = {
        part: get(weight.keys[part]).tolist() for part in ("nbits", "axis", "shape") if part in weight.keys
    }
    flags = [part for part in ("floats", "scales", "zeros") if part in weight.keys and get(weight.keys[part]).any()]
    if flags:
        raise unread(weight.name, f"it is HQQ's with {weight.keys[flags[0]]!r}, which sdquant does not read")
    if facts.get("nbits", bits) not in (bits, *(IN_BYTES if bits == 8 else ())):
        raise bad(weight.keys["nbits"], f"it says {facts['nbits']} bits, but other tensors or the config say {bits}")
    dims = tuple(facts.get("shape", size or ()))
    if "shape" in facts and len(dims) != 2:
        raise bad(weight.keys["shape"], f"it has {len(dims)} numbers, and the shape of a linear layer's weight has two")
    if not dims:
        raise Unfit(f"the tensors of {weight.name} alone do not tell its shape")
    rows, columns = dims
    key, codes = require(weight, "codes", get)
    scale, (key_zero, zero) = _scale(weight, get), require(weight, "shift", get)
    scales(key_zero, zero)
    axis = 0 if scale.shape[0] == 1 and scale.numel() > 1 else 1
    if scale.ndim != 2 or zero.shape != scale.shape or scale.shape[axis] != 1 or facts.get("axis", axis) != axis:
        raise bad(key_zero, f"its shape is {list(zero.shape)}, and that of the scales {list(scale.shape)}")
    groups = scale.numel()
    if rows * columns % groups or columns % unit(bits) or (axis and groups % rows):
        raise unread(weight.name, f"its {groups} groups are not those of a row of its {[rows, columns]}")
    values = _hqq_codes(key, codes, bits, groups if axis else rows * columns // groups)
    if values.numel() != rows * columns:
        raise bad(key, f"it has {values.numel()} codes, which are not those of a weight of {[rows, columns]}")
    grid = (rows, groups // rows) if axis else (1, groups)
    shift = (zero.float() * scale.float()).view(grid)
    return Unpacked(
        codes=packed(values.reshape(rows, columns), bits),
        scale=scale.reshape(grid),
        shift=shift,
        details={ZERO: 0} if axis else {ZERO: 0, AXIS: 0},
    )


def _hqq_codes(key: str, codes: Tensor, bits: int, count: int) -> Tensor:
    """Unpack the first `count` rows of a matrix whose rows are spread over the numbers of `codes`, the first rows in
    the high bits: uint8 [count, columns]."""
    each, width = (10, 30) if bits == 3 else (1, bits) if bits in IN_BYTES else (8 // bits, 8)
    if codes.dtype != (torch.int32 if bits == 3 else torch.uint8) or codes.ndim != 2:
        raise bad(key, f"it is {dtype_name(codes.dtype)} {list(codes.shape)}, which no codes of {bits} bits are")
    if bits in IN_BYTES and bool((codes >> bits).any()):
        raise bad(key, f"it has codes of more than the {bits} bits that its config says")
    planes = [codes >> width - bits * (place + 1) & (1 << bits) - 1 for place in range(each)]
    return torch.cat(planes)[:count].to(torch.uint8)


_READERS: Mapping[str, Callable[[PrequantizedWeight, int, Size | None, Get], Unpacked]] = {
    GPTQ: _gptq, AWQ: _awq, COMPRESSED: _compressed, HQQ: _hqq, MXFP6: _hub_mxfp6.read_mxfp6,
    **dict.fromkeys((BYTES, NIBBLES, HIGH_FIRST, PAIRS), unpack),
}  # fmt: skip
