"""torchao's tensors, in the folders that diffusers and transformers load where torchao (0.16 or later) is installed.

The format is that of torchao 0.18's `flatten_tensor_state_dict`; `backends._hub_torchao` describes and reads it. The
config only says that torchao is needed, and how many bits most weights have: what each is, the metadata says.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ..core import FACTOR
from .library_format import LibraryFormat, StoredWeight

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import Packed

_MX, _NV = 32, 16  # weights that share a scale
_PER_ROW = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}


def _int8(packed: Packed, dtype: str, bias: Tensor | None) -> StoredWeight:
    import torch

    scale, block = _scale(packed.parts["scale"], packed.spec.shape)
    parts = {"qdata": packed.parts["codes"], "scale": scale, "zero_point": torch.zeros_like(scale, dtype=torch.int8)}
    metadata = {"block_size": block, "dtype": _dtype(dtype), "act_quant_kwargs": None, "reduce_range": False}
    return _stored("Int8Tensor", parts, metadata)


def _fp8(packed: Packed, dtype: str, bias: Tensor | None) -> StoredWeight | None:
    import torch

    codes, scale = packed.parts["codes"], packed.parts.get("scale")
    if codes.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2) or (scale is not None and scale.itemsize == 1):
        return None
    if scale is None:
        scale = torch.ones((), dtype=torch.float32, device=codes.device)
    block = packed.spec.details.get("block")
    if block is None:
        scale, block = _scale(scale, packed.spec.shape)
    elif any(size % step for size, step in zip(codes.shape, block, strict=True)):
        return None
    metadata = {"block_size": list(block), "dtype": _dtype(dtype), "mm_config": None, "act_quant_kwargs": None}
    return _stored("Float8Tensor", {"qdata": codes, "scale": scale.float()}, metadata | _KERNELS)


def _mxfp8(packed: Packed, dtype: str, bias: Tensor | None) -> StoredWeight | None:
    if packed.spec.shape[1] % _MX:
        return None
    metadata = {"orig_dtype": _dtype(dtype), "act_quant_kwargs": _MX_ACTIVATIONS, "is_swizzled_scales": False}
    parts = {"qdata": packed.parts["codes"], "scale": packed.parts["scale"]}
    return _stored("MXTensor", parts, metadata | _MX_FLOATS)


def _nvfp4(packed: Packed, dtype: str, bias: Tensor | None) -> StoredWeight | None:
    import torch

    if packed.spec.shape[1] % _NV or "columns" in packed.parts:
        return None
    factor = torch.tensor(packed.spec.details[FACTOR], dtype=torch.float32, device="cpu")
    parts = {"qdata": packed.parts["codes"], "scale": packed.parts["scale"], "per_tensor_scale": factor}
    metadata = {"block_size": _NV, "orig_dtype": _dtype(dtype), "is_swizzled_scales": False, "use_triton_kernel": False}
    return _stored("NVFP4Tensor", parts, metadata | {"act_quant_kwargs": None})


def _scale(scale: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, list[int]]:
    """Return the scales of rows, or the one of all, as a matrix, and the rows and columns that share one."""
    rows, columns = shape
    each = 1 if scale.numel() == rows else rows
    return scale.reshape(rows // each, 1), [each, columns]


def _stored(kind: str, parts: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> StoredWeight:
    return StoredWeight(
        tensors={f"_weight_{part}": tensor.contiguous() for part, tensor in parts.items()},
        metadata={"_type": kind, "_data": metadata, "_tensor_data_names": list(parts)},
    )


def _dtype(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


_KERNELS = {"kernel_preference": {"_type": "KernelPreference", "_data": "AUTO"}}
_MX_FLOATS = {"elem_dtype": _dtype("float8_e4m3fn"), "block_size": _MX, **_KERNELS}
# torchao multiplies MXFP8 weights by activations that are MXFP8 themselves, on Blackwell.
_MX_ACTIVATIONS = {
    "_type": "QuantizeTensorToMXKwargs",
    "_data": _MX_FLOATS | {
        "scaling_mode": {"_type": "ScaleCalculationMode", "_data": "RCEIL"}, "is_swizzled_scales": True,
    },
}  # fmt: skip
_INT8 = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {"granularity": _PER_ROW}}
_FLOAT8 = {
    "_type": "Float8WeightOnlyConfig", "_version": 2,
    "_data": {"weight_dtype": _dtype("float8_e4m3fn"), "granularity": _PER_ROW},
}  # fmt: skip
_NVFP4 = {"_type": "NVFP4WeightOnlyConfig", "_version": 1, "_data": {"use_dynamic_per_tensor_scale": True}}
_MXFP8 = {"_type": "MXDynamicActivationMXWeightConfig", "_version": 1, "_data": {"block_size": _MX}}
_CONFIGS = {"Int8Tensor": _INT8, "Float8Tensor": _FLOAT8, "MXTensor": _MXFP8, "NVFP4Tensor": _NVFP4}


def _config(stored: Mapping[str, StoredWeight], floats: list[str]) -> dict[str, Any]:
    most = Counter(one.metadata["_type"] for one in stored.values()).most_common(1)[0][0]
    return {"quant_method": "torchao", "quant_type": {"default": _CONFIGS[most]}, "modules_to_not_convert": floats}


def _metadata(stored: Mapping[str, StoredWeight], floats: Collection[str]) -> dict[str, str]:
    rows = {name: json.dumps(one.metadata) for name, one in stored.items()}
    rows |= dict.fromkeys(floats, json.dumps({"_type": "Tensor"}))
    return {**rows, "tensor_names": json.dumps(list(rows))}


FORMAT = LibraryFormat(
    name="torchao",
    title="torchao",
    file=False,
    encoders=True,
    schemes={"int8_row": _int8, "int8_tensor": _int8, "fp8": _fp8, "mxfp8": _mxfp8, "comfy:nvfp4": _nvfp4},
    config=_config,
    metadata=_metadata,
)
