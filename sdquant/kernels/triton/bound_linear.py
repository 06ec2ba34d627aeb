"""Linear kernels bound to a layer's weight on a GPU: what is compiled is kept with its arguments in order.

Triton's own launch binds some 45 arguments at each call, nearly all of which are the same for a layer, and looks the
kernel up by them. On the machine of an H200 that and the lookups before it took 75 to 100 us for a call, where torch's
own linear layer takes 15; a step of Flux has 500 such calls.
"""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, empty, is_autocast_enabled, is_grad_enabled
from torch.nn import functional as F
from triton.runtime import driver

from ..fastest import prefers_other
from . import rotation
from .blocks import block_of
from .launch import decode, product
from .launch_config import Launch, pointers
from .pieces import pieces_of

if TYPE_CHECKING:
    from ...core import PackedLayout
    from ..base import Parts

Own = Mapping[str, "Tensor | None"]
# A product in 8 bits of a bound weight: of x, the layer's parameters, the addresses of the weight, and the bias.
Eight = Callable[["BoundWeight", Tensor, Own, dict[str, int], "Tensor | None"], "Tensor | None"]

ALIGNED = 15  # bits that no address has which Triton compiled a kernel for
MOST_IN_PIECES = 1024  # rows of x, of which the product takes a few times as long as decoding at most
_MOST_KEPT = 64  # launches of a layer: for as many numbers of rows
_STREAM = 3  # its place among what a launcher is given
_SHARED = ("table", "dynamic")  # pointers to constants of the device, which are no parts of the weight


def after(at: int, size: int) -> int:
    """Return where what follows `size` bytes at `at` may begin, in memory that several tensors of a call share: each
    allocation takes the processor as long as a launch."""
    return (at + size + ALIGNED) & ~ALIGNED


