"""A layout decoded in numpy, word for word as `sdquant.core.packed_layout` says: what fast ones are held to."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from sdquant.backends._sdnq_codes import CODES
from sdquant.core import code_tables as tables
from sdquant.core.packed_layout import BYTES, PACKED

if TYPE_CHECKING:
    from sdquant.core.backend import Backend, Packed
    from sdquant.core.packed_layout import PackedLayout
    from sdquant.kernels.base import Reader

CPU = torch.device("cpu")
TABLES = {
    "nf4": tables.fourbit_code("nf4", CPU).numpy(),
    "fp4": tables.fourbit_code("fp4", CPU).numpy(),
    "e4m3": tables.e4m3_code(CPU).numpy(),
    "e2m1": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32),
    "dynamic": tables.dynamic_code(CPU).numpy(),
}
EIGHTS = {"twos": 2, "threes": 3, "fives": 5, "sixes": 6, "sevens": 7}
_SDNQ = {"sdnq6": "sdnq-int6", "sdnq3": "sdnq-uint3"}


@np.errstate(over="ignore", invalid="ignore")  # the largest exponents, and the one that is no number
def decoded(form: PackedLayout, parts: dict[str, torch.Tensor]) -> np.ndarray:
    """The weight, float32 [rows, columns], before the last rounding to the dtype that is wanted."""
    each = np.arange(form.rows * form.columns)
    groups = each // form.group * form.taps + each % form.taps
    values = codes(form, parts[form.codes]).astype(np.float32)
    if form.table:
        values = rounded(TABLES[form.table][values.astype(np.int64)], form.arithmetic)
    if isinstance(form.zero, str):
        zeros = unpacked(parts[form.zero].reshape(-1), form.zero_packing).astype(np.float32)
        values = values - zeros[groups]
    elif form.zero:
        values = values - np.float32(form.zero)
    if form.fused:
        values = values.astype(np.float64)  # exact products, so that the sum is what is rounded
    is_float8 = bool(form.scale) and not form.nested and parts[form.scale].element_size() == 1
    if form.scale:
        of_groups = scales(form, parts) * np.float32(form.factor) if is_float8 else scales(form, parts)
        values = values * of_groups[groups]
        values = values if form.fused else rounded(values, form.arithmetic)
    if form.factor != 1.0 and not is_float8:
        values = values * np.float32(form.factor)
    if form.shift:
        shift = parts[form.shift].reshape(-1).float().numpy()[groups]
        values = rounded((values + shift if form.added else values - shift).astype(np.float32), form.arithmetic)
    return values.reshape(form.rows, form.columns)


def multiplied(reader: Reader, backend: Backend, packed: Packed, dtype: torch.dtype) -> torch.Tensor:
    """The weight that a reader's products with activations of `dtype` have, [rows, columns]: what the backend decodes,
    or float32 where nothing is rounded."""
    form = backend.form(packed)
    assert form is not None
    if reader.unrounded(form, packed.parts, dtype):
        if form.packing not in (*BYTES, *PACKED):  # blocks, which are computed in float32
            return backend.decode(packed, torch.float32).view(form.rows, form.columns)
        return torch.from_numpy(decoded(replace(form, arithmetic="float32"), dict(packed.parts)))
    return backend.decode(packed, dtype).view(form.rows, form.columns)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy()


def scales(form: PackedLayout, parts: dict[str, torch.Tensor]) -> np.ndarray:
    found = parts[form.scale].reshape(-1)
    if not form.nested:
        return found.float().numpy()
    outer = np.repeat(parts[form.nested].numpy(), 256)[: len(found)]
    return TABLES["dynamic"][found.numpy()] * outer + np.float32(form.offset)


def codes(form: PackedLayout, part: torch.Tensor) -> np.ndarray:
    """One number for each weight, flat."""
    count = form.rows * form.columns
    if form.packing.startswith("planes"):
        bits = int(form.packing[-1])
        held = part.reshape(-1, form.group).numpy()
        planes = [(held >> (bits * plane)) & (2**bits - 1) for plane in range(8 // bits)]
        return np.concatenate(planes)[: count // form.group].reshape(-1)
    return unpacked(part.reshape(-1), form.packing)[:count]


def unpacked(part: torch.Tensor, packing: str) -> np.ndarray:
    if packing.startswith("float8"):
        return part.float().numpy()
    flat = part.numpy()
    if packing in ("int8", "uint8"):
        return flat
    low, high = flat & 15, flat >> 4
    if packing == "nibbles-low":
        return np.stack([low, high], 1).reshape(-1)
    if packing == "nibbles-high":
        return np.stack([high, low], 1).reshape(-1)
    if packing in EIGHTS:
        bits = EIGHTS[packing]
        number = sum(byte.astype(np.int64) << 8 * k for k, byte in enumerate(flat.reshape(-1, bits).T))
        return np.stack([(number >> (bits * k)) & (2**bits - 1) for k in range(8)], 1).reshape(-1)
    units = flat.reshape(-1, 3).astype(np.int64)
    fields = CODES[_SDNQ[packing]].fields
    made = [sum((units[:, byte] >> shift) & mask for byte, shift, mask in places) for places in fields]
    return np.stack(made, 1).reshape(-1)
