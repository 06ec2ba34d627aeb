"""Parts of quantized weights that are left over: the scale of a weight that is not one, codes without their scale.

Who takes such a file for an unquantized one loads codes as weights, or leaves out a scale, and draws noise.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..errors import BadFileError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..backends.base import TensorInfo

# Keys that only quantized weights have, by the weight's own name or by its module's.
_OF_WEIGHT = re.compile(
    r"(.*[^.])(?:\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)|_format"
    r"|\._(?:data|data\._data|scale|shift)|\.(?:array\.)?(?:qvalue|scale|zero_point)|_(?:qvalue|zero_point))"
)
_OF_MODULE = re.compile(r"(.*\.|)(?:SCB|scale_weight|weight_scale|weight_scale_inv)")


def refuse_strays(path: object, plain: Mapping[str, TensorInfo]) -> None:
    """Raise BadFileError for the first of the plain tensors (those of no weight that is known to be quantized) that
    should belong to a quantized weight."""
    for key in sorted(plain):
        weight = _weight_of(key)
        if weight is None:
            continue
        info = plain.get(weight)
        beside = f"{weight!r} is {info.dtype} {list(info.shape)}" if info is not None else f"there is no {weight!r}"
        raise BadFileError(
            f"{path} was to be loaded",
            f"it has {key!r}, which is part of a quantized weight, and the rest does not fit: {beside}",
            "Download the file again, or use one in a format that `sdquant matrix` lists",
        )


def _weight_of(key: str) -> str | None:
    """The weight that a key is a part of by its name alone; None for all others."""
    if match := _OF_WEIGHT.fullmatch(key):
        return match[1] if match[1].rpartition(".")[2] == "weight" else None
    match = _OF_MODULE.fullmatch(key)
    return f"{match[1]}weight" if match else None
