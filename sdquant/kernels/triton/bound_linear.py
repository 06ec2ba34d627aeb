"""Linear kernels bound to a layer's weight on a GPU: what is compiled is kept with its arguments in order.

Triton's own launch binds some 45 arguments at each call, nearly all of which are the same for a layer, and looks the
kernel up by them. On the machine of an H200 that and the lookups before it took 75 to 100 us for a call, where torch's
own linear layer takes 15; a step of Flux has 500 such calls.
"""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, empty, is_autocast_enabled, is_grad_enabled
from torch.nn import functional as F

from ..fastest import prefers_other, verdict_of
from . import rotation
from .blocks import block_of
from .bound_launch import BoundLaunches
from .launch import decode, product
from .launch_config import pointers
from .pieces import pieces_of

if TYPE_CHECKING:
    from ...core import PackedLayout
    from ..base import Parts
    from .launch_config import Launch

Own = Mapping[str, "Tensor | None"]
# A product in 8 bits of a bound weight: of x, the layer's parameters, `BoundWeight.addresses`, and the bias.
Eight = Callable[["BoundWeight", Tensor, Own, list[int], "Tensor | None"], "Tensor | None"]

ALIGNED = 15  # bits that no address has which Triton compiled a kernel for
MOST_IN_PIECES = 1024  # rows of x, of which the product takes a few times as long as decoding at most
_SHARED = ("table", "dynamic")  # pointers to constants of the device, which are no parts of the weight


def after(at: int, size: int) -> int:
    """Return where what follows `size` bytes at `at` may begin, in memory that several tensors of a call share: each
    allocation takes the processor as long as a launch."""
    return (at + size + ALIGNED) & ~ALIGNED


