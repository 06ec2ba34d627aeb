"""Linear kernels bound to a layer's weight on a GPU: what is compiled is kept with its arguments in order.

Triton's own launch binds some 45 arguments at each call, nearly all of which are the same for a layer, and looks the
kernel up by them. On the machine of an H200 that and the lookups before it took 75 to 100 us for a call, where torch's
own linear layer takes 15; a step of Flux has 500 such calls.
"""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, empty, is_autocast_enabled, is_grad_enabled
from torch.nn import functional as F
from triton.runtime import driver

from .blocks import block_of
from .launch import decode, product
from .launch_config import Launch, pointers

if TYPE_CHECKING:
    from ...core.packed_layout import PackedLayout
    from ..base import Parts

Own = Mapping[str, "Tensor | None"]

_ALIGNED = 15  # bits that no address has which Triton compiled a kernel for
_SHARED = ("table", "dynamic")  # pointers to constants of the device, which are no parts of the weight


class BoundLaunch:
    """A compiled kernel and its grid; all arguments but some addresses have their values already.

    Triton's launch hooks are left out: to describe a launch to none of them takes as long as ten launches.
    """

    __slots__ = ("grid", "kernel", "places", "values")

    def __init__(self, launch: Launch, compiled: Any, addresses: tuple[str, ...]) -> None:
        """Bind what `launch` has compiled, except for the parameters named in `addresses`."""
        names = launch.kernel.arg_names
        values = {**launch.arguments, **dict.fromkeys(addresses, 0)}
        self.values = [value.data_ptr() if isinstance(value, Tensor) else value for value in map(values.get, names)]
        self.places = [names.index(name) for name in addresses]
        self.kernel, self.grid = compiled, (*launch.grid, 1, 1)[:3]

    def __call__(self, device: int, addresses: list[int]) -> None:
        """Launch on the current stream of `device`, which is the current one, with addresses in the order given before.

        Raises:
            TypeError: this version of Triton passes arguments in another way.
        """
        values = self.values.copy()  # another thread may be here at the same time
        for place, address in zip(self.places, addresses, strict=True):
            values[place] = address
        kernel, stream = self.kernel, driver.active.get_current_stream(device)
        kernel.run(*self.grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *values)


class BoundLinear:
    """`dispatch.linear` bound to a layer: x [..., columns] times the transposed weight, plus the bias.

    Up to `few` rows of x the packed weight is multiplied, for more it is dequantized first.
    """

    __slots__ = (
        "columns", "constants", "device", "dtype", "few", "form", "kind", "launches", "most", "names", "order", "parts",
        "rows",
    )  # fmt: skip

    def __init__(
        self, form: PackedLayout, parts: Parts, dtype: torch.dtype, few: int, prefix: str, most: int | None
    ) -> None:
        """Bind the kernels for up to `most` rows of x; None for any number."""
        block = block_of(form)
        assert block is not None  # the reader's `reads` said so
        self.form, self.dtype, self.few = form, dtype, few
        self.rows, self.columns = form.rows, form.columns
        self.most = None if most is None else most * form.columns
        self.device, self.kind = parts[form.codes].get_device(), parts[form.codes].device.type
        given = pointers(form, parts, block)
        self.constants = [given[name] for name in _SHARED]  # to keep them where their addresses say
        by_part = {"scale": form.scale, "nested": form.nested, "zero": form.zero, "shift": form.shift}
        # Each pointer's part of the weight; unused ones point to the codes.
        of = {"codes": form.codes} | {
            name: part if isinstance(part, str) and part else form.codes for name, part in by_part.items()
        }
        self.parts, self.names = (
            tuple(dict.fromkeys(of.values())),
            tuple(prefix + part for part in dict.fromkeys(of.values())),
        )
        self.order = {name: self.parts.index(part) for name, part in of.items()}
        self.launches: dict[tuple[int, bool], BoundLaunch | None] = {}

    def __call__(self, x: Tensor, own: Own) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this does not apply."""
        size, device = x.numel(), self.device
        if x.dtype is not self.dtype or not size or (self.most is not None and size > self.most):
            return None
        if x.get_device() != device or x.shape[-1] != self.columns or x.requires_grad or not x.is_contiguous():
            return None
        if is_autocast_enabled(self.kind) or _current(x) != device:
            return None
        bits = at = x.data_ptr()
        bias, added = own.get("bias"), at
        if bias is not None:
            if bias.dtype is not self.dtype or bias.get_device() != device or not bias.is_contiguous():
                return None
            if bias.requires_grad and is_grad_enabled():
                return None
            added = bias.data_ptr()
            bits |= added
        found = []
        for name in self.names:
            part = own[name]
            if part is None or part.get_device() != device:
                return None
            address = part.data_ptr()
            bits |= address
            found.append(address)
        if bits & _ALIGNED:
            return None
        weight = [found[index] for index in self.order.values()]
        rows = size // self.columns
        if rows > self.few:
            floats = empty(self.rows, self.columns, dtype=self.dtype, device=x.device)
            decoded = self._launched((0, False), own, x, bias, floats, [floats.data_ptr(), *weight])
            return F.linear(x, floats, bias) if decoded else None
        out = empty(*x.shape[:-1], self.rows, dtype=self.dtype, device=x.device)
        key = rows, bias is not None
        return out if self._launched(key, own, x, bias, out, [at, added, out.data_ptr(), *weight]) else None

    def _launched(
        self, key: tuple[int, bool], own: Own, x: Tensor, bias: Tensor | None, out: Tensor, addresses: list[int]
    ) -> bool:
        """Launch the product of a number of rows, or for 0 the decoding; return whether that is possible.

        Triton itself launches, and compiles, for the first of each; what it compiled is bound for those that follow.
        """
        if key in self.launches:
            bound = self.launches[key]
            if bound is None:
                return False
            try:
                bound(self.device, addresses)
            except TypeError:
                self.launches[key] = None
                return False
            return True
        parts = {part: own[name].data for part, name in zip(self.parts, self.names, strict=True)}  # type: ignore[union-attr]
        if key[0]:
            flat = x.view(key[0], self.columns), bias, out.view(key[0], self.rows)
            launch, tensors = product(self.form, parts, *flat), ["x", "bias", "out"]
        else:
            launch, tensors = decode(self.form, parts, out), ["out"]
        self.launches[key] = BoundLaunch(launch, launch(out.device), (*tensors, *self.order))
        return True


def _current(x: Tensor) -> int:
    """Return the index of the current device of x's type, on which kernels are launched."""
    return torch.cuda.current_device() if x.is_cuda else torch.xpu.current_device()