def piece(memory: Tensor, at: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a tensor that begins at byte `at` of `memory`, int8 [n]."""
    return memory[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


class BoundLaunch:
    """A compiled kernel and its grid; all arguments but some addresses have their values already.

    Triton's launch hooks are left out: to describe a launch to none of them takes as long as ten launches.
    """

    __slots__ = ("arguments", "kernel", "places")

    def __init__(self, launch: Launch, compiled: Any, addresses: tuple[str, ...]) -> None:
        """Bind what `launch` has compiled, except for the parameters named in `addresses`."""
        names = launch.kernel.arg_names
        values = {**launch.arguments, **dict.fromkeys(addresses, 0)}
        own = [value.data_ptr() if isinstance(value, Tensor) else value for value in map(values.get, names)]
        # The grid; the stream; function, its metadata, metadata of the launch and two hooks; then the kernel's own.
        before = [*(*launch.grid, 1, 1)[:3], 0, compiled.function, compiled.packed_metadata, None, None, None]
        self.arguments, self.places = before + own, [len(before) + names.index(name) for name in addresses]
        self.kernel = compiled

    def __call__(self, device: int, addresses: Iterable[int]) -> None:
        """Launch on the current stream of `device`, which is the current one, with addresses in the order given before.

        Raises:
            TypeError: this version of Triton passes arguments in another way.
        """
        values = self.arguments.copy()  # another thread may be here at the same time
        for place, address in zip(self.places, addresses, strict=True):
            values[place] = address
        values[_STREAM] = driver.active.get_current_stream(device)
        self.kernel.run(*values)


class BoundWeight:
    """A layer's packed weight, of which a call needs no more than where it lies, and what was compiled for it."""

    __slots__ = (
        "columns", "constants", "device", "dtype", "form", "kind", "launches", "names", "order", "parts", "rotation",
        "rows", "where",
    )  # fmt: skip

    def __init__(self, form: PackedLayout, parts: Parts, dtype: torch.dtype, prefix: str, rotation: int = 0) -> None:
        """Bind the weight of layers whose parameters are its parts, named with `prefix`, for x of `dtype`.

        Args:
            rotation: how many columns of x are rotated together; 0 for none.
        """
        block = block_of(form)
        assert block is not None  # the reader's `reads` said so
        self.form, self.dtype, self.rotation = form, dtype, rotation
        self.rows, self.columns = form.rows, form.columns
        self.where = parts[form.codes].device
        self.device, self.kind = parts[form.codes].get_device(), self.where.type
        given = pointers(form, parts, block)
        self.constants = [given[name] for name in _SHARED]  # to keep them where their addresses say
        by_part = {"scale": form.scale, "nested": form.nested, "zero": form.zero, "shift": form.shift}
        # Each pointer's part of the weight; unused ones point to the codes.
        of = {"codes": form.codes} | {
            name: part if isinstance(part, str) and part else form.codes for name, part in by_part.items()
        }
        self.parts = tuple(dict.fromkeys(of.values()))
        self.names = tuple(prefix + part for part in self.parts)
        self.order = {name: self.parts.index(part) for name, part in of.items()}
        self.launches: dict[tuple[object, ...], BoundLaunch | None] = {}

    def addresses(self, x: Tensor, own: Own) -> dict[str, int] | None:
        """Return where the weight lies, by the kernels' pointers, and "bias", the address of x if there is none.

        Return None if x or the layer's parameters are not what the bound kernels were compiled for.
        """
        if not x.is_contiguous() or x.size(-1) != self.columns:
            return None
        return self.beside(x, own)

    def beside(self, x: Tensor, own: Own) -> dict[str, int] | None:
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
            bits |= added
        addresses = []
        for name in self.names:
            part = own[name]
            if part is None or part.get_device() != device:
                return None
            address = part.data_ptr()
            bits |= address
            addresses.append(address)
        if bits & ALIGNED:
            return None
        weight = {name: addresses[index] for name, index in self.order.items()}
        weight["bias"] = added
        return weight

    def launched(self, key: tuple[object, ...], make: Callable[[], Launch], addresses: dict[str, int]) -> bool:
        """Launch what `make` makes, with these addresses; return whether this version of Triton can be bound.

        Triton itself launches, and compiles, for the first of each key; what it compiled is bound for the others.
        """
        launches = self.launches
        if key not in launches:
            launch = make()
            compiled = launch(self.where)
            if len(launches) >= _MOST_KEPT:
                launches = self.launches = {}  # another thread may be about to read the one before
            launches[key] = BoundLaunch(launch, compiled, tuple(addresses))
            return True
        bound = launches[key]
        if bound is None:
            return False
        try:
            bound(self.device, addresses.values())
        except TypeError:
            launches[key] = None
            return False
        return True

    def tensors(self, own: Own) -> dict[str, Tensor]:
        """Return the weight's parts."""
        return {part: own[name].data for part, name in zip(self.parts, self.names, strict=True)}  # type: ignore[union-attr]

    def decoded(self, own: Own, weight: dict[str, int], x: Tensor) -> Tensor | None:
        """Return the dequantized weight [rows, columns] in the dtype of x."""
        floats = empty(self.rows, self.columns, dtype=self.dtype, device=x.device)
        addresses = {"out": floats.data_ptr()} | {name: weight[name] for name in self.order}

        def make() -> Launch:
            return decode(self.form, self.tensors(own), floats)

        return floats if self.launched(("decode",), make, addresses) else None

    def rotated(self, x: Tensor) -> Tensor | None:
        """Return x, contiguous, with its columns rotated as the weight's are."""
        out = torch.empty_like(x)

        def make() -> Launch:
            return rotation.rotation(x, self.rotation, out)

        addresses = {"x": x.data_ptr(), "out": out.data_ptr()}
        return out if self.launched(("rotation", x.numel()), make, addresses) else None


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
        floats = None if weight is None else self.decoded(own, weight, x)
        if floats is None:
            return None
        bias, how = own.get("bias"), (layer.stride, layer.padding, layer.dilation, layer.groups)
        return self.run(x, floats.view(self.shape), bias, *how)


class BoundLinear(BoundWeight):
    """`dispatch.linear` bound to a layer: x [..., columns] times the transposed weight, plus the bias.

    Up to `few` rows of x the packed weight is multiplied, for more it is dequantized first: those are the usual ways.
    Of 2 to `most` rows the one that is faster is found by measuring, and of more, up to MOST_IN_PIECES, whether the
    weight is better dequantized piece by piece. From `least` rows on `eight` multiplies in 8 bits. Before that, x is
    rotated if the weight is: `eight` does both at once.
    """

    __slots__ = ("cut", "eight", "few", "least", "most", "sizes")

    def __init__(
        self, form: PackedLayout, parts: Parts, dtype: torch.dtype, few: int, prefix: str, least: int | None,
        rotation: int = 0, most: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(form, parts, dtype, prefix, rotation)
        self.few, self.least = few * form.columns, None if least is None else least * form.columns
        self.eight: Eight | None = None
        self.most, self.cut = most, pieces_of(form, dtype, self.where)
        self.sizes = (form.packing, form.table, form.rows, form.columns, form.group, form.apart, str(dtype))

    def __call__(self, x: Tensor, own: Own) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this does not apply."""
        size = x.numel()
        if not size or (self.eight is None and self.least is not None and size >= self.least):
            return None
        weight = self.addresses(x, own)
        if weight is None:
            return None
        bias = own.get("bias")
        if self.eight is not None and self.least is not None and size >= self.least:
            return self.eight(self, x, own, weight, bias)
        inputs = self.rotated(x) if self.rotation else x
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
            lambda: usual(inputs, own, weight, bias), lambda: other(inputs, own, weight, bias),
        )  # fmt: skip
        return (other if prefers else usual)(inputs, own, weight, bias)

    def of_few(self, x: Tensor, own: Own, weight: dict[str, int], bias: Tensor | None) -> Tensor | None:
        """Multiply x by the packed weight, which is decoded in the kernel."""
        rows = x.numel() // self.columns
        out = empty(*x.shape[:-1], self.rows, dtype=self.dtype, device=x.device)

        def make() -> Launch:
            return product(self.form, self.tensors(own), x.view(rows, -1), bias, out.view(rows, -1))

        addresses = {"x": x.data_ptr(), "out": out.data_ptr(), **weight}
        return out if self.launched(("product", rows, bias is None), make, addresses) else None

    def of_many(self, x: Tensor, own: Own, weight: dict[str, int], bias: Tensor | None) -> Tensor | None:
        """Decode the weight; torch multiplies."""
        floats = self.decoded(own, weight, x)
        return None if floats is None else F.linear(x, floats, bias)

    def in_pieces(self, x: Tensor, own: Own, weight: dict[str, int], bias: Tensor | None) -> Tensor | None:
        """Decode `cut` rows of the weight at a time, which torch multiplies while they are in the card's cache."""
        flat = x.view(-1, self.columns)
        out = empty(*x.shape[:-1], self.rows, dtype=self.dtype, device=x.device)
        to, floats = out.view(-1, self.rows), empty(self.cut, self.columns, dtype=self.dtype, device=x.device)
        addresses = {"out": floats.data_ptr()} | {name: weight[name] for name in self.order}
        for start in range(0, self.rows, self.cut):
            stop = min(start + self.cut, self.rows)

            def make(start: int = start, stop: int = stop) -> Launch:
                return decode(self.form, self.tensors(own), floats, start, stop)

            if not self.launched(("piece", start), make, addresses):
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