def piece(memory: Tensor, at: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a tensor that begins at byte `at` of `memory`, int8 [n]."""
    return memory[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


X, BIAS, _PARTS = 0, 1, 2  # among the addresses of a call: x, the bias, then the parts of the weight


class BoundParts(BoundLaunches):
    """Parameters of a layer by name, whose addresses a call checks and passes on beside those of x and the bias."""

    __slots__ = ("columns", "dtype", "kind", "names", "rotation")

    def __init__(self, codes: Tensor, names: tuple[str, ...], columns: int, dtype: torch.dtype, rotation: int) -> None:
        """Bind the layers of a weight with these codes for x [..., columns] of `dtype`.

        Args:
            names: of the parameters, in the order of their addresses. rotation: how many columns of x are rotated
                together; 0 for none.
        """
        super().__init__(codes.device, codes.get_device())
        self.kind, self.names = self.where.type, names
        self.columns, self.dtype, self.rotation = columns, dtype, rotation

    def addresses(self, x: Tensor, own: Own) -> list[int] | None:
        """Return the addresses of x, of the bias (that of x if there is none), and of the parameters.

        Return None if x or the layer's parameters are not what the bound kernels were compiled for.
        """
        if not x.is_contiguous() or x.size(-1) != self.columns:
            return None
        return self.beside(x, own)

    def beside(self, x: Tensor, own: Own) -> list[int] | None:
        """Do as `addresses` for x of any shape and strides, whose address may be any if torch multiplies."""
        device = self.device
        if x.dtype is not self.dtype or x.get_device() != device or x.requires_grad:
            return None
        if is_autocast_enabled(self.kind) or current_index(x) != device:
            return None
        bits = added = x.data_ptr()
        bias = own.get("bias")
        if bias is not None:
            if bias.dtype is not self.dtype or bias.get_device() != device or not bias.is_contiguous():
                return None
            if bias.requires_grad and is_grad_enabled():
                return None
            added = bias.data_ptr()
        addresses = [bits, added]
        bits |= added
        for name in self.names:
            part = own[name]
            if part is None or part.get_device() != device:
                return None
            address = part.data_ptr()
            bits |= address
            addresses.append(address)
        return None if bits & ALIGNED else addresses

    def rotated(self, x: Tensor) -> Tensor | None:
        """Return x, contiguous, with its columns rotated as the weight's are."""
        out, key = torch.empty_like(x), ("rotation", x.numel())
        return out if self.again(key, [x.data_ptr(), out.data_ptr()]) or self._rotate(key, x, out) else None

    def _rotate(self, key: object, x: Tensor, out: Tensor) -> bool:
        return self.first(key, lambda: rotation.rotation(x, self.rotation, out), {"x": 0, "out": 1})


class BoundWeight(BoundParts):
    """A layer's packed weight, of which a call needs no more than where it lies, and what was compiled for it."""

    __slots__ = ("at", "constants", "form", "more", "parts", "rows")

    def __init__(self, form: PackedLayout, parts: Parts, dtype: torch.dtype, prefix: str, rotation: int = 0) -> None:
        """Bind the weight of layers whose parameters are its parts, named with `prefix`, for x of `dtype`.

        Args:
            rotation: how many columns of x are rotated together; 0 for none.
        """
        block = block_of(form)
        assert block is not None  # the reader's `reads` said so
        self.form, self.rows = form, form.rows
        given = pointers(form, parts, block)
        self.constants = [given[name] for name in _SHARED]  # to keep them where their addresses say
        by_part = {"scale": form.scale, "nested": form.nested, "zero": form.zero, "shift": form.shift}
        # Each pointer's part of the weight; unused ones point to the codes.
        of = {"codes": form.codes} | {
            name: part if isinstance(part, str) and part else form.codes for name, part in by_part.items()
        }
        self.parts = tuple(dict.fromkeys(of.values()))
        names = tuple(prefix + part for part in self.parts)
        super().__init__(parts[form.codes], names, form.columns, dtype, rotation)
        # Which of the addresses of a call the kernels' pointers are.
        self.at = {name: _PARTS + self.parts.index(part) for name, part in of.items()}
        self.more = _PARTS + len(self.parts)  # where addresses begin that a call adds

    def part(self, own: Own, name: str) -> Tensor:
        """Return the part of the weight that a pointer of the kernels is for."""
        tensor = own[self.names[self.at[name] - _PARTS]]
        assert tensor is not None  # or there would be no addresses
        return tensor

    def tensors(self, own: Own) -> dict[str, Tensor]:
        """Return the weight's parts."""
        return {part: own[name].data for part, name in zip(self.parts, self.names, strict=True)}  # type: ignore[union-attr]

    def decoded(self, own: Own, addresses: list[int]) -> Tensor | None:
        """Return the dequantized weight [rows, columns] in the dtype of x."""
        floats = empty(self.rows, self.columns, dtype=self.dtype, device=self.where)
        addresses.append(floats.data_ptr())
        return floats if self.again("decode", addresses) or self._decode(own, floats) else None

    def _decode(self, own: Own, floats: Tensor) -> bool:
        return self.first("decode", lambda: decode(self.form, self.tensors(own), floats), {"out": self.more, **self.at})


class BoundConvolution(BoundWeight):
    """`dispatch.convolve` bound to a layer: its weight is decoded, and torch convolves."""

    __slots__ = ("run", "shape")

    def __init__(
        self, form: PackedLayout, parts: Parts, dtype: torch.dtype, prefix: str, shape: tuple[int, ...],
        run: Callable[..., Tensor],
    ) -> None:  # fmt: skip
        """Bind a weight of `shape`, which `run` convolves with."""
        super().__init__(form, parts, dtype, prefix)
        self.shape, self.run = shape, run

    def __call__(self, x: Tensor, layer: Any) -> Tensor | None:
        """Convolve x [b, in, ...] as `layer` says; None if this does not apply."""
        if x.ndim != len(self.shape) or not x.numel() or layer.padding_mode != "zeros":
            return None
        if layer.weight_function or layer.bias_function:
            return None
        own = layer._parameters
        weight = self.beside(x, own)
        floats = None if weight is None else self.decoded(own, weight)
        if floats is None:
            return None
        bias, how = own.get("bias"), (layer.stride, layer.padding, layer.dilation, layer.groups)
        return self.run(x, floats.view(self.shape), bias, *how)


class BoundLinear(BoundWeight):
    """`dispatch.linear` bound to a layer: x [..., columns] times the transposed weight, plus the bias.

    Up to `few` rows of x the packed weight is multiplied, for more it is dequantized first: those are the usual ways.
    Of 2 to `most` rows the one that is faster is found by measuring, and of more, up to MOST_IN_PIECES, whether the
    weight is better dequantized piece by piece. From `least` rows on `eight` multiplies in 8 bits, if it is `timed`
    unless that is found to be slower. Before that, x is rotated if the weight is: `eight` does both at once.
    """

    __slots__ = ("cut", "eight", "few", "kind_of_eight", "least", "most", "sizes", "timed")

    def __init__(
        self, form: PackedLayout, parts: Parts, dtype: torch.dtype, few: int, prefix: str, least: int | None,
        rotation: int = 0, most: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(form, parts, dtype, prefix, rotation)
        self.few, self.least = few * form.columns, None if least is None else least * form.columns
        self.eight: Eight | None = None
        self.timed = False
        self.most, self.cut = most, pieces_of(form, dtype, self.where)
        self.sizes = (form.packing, form.table, form.rows, form.columns, form.group, form.apart, str(dtype))
        self.kind_of_eight: Hashable = None

    def __call__(self, x: Tensor, own: Own) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this does not apply."""
        size = x.numel()
        if not size or (self.eight is None and self.least is not None and size >= self.least):
            return None
        weight = self.addresses(x, own)
        return None if weight is None else self.of_addresses(x, own, weight, own.get("bias"))

    def of_addresses(self, x: Tensor, own: Own, weight: list[int], bias: Tensor | None) -> Tensor | None:
        """Do the same where `addresses` is known to be `weight`."""
        if self.eight is None or self.least is None or x.numel() < self.least:
            return self.in_floats(x, own, weight, bias)
        if not self.timed:
            return self.eight(self, x, own, weight, bias)
        kind, rows = self.kind_of_eight, x.numel() // self.columns
        is_exact = verdict_of(kind, rows, x.device)
        if is_exact is None:
            eight = self.eight
            y = eight(self, x, own, [*weight], bias)
            if y is None or not prefers_other(
                kind, rows, x.device,
                lambda: eight(self, x, own, [*weight], bias), lambda: self.in_floats(x, own, [*weight], bias),
            ):  # fmt: skip
                return y  # None is left to others
            is_exact = True
        return self.in_floats(x, own, weight, bias) if is_exact else self.eight(self, x, own, weight, bias)

    def in_floats(self, x: Tensor, own: Own, weight: list[int], bias: Tensor | None) -> Tensor | None:
        """Multiply as it is done without `eight`."""
        inputs, size = self.rotated(x) if self.rotation else x, x.numel()
        if inputs is None:
            return None
        rows, few = size // self.columns, size <= self.few
        usual = self.of_few if few else self.of_many
        if 1 < rows <= self.most:
            other, name = self.of_many if few else self.of_few, "decoded" if few else "multiplied"
        elif not few and self.cut and self.most < rows <= MOST_IN_PIECES:
            other, name = self.in_pieces, "pieces"
        else:
            return usual(inputs, own, weight, bias)
        prefers = prefers_other(
            (name, *self.sizes), rows, x.device,
            lambda: usual(inputs, own, [*weight], bias), lambda: other(inputs, own, [*weight], bias),
        )  # fmt: skip
        return (other if prefers else usual)(inputs, own, weight, bias)

    def of_few(self, x: Tensor, own: Own, addresses: list[int], bias: Tensor | None) -> Tensor | None:
        """Multiply x by the packed weight, which is decoded in the kernel."""
        out = empty(*x.shape[:-1], self.rows, dtype=self.dtype, device=self.where)
        addresses += (x.data_ptr(), out.data_ptr())  # x may be rotated
        key = (x.numel(), bias is None)
        return out if self.again(key, addresses) or self._multiply(key, x, own, bias, out) else None

    def _multiply(self, key: object, x: Tensor, own: Own, bias: Tensor | None, out: Tensor) -> bool:
        def make() -> Launch:
            return product(self.form, self.tensors(own), x.view(-1, self.columns), bias, out.view(-1, self.rows))

        return self.first(key, make, {"x": self.more, "out": self.more + 1, "bias": BIAS, **self.at})

    def of_many(self, x: Tensor, own: Own, addresses: list[int], bias: Tensor | None) -> Tensor | None:
        """Decode the weight; torch multiplies."""
        floats = self.decoded(own, addresses)
        return None if floats is None else F.linear(x, floats, bias)

    def in_pieces(self, x: Tensor, own: Own, addresses: list[int], bias: Tensor | None) -> Tensor | None:
        """Decode `cut` rows of the weight at a time, which torch multiplies while they are in the card's cache."""
        flat = x.view(-1, self.columns)
        out = empty(*x.shape[:-1], self.rows, dtype=self.dtype, device=x.device)
        to, floats = out.view(-1, self.rows), empty(self.cut, self.columns, dtype=self.dtype, device=x.device)
        addresses = [*addresses, floats.data_ptr()]
        for start in range(0, self.rows, self.cut):
            stop = min(start + self.cut, self.rows)

            def make(start: int = start, stop: int = stop) -> Launch:
                return decode(self.form, self.tensors(own), floats, start, stop)

            key = ("piece", start)
            if not self.again(key, addresses) and not self.first(key, make, {"out": self.more, **self.at}):
                return None
            piece, part = floats[: stop - start].t(), to[:, start:stop]
            if bias is None:
                torch.mm(flat, piece, out=part)
            else:
                torch.addmm(bias.detach()[start:stop], flat, piece, out=part)
        return out


def current_index(x: Tensor) -> int:
    """Return the index of the current device of x's type, on which kernels are launched."""
    return torch.cuda.current_device() if x.is_cuda else torch.xpu.current_device()
