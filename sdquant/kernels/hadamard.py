"""Rotation of activations for weights that are rotated; the matrices are those of `core.hadamard`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import hadamard, torch_dtypes
from ..utils.autocast import is_autocast_on
from .cpu import rotation as cpu_rotation
from .dispatch_guard import plain, seen
from .triton import imports

_ALONE = 16  # a matrix of up to this size is multiplied whole


def rotate(x: Tensor, group: int) -> Tensor:
    """Rotate each run of `group` columns of x [..., columns]; computed in float32, the result is in x's dtype.

    Raises:
        ValueError: there is no such rotation, or the columns are not whole groups.
    """
    if not hadamard.is_group(group) or x.shape[-1] % group:
        raise ValueError(f"rows of {x.shape[-1]} values cannot be rotated in groups of {group}")
    kind = x.device.type
    if is_autocast_on(kind):
        with torch.autocast(kind, enabled=False):
            return rotate(x, group)
    is_recorded = x.requires_grad and torch.is_grad_enabled()
    if x.is_cpu and hadamard.is_regular(group) and plain(x) and not seen(x) and not is_recorded:
        rotated_x = cpu_rotation.rotate_rows(x, group)
        if rotated_x is not None:
            return rotated_x
    if kind in ("cuda", "xpu") and x.dtype in torch_dtypes.COMPUTE_DTYPES and plain(x) and not seen(x):
        kernels = None if is_recorded else imports.rotation(x.device, group)
        if kernels is not None:
            by_triton: Tensor = kernels.rotate_columns(x, group)
            return by_triton
    if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16) and hadamard.is_regular(group):
        return hadamard.rotate_by_matrix(x, group)  # the entries are exact, and sums are in float32
    # A Kronecker product of two matrices A and B times a vector is A X B, with the vector as the matrix X: for 256
    # columns two products with a matrix of 16 x 16.
    left = 1 << (group.bit_length() - 1) // 4 * 2 if group > _ALONE and hadamard.is_regular(group) else 1
    values = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32).reshape(-1, left, group // left)
    values = values @ hadamard.matrix(group // left, values.dtype, x.device)
    if left > 1:
        values = hadamard.matrix(left, values.dtype, x.device) @ values
    return values.reshape(x.shape).to(x.dtype)
