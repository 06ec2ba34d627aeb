"""What prepared products ask of a layer's parameters before they use them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ..utils.autocast import is_autocast_on

if TYPE_CHECKING:
    from torch import Tensor


def usable_parts(x: Tensor, own: Mapping[str, Tensor | None], names: Mapping[str, str]) -> dict[str, Tensor] | None:
    """Return the packed weight's parts by their keys in `names`, whose values are those among a layer's parameters.

    Return None where the product of x must take another way: a part is elsewhere, the bias is trained, or autocast
    chooses the dtypes.
    """
    bias = own.get("bias")
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        return None
    parts: dict[str, Tensor] = {}
    for part, name in names.items():
        tensor = own[name]
        if tensor is None or tensor.device != x.device:
            return None
        parts[part] = tensor.detach()
    return None if is_autocast_on(x.device.type) else parts
