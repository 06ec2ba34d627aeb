"""Nunchaku's layers in the packed forms of comfy-kitchen's SVDQuant and AWQ, which are the same numbers.

What its files have in another order is put in that of the weight when it is read (`_nunchaku_order`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import FACTOR, Packed, PackedSpec, dtype_name, registry
from . import _nunchaku_order as order
from ._bnb_codec import bad, require, scales
from ._chunks import row_chunks
from ._comfy_codec import dtype_of
from ._comfy_int4 import SIGNS
from ._comfy_svdquant import SvdQuant
from ._nunchaku_find import GROUP_SIZE, HEIGHT, NVFP4, PICKS, ROWS, SPLITS, STACKED

if TYPE_CHECKING:
    from ..core import PrequantizedWeight

Get = Callable[[str], Tensor]
SHIFT = 0.171875  # that Nunchaku adds to the activations of a layer whose inputs a GELU makes: it is above -0.17
_AWQ_GROUP = 64
_NAN = 0x7F  # of E4M3, without its sign


def read(weight: PrequantizedWeight, shape: tuple[int, ...] | None, get: Get) -> Packed:
    """See `Backend.read`. Rows and columns that the weight was padded with are left out."""
    if weight.scheme == "awq_w4a16":
        return _awq(weight, shape, get)
    packed = _svdquant(weight, "", get)
    if "codes_2" in weight.keys:
        join = _stacked if weight.details.get(STACKED) else _side_by_side
        packed = join(packed, _svdquant(weight, "_2", get))
    shape = weight.shape if shape is None else tuple(shape)
    return packed if shape is None else _within(weight, packed, shape)


def bias(
    weights: Sequence[PrequantizedWeight], keys: Sequence[str | None], shifted: Sequence[bool], get: Get
) -> Tensor:
    """Return the bias of a layer, or the sum of those of layers side by side: [out], in float32 if it is computed.

    Nunchaku takes the product with the shift out of the bias of a layer with shifted activations (it comes back with
    them). Here they are not shifted, so it goes back into the bias. Modulation has 1 added to its scales there.

    Args:
        weights: of the layers, by `_nunchaku_find`. keys: of their biases, None for none. shifted: their activations.
    """
    parts = []
    for weight, key, is_shifted in zip(weights, keys, shifted, strict=True):
        if key is None:
            continue
        stored, splits = get(key), weight.details.get(SPLITS, 1)
        assert weight.shape is not None
        height = weight.details.get(HEIGHT, weight.shape[0])
        step = splits if weight.scheme == "awq_w4a16" else order.TILE
        if tuple(stored.shape) != (height,) or height % step or not stored.is_floating_point():
            raise bad(key, f"it is {dtype_name(stored.dtype)} {list(stored.shape)}, not the bias of its weight")
        rows = slice(*weight.details.get(ROWS, (None,)))
        if weight.scheme == "awq_w4a16":
            parts.append(_without_ones(order.without_interleaving(stored, splits), splits))
            continue
        value = _picked(weight, order.vector(stored[rows]))
        parts.append(value.float() + SHIFT * _row_sums(_svdquant(weight, "", get)) if is_shifted else value)
    return parts[0] if len(parts) == 1 else torch.stack([part.float() for part in parts]).sum(0)


def _picked(weight: PrequantizedWeight, values: Tensor) -> Tensor:
    """Return the rows of a weight that are picked of those of the file's."""
    picks = weight.details.get(PICKS)
    return values if picks is None else values[order.picked(picks, values.device)]


def unshifted_bias(weight: PrequantizedWeight, key: str, get: Get) -> Tensor:
    """Return the bias of comfy-kitchen's layer with shifted activations for those that are not: float32 [out]."""
    stored, packed = get(key), SvdQuant().read(weight, None, get)
    if tuple(stored.shape) != packed.spec.shape[:1] or not stored.is_floating_point():
        raise bad(key, f"it is {dtype_name(stored.dtype)} {list(stored.shape)}, not the bias of its weight")
    return stored.float() + SHIFT * _row_sums(packed)


def _without_ones(values: Tensor, splits: int) -> Tensor:
    """Subtract the 1 of the chunks that scale: the second, and of six the fifth."""
    if splits == 1:
        return values
    chunks = values.float().view(splits, -1).clone()
    for chunk in {1, splits - 2}:
        chunks[chunk] -= 1
    return chunks.view(-1)


