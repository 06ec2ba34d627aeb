"""Decoding bound to a form of weights: what is compiled for one weight is launched for all others of its form.

Convolutions, embeddings and layers in compiled graphs have no call bound to them (`bound_linear`), but decode too.
"""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

from typing import TYPE_CHECKING

from . import bound_linear
from .blocks import block_of
from .bound_launch import BoundLaunch
from .launch import decode
from .launch_config import pointers

if TYPE_CHECKING:
    from torch import Tensor

    from ...core import PackedLayout
    from ..base import Parts

_MOST_KEPT = 1024  # forms
_bound: dict[tuple[object, ...], BoundLaunch | None] = {}


def decode_into(form: PackedLayout, parts: Parts, out: Tensor) -> None:
    """Dequantize the weight into `out`, contiguous [rows, columns]."""
    block = block_of(form)
    assert block is not None  # the reader's `reads` said so
    tensors = {"out": out, **pointers(form, parts, block)}
    addresses = [tensor.data_ptr() for tensor in tensors.values()]
    index, bits = out.get_device(), 0
    for address in addresses:
        bits |= address
    if bits & bound_linear.ALIGNED or bound_linear.current_index(out) != index:
        decode(form, parts, out)(out.device)
        return
    key = (form, out.dtype, index, *(tensor.dtype for tensor in tensors.values()))
    if key not in _bound:
        launch = decode(form, parts, out)
        compiled = launch(out.device)
        if len(_bound) >= _MOST_KEPT:
            _bound.clear()
        _bound[key] = BoundLaunch(launch, compiled, {name: at for at, name in enumerate(tensors)})
        return
    bound = _bound.get(key)
    if bound is not None:
        if bound(index, addresses):
            return
        _bound[key] = None
    decode(form, parts, out)(out.device)
