"""Checks on the metadata of 4-bit weights in a file. The file may come from anyone, so nothing in it is trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..core import COMPUTE_DTYPES, torch_dtypes
from ..utils import strict_json
from ..utils.buffers import dense
from ._bnb_codec import bad
from ._bnb_find import STATE

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ..core import PrequantizedWeight

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
MAX_DIMS = 8
LARGEST = torch.finfo(torch.float32).max
NESTED_BLOCK = 256  # fixed in bitsandbytes' quantize_4bit


def as_bytes(key: str, codes: Tensor) -> Tensor:
    """Return the codes as uint8 [bytes]."""
    # `bnb_4bit_quant_storage` lets a file hold the same bytes under another dtype.
    if codes.dtype not in (torch.uint8, *torch_dtypes.COMPUTE_DTYPES):
        raise bad(key, f"4-bit codes must be uint8, bfloat16, float16 or float32, but these are {codes.dtype}")
    return dense(codes.reshape(-1)).view(torch.uint8)


def claims(
    detected: PrequantizedWeight, shape: tuple[int, ...] | None, nested: bool, get: Callable[[str], Tensor]
) -> dict[str, Any]:
    """Parse the JSON of the quant_state tensor of a weight of `shape`, and check every value.

    Args:
        shape: of the float weight; None to accept the one in the tensor.
        nested: whether the scales are doubly quantized.
    """
    key = f"{detected.name}{STATE}{detected.scheme}"
    raw = get(key)
    if raw.dtype != torch.uint8 or raw.ndim != 1 or raw.numel() > 4096:
        raise bad(key, f"a quant_state must be a short 1-D uint8 tensor, but this is {raw.dtype} {list(raw.shape)}")
    try:
        claims = strict_json.parse(strict_json.text(bytes(raw.tolist())))
    except ValueError as error:
        raise bad(key, f"its JSON cannot be parsed ({error})") from error
    if not isinstance(claims, dict):
        raise bad(key, "its JSON is not an object")
    allowed: dict[str, tuple[Any, ...]] = {
        "quant_type": (detected.scheme,),
        "blocksize": BLOCKS,
        "dtype": COMPUTE_DTYPES,
    }
    if nested:
        allowed |= {"nested_blocksize": (NESTED_BLOCK,), "nested_dtype": ("float32",)}
    for field, values in allowed.items():
        value = claims.get(field)
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value not in values:
            raise bad(key, f"its {field} is {value!r}, but must be {' or '.join(map(str, values))}")
    file_shape = claims.get("shape")
    if not _is_shape(file_shape):
        raise bad(key, f"its shape is {file_shape!r}, but must be a list of positive integers")
    if shape is not None and file_shape != list(shape):
        raise bad(key, f"its shape is {file_shape!r}, but the model's weight has {list(shape)}")
    if nested is not ("nested_offset" in claims):
        raise bad(key, "it disagrees with the file's nested_absmax on whether the scales are doubly quantized")
    offset = claims.get("nested_offset", 0.0)
    if not isinstance(offset, float | int) or isinstance(offset, bool) or not abs(offset) < LARGEST:
        raise bad(key, f"its nested_offset is {offset!r:.40}, but must be a finite number")
    return claims


def _is_shape(value: Any) -> bool:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_DIMS:
        return False
    return all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in value)


def check_table(detected: PrequantizedWeight, suffix: str, ours: Tensor, get: Callable[[str], Tensor]) -> None:
    """Check that the file's code table is the one sdquant decodes with."""
    key = detected.name + suffix
    if key not in detected.extra:
        raise bad(detected.name, f"the file has no {key!r}")
    theirs = get(key)
    # Tables are computed at run time, so releases and platforms differ in the last bit.
    if theirs.shape != ours.shape or not torch.allclose(theirs.cpu().float(), ours, rtol=0, atol=1e-6):
        raise bad(key, f"it is not the code table of {detected.scheme}, so its codes would decode to other values")
