"""Quantize one weight of a model; refuse values that would end as a broken image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .. import backends
from ..core import BIAS, Unfit, name_patterns, packed_rows, torch_dtypes
from ..errors import BackendUnavailableError, BadFileError
from ..utils.signals import is_interrupt
from ..utils.tensors import is_finite

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import Packed, QuantSpec

_WEIGHTS_AT_ONCE = 1 << 21


def encode(name: str, weight: Tensor, spec: QuantSpec) -> Packed:
    """Quantize `weight`.

    Args:
        name: of the weight, for the error.

    Raises:
        BadFileError: it has values that are NaN, infinite, or too large for the scheme's scales. A codec takes the
            largest value of each block, so that one such value shows in a scale, or refuses the weight.
        BackendUnavailableError: the scheme's library is there, but does not fit another package.
    """
    try:
        packed = backends.encode(weight, spec.of(name, tuple(weight.shape)))
    except ImportError as error:
        if is_interrupt(error):
            raise  # the library is not at fault
        raise BackendUnavailableError(
            f"Cannot quantize to {spec}",
            f"its library cannot be imported beside the packages that are installed here: {error}",
            "Choose a scheme of another library, or update the package that the message names",
        ) from error
    except Unfit as error:
        if is_finite(weight):
            raise
        raise _not_finite(name, spec) from error
    for part in packed.parts.values():
        is_scale = part.is_floating_point() and part.numel() < weight.numel()  # codes may be floats, too
        if is_scale or part.dtype in torch_dtypes.COMPUTE_DTYPES:
            require_finite(name, part, spec)
    return packed


def bias_change(name: str, weight: Tensor, packed: Packed, spec: QuantSpec) -> Tensor | None:
    """Return what to add to the bias of a layer so that the errors of its weight leave the mean output as it is:
    (W - W') E[x], float32 [out] (arXiv 1906.04721). None without the option `bias`, or where no input was measured.

    Args:
        name: as for `encode`. packed: what that returned for `weight` and `spec`.
    """
    one = spec.of(name, tuple(weight.shape))
    if BIAS not in one.scheme.options or not one[BIAS]:
        return None
    mean = one.mean_input(weight[0].numel())
    if mean is None:
        return None
    mean, change = mean.to(weight.device), mean.new_empty(len(weight), device=weight.device)
    for start, values in packed_rows.decode_rows(packed, _WEIGHTS_AT_ONCE):
        rows = slice(start, start + len(values))
        change[rows] = (weight[rows].detach().flatten(1).to(mean.dtype) - values) @ mean
    return change


def require_finite(name: str, scales: Tensor, spec: QuantSpec) -> None:
    """Raise BadFileError if a scale of weight `name` is NaN or infinite; see `encode`."""
    if not is_finite(scales):
        raise _not_finite(name, spec)


def _not_finite(name: str, spec: QuantSpec) -> BadFileError:
    return BadFileError(
        f"Cannot quantize weight {name!r} to {spec}",
        "it has values that are NaN, infinite, or too large for the scheme's scales",
        f"Get the model from its source again, or leave the layer unquantized: skip={name.rpartition('.')[0]!r}",
    )


def refuse_not_finite(
    name: str, tensor: Tensor, spec: QuantSpec, skip: tuple[str, ...], keys: Mapping[str, str] | None = None
) -> None:
    """Raise BadFileError if an unquantized tensor of a model quantized to `spec` has a NaN or infinite value: one in a
    norm breaks an image as one in a weight does. Skipped layers are not checked."""
    if tensor.is_floating_point() and not name_patterns.skipped(name, skip, keys) and not is_finite(tensor):
        raise BadFileError(
            f"Cannot use {name!r} in a model quantized to {spec}",
            "it has values that are NaN or infinite",
            f"Get the model from its source again, or load the tensor unchecked: skip={name.rpartition('.')[0]!r}",
        )
