"""MXFP4 as torchao and compressed-tensors store it, in the blocks of GGUF's `mxfp4`, which are the same numbers.

There codes are uint8 [out, in / 2], the even column in the low half of a byte, and scales bytes of E8M0 [out, in / 32],
as they are or in tiles. A block here is a scale and 16 bytes, with the first 16 columns in the low halves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core import PLAIN_ONLY, Packed, PackedSpec, dtype_name, registry
from ._blocked_scales import untiled
from ._bnb_codec import bad, require
from ._comfy_codec import dtype_of
from ._comfy_find import TILED

if TYPE_CHECKING:
    from ..core import PrequantizedWeight

_BLOCK, _HALF = 32, 16
_NAN = 255
_SCALES = ("float8_e8m0fnu", "uint8")


def read(weight: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
    """See `Backend.read`."""
    key, codes = require(weight, "blocks", get)
    if codes.dtype != torch.uint8 or codes.ndim != 2 or not codes.numel() or codes.shape[1] % _HALF:
        raise bad(key, f"it is {dtype_name(codes.dtype)} {list(codes.shape)}, not rows of whole blocks of 32 weights")
    rows, columns = len(codes), codes.shape[1] * 2
    if shape is not None and tuple(shape) != (rows, columns):
        raise bad(key, f"it has 4-bit codes of {[rows, columns]}, but the model needs {list(shape)}")
    key, scale = require(weight, "scale", get)
    grid = (rows, columns // _BLOCK)
    if dtype_name(scale.dtype) not in _SCALES:
        raise bad(key, f"scales must be exponents of one byte (E8M0), but these are {dtype_name(scale.dtype)}")
    if weight.details.get(TILED, False):
        scale = untiled(key, scale, grid)
    elif tuple(scale.shape) not in (grid, (grid[0] * grid[1], 1)):  # the latter ModelOpt's, compressed
        raise bad(key, f"its shape is {list(scale.shape)}, but {list(grid)} belongs to the weight")
    exponents = scale.contiguous().view(torch.uint8).reshape(-1, 1)
    if bool((exponents == _NAN).any()):
        raise bad(key, "a scale is not a number")
    by_block = codes.view(-1, _HALF)
    values = torch.stack((by_block & 15, by_block >> 4), dim=2).flatten(1)
    blocks = torch.cat((exponents, values[:, :_HALF] | values[:, _HALF:] << 4), dim=1)
    kind = registry.scheme(weight.scheme)
    details = {"type": kind.name} | ({PLAIN_ONLY: True} if weight.plain_only else {})
    spec = PackedSpec(scheme=kind, shape=(rows, columns), dtype=dtype_of(weight), details=details)
    return Packed(spec=spec, parts={"blocks": blocks})