def _row_sums(packed: Packed) -> Tensor:
    """Return the sums of the rows of what is in the codes of a weight: float32 [out]."""
    parts = packed.parts
    residual = {name: part for name, part in parts.items() if name not in ("smooth", "down", "up")}
    inverse, sums = parts["smooth"].float().reciprocal(), []
    for rows in row_chunks(parts["codes"], packed.spec.shape[1]):
        some = {name: part[rows] for name, part in residual.items()}
        spec = replace(packed.spec, shape=(len(some["codes"]), packed.spec.shape[1]))
        sums.append(spec.scheme.codec.decode(Packed(spec=spec, parts=some), torch.float32) @ inverse)
    return torch.cat(sums)


def _svdquant(weight: PrequantizedWeight, suffix: str, get: Get) -> Packed:
    """Read a layer with a low-rank branch. suffix: of its parts, "_2" for the second that lies beside another."""
    key, codes = require(weight, "codes" + suffix, get)
    is_float = weight.scheme == NVFP4
    height, width = codes.shape[0], codes.shape[-1] * 2
    if codes.dtype != torch.int8 or codes.ndim != 2 or not codes.numel() or height % order.TILE or width % order.TILE:
        raise bad(
            key, f"it is {dtype_name(codes.dtype)} {list(codes.shape)}, not int8 in tiles of {order.TILE} outputs"
        )
    group = 16 if is_float else 64
    rank = _rank(weight, suffix, get)
    sizes: dict[str, tuple[int, ...]] = {
        "scale": (width // group, height), "smooth": (width,), "down": (width, rank), "up": (height, rank),
    }  # fmt: skip
    sizes |= {"rows": (height,)} if "rows" + suffix in weight.keys else {}
    tensors = {part: _part(weight, part, suffix, size, get) for part, size in sizes.items()}
    first, last = weight.details.get(ROWS, (0, height))
    parts = {
        "codes": order.codes(codes[first:last]),
        "scale": _tiles(tensors["scale"], first, last, height),
        "smooth": order.vector(tensors["smooth"]),
        "down": order.down(tensors["down"]),
        "up": order.up(tensors["up"][first:last]),
    }
    parts["scale"] = order.small_scales(parts["scale"]) if is_float else order.scales(parts["scale"])
    details = {FACTOR: _factor(weight, suffix, get)} if is_float else {}
    if "rows" in tensors:
        parts["rows"] = order.vector(tensors["rows"][first:last])
    parts |= {part: _picked(weight, parts[part]) for part in ("codes", "scale", "up", "rows") if part in parts}
    if is_float and "rows" in parts:
        parts["rows"], unit = _near_one(parts["rows"])
        details[FACTOR] *= unit
        if bool((parts["rows"] == 1).all()):
            del parts["rows"]
    if not is_float:
        _refuse_factor(weight, suffix, get)
        parts["codes"] ^= SIGNS
        if "rows" in parts:
            parts["scale"] = parts["scale"].float() * parts.pop("rows").float().unsqueeze(1)
    if not bool((parts["smooth"] > 0).all()):
        raise bad(weight.keys["smooth" + suffix], "a factor for smoothing is not positive")
    return Packed(spec=_spec(weight, (len(parts["codes"]), width), details), parts=parts)


def _refuse_factor(weight: PrequantizedWeight, suffix: str, get: Get) -> None:
    """Raise BadFileError if a weight of integers has a factor for the whole: Nunchaku's kernels take 1 alone."""
    factor = _factor(weight, suffix, get)
    if factor != 1:
        raise bad(weight.keys["factor" + suffix], f"it is {factor}, but with 4-bit integers Nunchaku knows only 1")


def _near_one(rows: Tensor) -> tuple[Tensor, float]:
    """Return factors of rows divided by a power of two, which it leaves exact, and that power. They multiply products
    behind the sum, and are about 1e-4 in files: without them the sum is above the largest number of float16."""
    largest = float(rows.abs().max())
    unit = 2.0 ** math.floor(math.log2(largest)) if 0 < largest < math.inf else 1.0
    return (rows.float() / unit).to(rows.dtype), unit


def _part(weight: PrequantizedWeight, part: str, suffix: str, size: tuple[int, ...], get: Get) -> Tensor:
    key, tensor = require(weight, part + suffix, get)
    if tuple(tensor.shape) != size:
        raise bad(key, f"its shape is {list(tensor.shape)}, but {list(size)} belongs to the weight")
    if tensor.dtype != torch.float8_e4m3fn:
        scales(key, tensor)  # float, and finite
    elif bool((tensor.view(torch.uint8) & _NAN == _NAN).any()):
        raise bad(key, "a scale is not a number")
    return tensor


def _rank(weight: PrequantizedWeight, suffix: str, get: Get) -> int:
    key, tensor = require(weight, "down" + suffix, get)
    if tensor.ndim != 2 or not tensor.shape[1] or tensor.shape[1] % 16:
        raise bad(key, f"its shape is {list(tensor.shape)}, but ranks are multiples of 16")
    return tensor.shape[1]


def _factor(weight: PrequantizedWeight, suffix: str, get: Get) -> float:
    if "factor" + suffix not in weight.keys:
        return 1.0
    key, tensor = require(weight, "factor" + suffix, get)
    value = scales(key, tensor)
    if value.numel() != 1 or value.item() < 0:
        raise bad(key, f"it must be one positive number, but it is {list(value.shape)}")
    return float(value.item())


def _tiles(tensor: Tensor, first: int, last: int, height: int) -> Tensor:
    """Return the scales of some outputs, whole tiles: in memory they are tile by tile, whatever their shape says."""
    groups = tensor.shape[0]
    tiles = tensor.reshape(height // order.TILE, -1)[first // order.TILE : last // order.TILE]
    return tiles.reshape(groups, last - first)


def _side_by_side(one: Packed, other: Packed) -> Packed:
    """Return [W1 W2] of two weights of the same rows. The factors of the branches are blocks of those of the whole."""
    if one.spec.shape[0] != other.spec.shape[0]:
        raise ValueError(f"{one.spec.shape[0]} and {other.spec.shape[0]} rows do not lie side by side")
    if not _share_factors(one, other):
        one, other = _with_factors_in_scales(one), _with_factors_in_scales(other)
    both = {name: (one.parts[name], other.parts[name]) for name in one.parts}
    parts = {name: torch.cat(both[name], dim=1) for name in ("codes", "scale", "up")}
    parts |= {"smooth": torch.cat(both["smooth"]), "down": _diagonal(*both["down"])}
    parts |= {"rows": one.parts["rows"]} if "rows" in one.parts else {}
    shape = (one.spec.shape[0], one.spec.shape[1] + other.spec.shape[1])
    return Packed(spec=replace(one.spec, shape=shape), parts=parts)


def _diagonal(one: Tensor, other: Tensor) -> Tensor:
    """Return the matrix with these blocks and zeros beside them."""
    whole = one.new_zeros(len(one) + len(other), one.shape[1] + other.shape[1])
    whole[: len(one), : one.shape[1]], whole[len(one) :, one.shape[1] :] = one, other
    return whole


def _share_factors(one: Packed, other: Packed) -> bool:
    """Return whether what multiplies all scales, or those of a row, is the same in two weights."""
    if one.spec.details != other.spec.details or one.parts.keys() != other.parts.keys():
        return False
    return "rows" not in one.parts or torch.equal(one.parts["rows"], other.parts["rows"])


def _with_factors_in_scales(packed: Packed) -> Packed:
    """Return the weight with scales in float32, which have all factors in them without loss."""
    parts, details = dict(packed.parts), dict(packed.spec.details)
    scale, rows = parts["scale"].float() * details.get(FACTOR, 1.0), parts.pop("rows", None)
    parts["scale"] = scale if rows is None else scale * rows.float().unsqueeze(1)
    return Packed(spec=replace(packed.spec, details={name: 1.0 for name in details}), parts=parts)


def _stacked(one: Packed, other: Packed) -> Packed:
    """Return the weight with the rows of one, then of the other. Its inputs are smoothed as theirs are."""
    if not torch.equal(one.parts["smooth"], other.parts["smooth"]):
        raise ValueError("the two that are one layer in diffusers divide their inputs by different factors (smooth)")
    if one.spec.details != other.spec.details or one.parts.keys() != other.parts.keys():
        one, other = _with_factors_in_scales(one), _with_factors_in_scales(other)
    both = {name: (one.parts[name], other.parts[name]) for name in one.parts}
    parts: dict[str, Tensor] = {name: torch.cat(both[name]) for name in both if name in ("codes", "scale", "rows")}
    parts |= {"smooth": one.parts["smooth"], "down": torch.cat(both["down"], dim=1), "up": _diagonal(*both["up"])}
    shape = (one.spec.shape[0] + other.spec.shape[0], one.spec.shape[1])
    return Packed(spec=replace(one.spec, shape=shape), parts=parts)


def _within(weight: PrequantizedWeight, packed: Packed, shape: tuple[int, ...]) -> Packed:
    """Return the weight without what it was padded with: of a file, the next multiple of a tile."""
    stored, (rows, columns, *kernel) = packed.spec.shape, (*shape, 0, 0)[: max(2, len(shape))]
    if shape == stored:
        return packed
    step = math.gcd(stored[1] // packed.parts["scale"].shape[1], columns)  # of a last group that is cut, what divides
    padded = tuple(-(-size // order.TILE) * order.TILE for size in (rows, columns))
    is_padded = padded == stored or (PICKS in weight.details and (rows, padded[1]) == stored)
    if not is_padded or any(size != 1 for size in kernel) or ROWS in weight.details or "codes_2" in weight.keys:
        raise bad(weight.keys["codes"], f"it has 4-bit codes of {list(stored)}, but the model needs {list(shape)}")
    whole = {**packed.parts}
    whole["scale"] = whole["scale"].repeat_interleave(stored[1] // step // whole["scale"].shape[1], 1)
    sizes = {
        "codes": (rows, columns // 2), "scale": (rows, columns // step), "smooth": (columns,),
        "down": (columns, whole["down"].shape[1]), "up": (rows, whole["up"].shape[1]), "rows": (rows,),
    }  # fmt: skip
    parts = {name: part[tuple(slice(size) for size in sizes[name])].contiguous() for name, part in whole.items()}
    return Packed(spec=replace(packed.spec, shape=shape), parts=parts)


def _awq(weight: PrequantizedWeight, shape: tuple[int, ...] | None, get: Get) -> Packed:
    key, codes = require(weight, "codes", get)
    group: Any = weight.details.get(GROUP_SIZE, _AWQ_GROUP)
    if codes.dtype not in (torch.int16, torch.int32) or codes.ndim != 2 or not codes.numel():
        raise bad(key, f"it is {dtype_name(codes.dtype)} {list(codes.shape)}, not a matrix of 16-bit words")
    rows, columns = codes.shape[0] * 4, codes.shape[1] * codes.dtype.itemsize // 2
    shape = (rows, columns) if shape is None else tuple(shape)
    if shape != (rows, columns) or columns % group or columns % _AWQ_GROUP:
        raise bad(key, f"it has 4-bit codes of {[rows, columns]}, but the model needs {list(shape)}")
    splits = weight.details.get(SPLITS, 1)
    if rows % splits:
        raise bad(key, f"its {rows} rows are not {splits} chunks")
    each = {}
    for part in ("scale", "zero"):
        at, tensor = require(weight, part, get)
        scales(at, tensor)  # float, and finite
        if tensor.ndim != 2 or tensor.shape[1] != rows or tensor.shape[0] < columns // group:
            raise bad(at, f"its shape is {list(tensor.shape)}, but [{columns // group}, {rows}] belongs to the weight")
        # The number of groups is rounded up in files.
        each[part] = order.without_interleaving(tensor[: columns // group].T, splits).contiguous()
    zero = each["zero"].float() + 8 * each["scale"].float()  # comfy-kitchen's codes have 8 taken off
    narrow = zero.to(each["scale"].dtype)
    return Packed(
        spec=_spec(weight, shape, {GROUP_SIZE: group}),
        parts={
            "codes": order.without_interleaving(order.awq_codes(codes), splits).contiguous(),
            "scale": each["scale"],
            "zero": narrow if torch.equal(narrow.float(), zero) else zero,
        },
    )


def _spec(weight: PrequantizedWeight, shape: tuple[int, ...], details: dict[str, Any]) -> PackedSpec:
    return PackedSpec(scheme=registry.scheme(weight.scheme), shape=shape, dtype=dtype_of(weight), details=details)
