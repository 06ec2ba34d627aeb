"""Prepacking: the order of a packed weight's bytes in memory, that of its file or the one that kernels read fastest.

It is chosen once, when a layer is created, for the device that the layer will compute on. Offloaded weights keep that
order, so that nothing is converted when they move. Files always have their own order (`Backend.for_files`), and every
other device reads either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import Packed
from . import dispatch

if TYPE_CHECKING:
    from ..core import PackedLayout


def laid_out(packed: Packed, device: str, by_library: torch.dtype | None = None) -> Packed:
    """Return the weight of a linear layer or a convolution in the order for `device`; `packed` itself if it already is,
    or has no bytes (on the meta device).

    Args:
        by_library: the dtype of activations that the scheme's library multiplies; None for sdquant's kernels.
    """
    backend = packed.spec.scheme.codec
    if packed.device.type == "meta" or backend.is_for_kernels(packed):
        return packed
    form = backend.form(packed)
    if by_library is not None and backend.has_library_order(packed, by_library, device):
        return backend.for_kernels(packed)
    return packed if form is None or not wanted(form, device) else backend.for_kernels(packed)


def wanted(form: PackedLayout, device: str) -> bool:
    """Return whether the kernels of `device` ("cuda:0", "cpu") are faster with the fields of such a weight apart."""
    return any(reader.wants_apart(form) for reader in dispatch.readers(device.partition(":")[0]))


def is_apart(packed: Packed) -> bool:
    """Return whether a weight is prepacked, that is, not in the order of its file."""
    return packed.spec.scheme.codec.is_for_kernels(packed)


def as_filed(packed: Packed) -> Packed:
    """Return the weight in file order, unchanged if it is in that order. The conversion runs on the CPU, so that saving
    takes no GPU memory."""
    if not is_apart(packed):
        return packed
    here = packed if packed.device.type == "meta" else packed.to(torch.device("cpu"))
    return packed.spec.scheme.codec.for_files(here)


def file_shape(packed: Packed) -> Packed:
    """Return a weight that is not in file order in that order on the meta device; any other unchanged."""
    return as_filed(packed.to(torch.device("meta"))) if is_apart(packed) else packed


def bring_into_order(state: dict[str, Any], prefix: str, own: Packed) -> None:
    """Convert the parts of a weight in a state dict to the order of `own`, the weight that they will be loaded into.

    Args:
        prefix: of the parts' keys.

    A weight of another size than `own` is left to torch, which reports the mismatch.
    """
    backend = own.spec.scheme.codec
    tensors = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    if not all(isinstance(value, Tensor) for value in tensors.values()):
        return
    other = Packed(spec=own.spec, parts=tensors)
    if not tensors or set(tensors) == set(own.parts) or other.nbytes != own.nbytes:
        return
    for candidate in (backend.for_files(other), backend.for_kernels(other)):
        if set(candidate.parts) == set(own.parts):
            for name in tensors:
                del state[prefix + name]
            state.update({prefix + name: part for name, part in candidate.parts.items()})
            return
