"""Quantize a weight by SDNQ's own function. The one file that imports sdnq."""

from __future__ import annotations

import functools
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ..utils.process_state import errors_only
from ..utils.tensors import put_parameter
from ._sdnq_codes import OF_DTYPE, code_named
from ._sdnq_storage import CODE, OTHER, PARTS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

SEED = 0  # of the random start of SDNQ's SVD, for weights that are the same every time


def encode_dynamic(weight: Tensor, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Quantize with the first dtype, from that of the settings on, whose error SDNQ accepts. Return the scheme, the
    details and the parts."""
    parts, dtype = encode(weight, {**settings, "use_dynamic_quantization": True})
    if dtype is None:  # not even 16 bits are enough: values that are not finite, which the scales show
        parts, dtype = encode(weight, {**settings, "weights_dtype": "float16"})
    code = code_named(str(dtype))
    assert code is not None, dtype
    scheme = OF_DTYPE.get(code.sdnq, OTHER)
    return scheme, {CODE: code.sdnq} if scheme == OTHER else {}, parts


def encode(weight: Tensor, settings: Mapping[str, Any]) -> tuple[dict[str, Tensor], str | None]:
    """Return the parts that SDNQ makes of a weight, and its dtype; none if it leaves the weight as it is."""
    sdnq = import_sdnq()
    with _seeded(weight) if settings["use_svd"] else nullcontext():
        layer, _ = sdnq.sdnq_quantize_layer(
            _layer(weight), sdnq.SDNQConfig(**settings), torch_dtype=weight.dtype, param_name="weight"
        )
    if not hasattr(layer, "sdnq_dequantizer"):
        return {}, None
    parts = {name: getattr(layer, name, None) for name in PARTS}
    made = {name: part.data.contiguous() for name, part in parts.items() if part is not None}
    return made, layer.sdnq_dequantizer.weights_dtype


def _seeded(weight: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which SDNQ's SVD draws random numbers that start at `SEED`, on the weight's device."""
    from ._private_random import PrivateRandom

    return PrivateRandom(SEED, weight.device)


def _layer(weight: Tensor) -> nn.Module:
    """Return a layer with this weight, not copied, for SDNQ to quantize."""
    from torch import nn

    out, channels, *kernel = weight.shape
    if kernel:
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(kernel) - 1]
        layer: Any = conv(channels, out, tuple(kernel), bias=False, device="meta")  # type: ignore[arg-type]
    else:
        layer = nn.Linear(channels, out, bias=False, device="meta")
    # SDNQ assigns what it makes to the layer, and reads it from there.
    layer.__dict__["register_parameter"] = functools.partial(put_parameter, layer)
    put_parameter(layer, "weight", nn.Parameter(weight.detach(), requires_grad=False))
    module: nn.Module = layer
    return module


def import_sdnq() -> Any:
    """Import sdnq and return the module. Its test compilation and messages at import are suppressed.

    To use SDNQ's compiled kernels in the same process, import sdnq first or set SDNQ_USE_TORCH_COMPILE.
    """
    import sys

    if "sdnq" in sys.modules:
        import sdnq  # which waits until another thread has imported it

        return sdnq
    switch = "SDNQ_USE_TORCH_COMPILE"
    unset = switch not in os.environ
    with errors_only(os.environ.get("SDNQ_LOGGER_NAME", "sdnq"), "bitsandbytes"):
        os.environ.setdefault(switch, "0")
        try:
            import sdnq
        finally:
            if unset:
                os.environ.pop(switch, None)  # another thread may have done so
    return sdnq
