"""The one place that imports diffusers' layers for Nunchaku's kernels: products by them, for `runtime="library"`.

Importing them downloads the kernels and runs their code, so it is done only where the user asked for it and everything
that they need is here (`_nunchaku_kernels`). The layers stay sdquant's own, and lend their tensors, which are in the
kernels' order (`_nunchaku_tiles`). Nobody has run this on a card: tests put a stand-in in the place of the kernels.
"""

from __future__ import annotations

import contextlib
import importlib
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import FACTOR
from ..errors import BackendUnavailableError
from ._nunchaku_find import NVFP4
from ._nunchaku_kernels import PACKAGES, REPOSITORY, SCHEMES, Lack, lack, trusts_remote_kernels
from ._nunchaku_pack import pack_vector
from ._nunchaku_tiles import AWQ

if TYPE_CHECKING:
    from ..core import Packed

_FLOATS = (torch.float16, torch.bfloat16)


def lack_on(scheme: str, device: torch.device) -> Lack | None:
    """Return what keeps the kernels from multiplying weights in a scheme on `device`; None if nothing does."""
    if not is_nvidia(device):
        return lack(scheme, "other", None, {}, False)
    return lack(scheme, "cuda", capability_of(device), _versions(), trusts_remote_kernels())


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a card."""
    return torch.cuda.get_device_capability(device)


def is_nvidia(device: torch.device) -> bool:
    """Return whether a device is a card of NVIDIA's."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available()


def _versions() -> dict[str, str]:
    versions = {}
    for row in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[row.package] = metadata.version(row.package)
    return versions


@cache
def layers() -> Any:
    """Import diffusers' module of such layers, which downloads the kernels where they are not yet in the hub's cache.

    Raises:
        BackendUnavailableError: it fails.
    """
    try:
        return importlib.import_module("diffusers.quantizers.nunchaku.utils")
    except Exception as error:
        raise BackendUnavailableError(
            "Cannot load Nunchaku's kernels",
            f"diffusers' layers for them say: {error}",
            f"Check that the hub can be reached and that {REPOSITORY} has a build for this torch and system, or use "
            'runtime="plain"',
        ) from error


def linear(packed: Packed, x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Multiply x [..., in] by the transposed weight, whose parts are tiled, and add the bias: [..., out] in x's dtype.

    Return None for activations that the kernels do not take, or that are on another device.
    """
    if x.dtype not in _FLOATS or not x.numel() or not is_nvidia(x.device):
        return None
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        y: Tensor = _layer(packed, x.dtype, bias).forward(rows)
    return y.view(*x.shape[:-1], packed.spec.shape[0])


def _layer(packed: Packed, dtype: torch.dtype, bias: Tensor | None) -> Any:
    """Return a layer of diffusers' with these tensors. It has no parameters, and is for one call."""
    rows, columns = packed.spec.shape
    parts = {name: _cast(part, dtype) for name, part in packed.parts.items()}
    fields: dict[str, Any] = {"in_features": columns, "out_features": rows, "torch_dtype": dtype, **parts}
    if packed.spec.scheme.name == AWQ:
        fields["bias"] = bias if bias is None else bias.detach().to(dtype)
        return _of_class("AWQW4A16Linear", fields)
    is_nvfp4 = packed.spec.scheme.name == NVFP4
    fields |= {
        "precision": "nvfp4" if is_nvfp4 else "int4",
        "rank": parts["proj_up"].shape[1],
        "act_unsigned": False,  # what Nunchaku shifts is shifted back when its files are read
        "bias": bias if bias is None else pack_vector(bias.detach().to(dtype)),
        "wtscale": _filled(1, packed.spec.details[FACTOR], dtype, packed.device) if is_nvfp4 else None,
    }
    if "wcscales" not in fields:
        fields["wcscales"] = _filled(rows, 1.0, dtype, packed.device) if is_nvfp4 else None
    return _of_class("SVDQW4A4Linear", fields)


def _of_class(name: str, fields: dict[str, Any]) -> Any:
    kind = getattr(layers(), name)
    layer = kind.__new__(kind)
    layer.__dict__.update(fields)
    return layer


def _cast(part: Tensor, dtype: torch.dtype) -> Tensor:
    is_float = part.is_floating_point() and part.dtype.itemsize > 1
    return part.to(dtype) if is_float else part


@cache
def _filled(size: int, value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a vector of one number, which every layer of its size shares."""
    return torch.full((size,), value, dtype=dtype, device=device)


def import_layers(scheme: str, device: str) -> None:
    """Import the layers, if products with weights in a scheme on a device are to be theirs; see `layers`."""
    if is_ready(scheme, device):
        layers()


def is_ready(scheme: str, device: str) -> bool:
    """Return whether products with weights in a scheme on a device are by Nunchaku's kernels."""
    return scheme in SCHEMES and lack_on(scheme, torch.device(device)) is None
