"""The one place that imports comfy-kitchen: products by its kernels, for `runtime="library"`.

The layers are sdquant's own, so the weights move, are saved and take LoRA as in plain ones; only a product is the
library's, with the activations quantized as ComfyUI does. Where the library has no kernel that is faster than a product
with the decoded weight (its NVFP4 and MXFP8 need NVIDIA's compute capability 10.0), the plain product is computed.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import FACTOR
from ..kernels import block_floats
from ._comfy_find import EXACT, LINEAR_DTYPE
from ._comfy_int4 import SIGNS

if TYPE_CHECKING:
    from ..core import Packed

log = logging.getLogger(__name__)

_BLACKWELL = (10, 0)
# Of a row and a column of the weights that the kernels for Blackwell take.
_MULTIPLE = {"comfy:nvfp4": 16, "mxfp8": 32}


@cache
def kitchen() -> Any:
    """Import `comfy_kitchen` and return the module."""
    import comfy_kitchen

    return comfy_kitchen


@cache
def is_installed() -> bool:
    """Return whether the library is here: layers may be there for Nunchaku's kernels alone."""
    return importlib.util.find_spec("comfy_kitchen") is not None


def linear(packed: Packed, x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Multiply x [..., in] by the transposed weight and add the bias, in x's dtype: [..., out] in x's dtype.

    Return None if the library has no kernel for such activations or on their device, or if the file says that they are
    not to be rounded for this layer.
    """
    multiply = _PRODUCTS.get(packed.spec.scheme.name)
    if multiply is None or not x.numel() or not is_installed() or packed.spec.details.get(EXACT):
        return None
    try:
        y = multiply(packed, x.reshape(-1, x.shape[-1]).contiguous(), bias)
    except kitchen().exceptions.BackendError as error:
        _say(packed.spec.scheme.name, str(x.device), str(error))
        return None
    return None if y is None else y.to(x.dtype).view(*x.shape[:-1], packed.spec.shape[0])


@cache
def _say(scheme: str, device: str, why: str) -> None:
    log.warning("comfy-kitchen does not multiply weights in %s on %s: %s. sdquant does.", scheme, device, why)


def _int8(packed: Packed, x: Tensor, bias: Tensor | None) -> Tensor:
    parts, rotation = packed.parts, packed.spec.rotation
    group = {"convrot": True, "convrot_groupsize": rotation} if rotation else {}
    y: Tensor = kitchen().int8_linear(x, parts["codes"], parts["scale"], bias, x.dtype, **group)
    return y


def _w4a8(packed: Packed, x: Tensor, bias: Tensor | None) -> Tensor | None:
    parts, rotation = packed.parts, packed.spec.rotation
    codebook = parts.get("codebook")
    if not rotation or (codebook is not None and codebook.ndim != 1):
        return None
    y: Tensor = kitchen().w4a8_int8_linear(
        x, parts["codes"].view(torch.int8), parts["s_rel"], parts["s_channel"].view(-1), codebook=codebook, bias=bias,
        group_size=packed.spec.details["group_size"], convrot_groupsize=rotation, out_dtype=x.dtype,
    )  # fmt: skip
    return y


def _w4a4(packed: Packed, x: Tensor, bias: Tensor | None) -> Tensor | None:
    codes, scale, rotation = packed.parts["codes"], packed.parts["scale"], packed.spec.rotation
    if not rotation:
        return None
    signed = (codes ^ SIGNS).view(torch.int8)
    y: Tensor = kitchen().convrot_w4a4_linear(
        x, signed, scale.view(-1), bias=bias, convrot_groupsize=rotation,
        linear_dtype=packed.spec.details.get(LINEAR_DTYPE, "int4"),
    )  # fmt: skip
    return y


def _svdquant(packed: Packed, x: Tensor, bias: Tensor | None) -> Tensor | None:
    parts, ck = packed.parts, kitchen()
    if "down" not in parts:
        return None
    down, up, smooth = (parts[name].to(x.dtype) for name in ("down", "up", "smooth"))
    codes, scales, narrow = ck.quantize_svdquant_w4a4(x, smooth=smooth, lora_down=down)
    y: Tensor = ck.scaled_mm_svdquant_w4a4(
        act=codes, wgt=(parts["codes"] ^ SIGNS).view(torch.int8), ascales=scales,
        wscales=parts["scale"].to(x.dtype).t().contiguous(), lora_act_in=narrow, lora_up=up, bias=bias,
    )  # fmt: skip
    return y[: len(x)]  # it fills rows up


def _awq(packed: Packed, x: Tensor, bias: Tensor | None) -> Tensor:
    codes, group = packed.parts["codes"], packed.spec.details["group_size"]
    scale, zero = (packed.parts[name].to(x.dtype).t().contiguous() for name in ("scale", "zero"))
    y: Tensor = kitchen().gemv_awq_w4a16(x, codes.view(torch.int8), scale, zero, bias=bias, group_size=group)
    return y


def _nvfp4(packed: Packed, x: Tensor, bias: Tensor | None) -> Tensor | None:
    if "columns" in packed.parts or not fast_on(x.device):
        return None
    codes, scale = packed.parts["codes"], packed.parts["scale"]
    one = kitchen().tensor.QuantizedTensor.from_float(x, "TensorCoreNVFP4Layout")
    of_x, factor, of_blocks = one.layout_cls.get_plain_tensors(one)
    return _padded(
        packed, x, bias,
        lambda bias: kitchen().scaled_mm_nvfp4(
            of_x, _filled(codes << 4 | codes >> 4, _MULTIPLE["comfy:nvfp4"]), factor,
            torch.full((), packed.spec.details[FACTOR], dtype=torch.float32, device=x.device), of_blocks,
            block_floats.tiled(scale).view(scale.dtype), bias=bias, out_dtype=x.dtype,
        ),
    )  # fmt: skip


def _mxfp8(packed: Packed, x: Tensor, bias: Tensor | None) -> Tensor | None:
    if not fast_on(x.device):
        return None
    codes, scale, many = packed.parts["codes"], packed.parts["scale"], _MULTIPLE["mxfp8"]
    of_x, of_blocks = kitchen().quantize_mxfp8(x, pad_32x=bool(len(x) % many or x.shape[1] % many))
    wide = F.pad(codes.view(torch.uint8), (0, -codes.shape[1] % many))
    return _padded(
        packed, x, bias,
        lambda bias: kitchen().scaled_mm_mxfp8(
            of_x, _filled(wide, many).view(codes.dtype), of_blocks, block_floats.tiled(scale).view(scale.dtype),
            bias=bias, out_dtype=x.dtype,
        ),
    )  # fmt: skip


def _padded(packed: Packed, x: Tensor, bias: Tensor | None, multiply: Callable[[Tensor | None], Tensor]) -> Tensor:
    """Return the results without the rows that activations and the weight are filled up with."""
    rows = packed.spec.shape[0]
    wide = bias if bias is None else F.pad(bias, (0, -rows % _MULTIPLE[packed.spec.scheme.name]))
    return multiply(wide)[: len(x), :rows]


def _filled(codes: Tensor, many: int) -> Tensor:
    """Return codes with rows of zeros added up to a multiple of `many`."""
    return F.pad(codes, (0, 0, 0, -len(codes) % many))


@cache
def fast_on(device: torch.device) -> bool:
    """Return whether a device multiplies blocks of small floats with their scales."""
    on_nvidia = device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available()
    return on_nvidia and torch.cuda.get_device_capability(device) >= _BLACKWELL


_PRODUCTS: Mapping[str, Callable[[Packed, Tensor, Tensor | None], Tensor | None]] = {
    **dict.fromkeys(("int8_convrot", "int8_row", "int8_tensor"), _int8),
    **dict.fromkeys(("w4a8", "w6a8"), _w4a8),
    "w4a4": _w4a4,
    "svdquant_w4a4": _svdquant,
    "awq_w4a16": _awq,
    "comfy:nvfp4": _nvfp4,
    "mxfp8": _mxfp8,
}
