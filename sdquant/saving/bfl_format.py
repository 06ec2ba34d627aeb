"""Black Forest Labs' float8 and NVFP4, which diffusers reads from single files, and from no folder:

`Model.from_single_file(file, config=folder, quantization_config=BFLQuantizationConfig())`. Its classes are diffusers
0.42's; `backends._nvfp4_find` describes the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ..core import FACTOR
from .library_format import LibraryFormat, StoredWeight

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import Packed

_BLOCK = 16


def _fp8r(packed: Packed, dtype: str, bias: Tensor | None) -> StoredWeight | None:
    import torch

    codes, scale, rows = packed.parts["codes"], packed.parts.get("scale"), packed.spec.shape[0]
    if codes.dtype != torch.float8_e4m3fn or "block" in packed.spec.details:
        return None
    scale = codes.new_ones((), dtype=torch.float32) if scale is None else scale
    if scale.itemsize == 1:
        return None
    return StoredWeight(tensors={"weight": codes, "weight_scale": scale.float().reshape(-1).expand(rows).contiguous()})


def _nvfp4(packed: Packed, dtype: str, bias: Tensor | None) -> StoredWeight | None:
    import torch

    if packed.spec.shape[1] % _BLOCK or "columns" in packed.parts:
        return None
    return StoredWeight(
        tensors={
            "weight": packed.parts["codes"],
            "weight_scale": packed.parts["scale"],
            "weight_scale_2": torch.tensor(packed.spec.details[FACTOR], dtype=torch.float32, device="cpu"),
            # Of activations, which Blackwell quantizes: without calibration one that up to 448 * 6 fits.
            "input_scale": torch.ones((), dtype=torch.float32, device="cpu"),
        }
    )


def _config(stored: Mapping[str, StoredWeight], floats: list[str]) -> dict[str, Any]:
    return {}


def _metadata(stored: Mapping[str, StoredWeight], floats: Collection[str]) -> dict[str, str]:
    return {"quantization_config": json.dumps({"quant_method": "bfl"})}


FORMAT = LibraryFormat(
    name="bfl",
    title="Black Forest Labs' files",
    file=True,
    encoders=False,
    schemes={"fp8": _fp8r, "comfy:nvfp4": _nvfp4},
    config=_config,
    metadata=_metadata,
)
