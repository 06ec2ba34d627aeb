"""The one place that imports the files of this package that import triton."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ...core import PackedLayout
    from ..base import Parts, Prepared

_log = logging.getLogger(__name__)


@cache
def launcher() -> ModuleType | None:
    """Return the module `launch`, or None if Triton is missing or broken; the reason is logged at debug level."""
    try:
        from . import launch
    except (
        Exception
    ) as error:  # a broken Triton raises what it likes: OSError of a library, AttributeError of a version
        _log.debug("Cannot import the Triton kernels: %s: %s", type(error).__name__, error)
        return None
    return launch


@cache
def binder() -> Callable[..., Prepared] | None:
    """Return `bound_eight.bind`; None without Triton, or in its interpreter, which compiles nothing."""
    kernels = launcher()
    if kernels is None or kernels.INTERPRETED:
        return None
    from .bound_eight import bind

    return bind


@cache
def convolution_binder() -> Callable[..., Callable[..., Tensor | None]] | None:
    """Return `bound_linear.BoundConvolution`; None as for `binder`."""
    if binder() is None:
        return None
    from .bound_linear import BoundConvolution

    return BoundConvolution


@cache
def decoder() -> Callable[[PackedLayout, Parts, Tensor], None] | None:
    """Return `bound_decode.decode_into`; None as for `binder`."""
    if binder() is None:
        return None
    from .bound_decode import decode_into

    return decode_into


@cache
def branch(device: torch.device) -> ModuleType | None:
    """Return the module `branch`; None if its kernel does not run on `device` or gives wrong results there."""
    return _checked(device, "weights with a low-rank branch", "sound_branch", name="branch")


@cache
def branch_sides(device: torch.device) -> ModuleType | None:
    """Return the module `branch_sides`; None if its kernels or that of `branch` do not run on `device` or are wrong."""
    if branch(device) is None or eight(device) is None:
        return None
    return _checked(device, "the sides of low-rank branches", "sound_sides", name="branch_sides")


@cache
def branch_binder() -> Callable[..., Prepared | None] | None:
    """Return `bound_branch.bind_with_branch`; None as for `binder`."""
    if binder() is None:
        return None
    from .bound_branch import bind_with_branch

    return bind_with_branch


@cache
def eight(device: torch.device) -> ModuleType | None:
    """Return the module `int8_gemm`; None if its kernels do not run on `device` or give wrong results there.

    That is about codes of activations and weights, and about scaling; see `products`.
    """
    return _checked(device, "8-bit codes", "sound")


@cache
def products(device: torch.device) -> ModuleType | None:
    """Return the module `int8_gemm`; None if its products are slow on `device`, do not run there or are wrong."""
    from .tensor_cores import has_tensor_cores

    module = eight(device)
    if module is None or not has_tensor_cores(device):
        return None
    return _checked(device, "products of 8-bit codes", "sound_products")


@cache
def scheme_kernels(device: torch.device) -> ModuleType | None:
    """Return the module `scheme_gemm`; None as for `products`."""
    if products(device) is None:
        return None
    from . import scheme_gemm

    return scheme_gemm


@cache
def scaling(device: torch.device) -> ModuleType | None:
    """Return the module `scheme_scaling`; None if its kernel does not run on `device` or gives wrong results there."""
    return _checked(device, "scales of products", "sound_scaling", name="scheme_scaling")


@cache
def gathering(device: torch.device) -> ModuleType | None:
    """Return the module `gathering`; None if its kernel does not run on `device` or gives wrong results there."""
    return _checked(device, "inputs in another order", "sound_gathering", name="gathering")


@cache
def scheme_binder() -> Callable[..., Prepared] | None:
    """Return `bound_scheme.BoundScheme`; None as for `binder`."""
    if binder() is None:
        return None
    from .bound_scheme import BoundScheme

    return BoundScheme


@cache
def floats_binder() -> Callable[..., Prepared] | None:
    """Return `bound_floats.BoundFloats`; None as for `binder`."""
    if binder() is None:
        return None
    from .bound_floats import BoundFloats

    return BoundFloats


@cache
def rotation(device: torch.device, group: int) -> ModuleType | None:
    """Return the module `rotation`; None if its kernels do not run on `device` or rotate `group` columns wrongly."""
    if eight(device) is None or _checked(device, f"rotations of {group} columns", "sound_rotation", group) is None:
        return None
    from . import rotation as module

    return module


@cache
def expansion(device: torch.device) -> ModuleType | None:
    """Return the module `expansion`; None if its kernel does not run on `device` or gives wrong results there."""
    return _checked(device, "integers of few bits", "sound_expansion", name="expansion")


@cache
def expansion_binder() -> ModuleType | None:
    """Return the module `bound_expansion`; None as for `binder`."""
    if binder() is None:
        return None
    from . import bound_expansion

    return bound_expansion


def _checked(device: torch.device, what: str, check: str, *of: object, name: str = "int8_gemm") -> ModuleType | None:
    kernels = launcher()
    if kernels is None or not kernels.works_on(device):
        return None
    why = "their results are wrong"
    try:
        module = import_module(f"{__package__}.{name}")
        if getattr(module, check)(device, *of):
            return module
    except Exception as error:  # whatever it is: the kernels do not work here, and torch does
        why = f"{type(error).__name__}: {error}"
    _log.warning(
        "The Triton kernels for %s are not used on %s: %s. Using torch instead, which is slower.", what, device, why
    )
    return None
