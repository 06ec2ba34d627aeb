"""The product with a weight that has a low-rank branch, bound to a layer on a GPU: see `branch` and `branch_sides`.

At most three launches in floats and four in 8 bits: one for what a layer does to its activations, the product with the
residual, before which it is decoded or quantized if it has to be, and one for what is added to the results. With the
narrow products and the divisions by torch there were up to five and seven, more in float16.
"""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, empty, float16, int8
from torch.nn import functional as F

from ..fastest import prefers_other
from . import branch_sides
from .bound_eight import Float8, Int8, name_of
from .bound_launch import MOST_KEPT, LaunchSequence
from .bound_linear import BIAS, BoundLinear, X, after, piece
from .branch import decoding_with_branch, fits, of_branch
from .branch_sides import Inputs, dtype_between, width_of
from .launch import multiplies, product

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ...core import LowRank, PackedLayout
    from ..base import EightBit, Parts
    from .bound_linear import BoundWeight, Own
    from .launch_config import Launch

Launched = tuple["Launch", dict[str, int]]


def bind_with_branch(
    form: PackedLayout, parts: Parts, branch: LowRank, of: Parts, dtype: torch.dtype, few: int, most: int, prefix: str,
    eight: EightBit | None, rotation: int,
) -> BoundBranch | None:  # fmt: skip
    """Return the product for layers that hold such a weight; None if there are no kernels for it.

    Args:
        form, parts: of the residual. few, most: rows of x up to which it is multiplied without decoding it, and up to
            which that may be the faster way. For the others see `Reader.prepared_with_branch`.
    """
    from .blocks import block_of

    block = block_of(form)
    if block is None or not fits(form, block, branch, of) or not branch_sides.can_multiply(branch, of, rotation):
        return None
    if not multiplies(form):
        few = most = 0
    return BoundBranch(form, parts, branch, of, dtype, few, most, prefix, eight, rotation)


class BoundBranch(BoundLinear):
    """x [..., columns] times the transposed weight, plus the bias."""

    __slots__ = ("branch", "dtypes", "labels", "own", "pointers", "steps", "width")

    def __init__(
        self, form: PackedLayout, parts: Parts, branch: LowRank, of: Parts, dtype: torch.dtype, few: int, most: int,
        prefix: str, eight: EightBit | None, rotation: int,
    ) -> None:  # fmt: skip
        least = None if eight is None else eight.least
        super().__init__(form, parts, dtype, few, prefix, least, rotation, most)
        self.branch, self.own = branch, branch.under(prefix)
        self.width = width_of(branch.rank(of))
        # The branch's parts follow those of the residual among the addresses of a call.
        sides = (self.own.up, self.own.down, self.own.smooth, self.own.rows)
        by_pointer = of_branch(self.own, dict(zip(sides, sides, strict=True)))
        names = tuple(dict.fromkeys(by_pointer.values()))
        self.pointers = {pointer: self.more + names.index(name) for pointer, name in by_pointer.items()}
        self.dtypes = tuple((name, of[name.removeprefix(prefix)].dtype) for name in names)
        self.names, self.more = self.names + names, self.more + len(names)
        self.steps: dict[tuple[object, ...], LaunchSequence] = {}  # by the shape of x and whether there is a bias
        self.labels = ("branch", self.width, *self.sizes)
        if eight is not None and eight.coding is not None and not eight.run:  # runs of inputs are quantized as they are
            self.eight = Float8WithBranch(form, eight) if eight.floats is not None else Int8WithBranch(form, eight)
            self.timed, self.kind_of_eight = eight.timed, name_of(eight, rotation, self.labels)

    def tensors(self, own: Own) -> dict[str, Tensor]:
        names = self.names[: len(self.parts)]
        return {part: own[name].data for part, name in zip(self.parts, names, strict=True)}  # type: ignore[union-attr]

    def beside(self, x: Tensor, own: Own) -> list[int] | None:
        for name, dtype in self.dtypes:
            tensor = own[name]
            if tensor is None or tensor.dtype is not dtype or tensor.requires_grad:
                return None
        return super().beside(x, own)

    def down(self, x: Tensor, own: Own, inputs: Inputs, between: Tensor, at: dict[str, int]) -> Launched:
        """Return the launch before the product, for x [m, columns]; `at`: of `inputs` and `between`."""
        launch = branch_sides.down(x, self.own, own, inputs, between, self.rotation)  # type: ignore[arg-type]
        at = {"inputs": X, "scale": at["between"], "sums": at["between"], **at}
        smooth = self.pointers["smooth"] if self.branch.smooth else X
        return launch, {"x": X, "smooth": smooth, "down": self.pointers["down"], **at}

    def up(
        self, y: Tensor, out: Tensor, own: Own, between: Tensor, bias: Tensor | None, at: dict[str, int]
    ) -> Launched:
        """Return the launch after the product y [m, rows], into `out`, which may be the same; `at`: of all three."""
        bias = bias if self.branch.rows else None
        launch = branch_sides.up(y, self.own, own, between, out, bias)  # type: ignore[arg-type]
        of = {"up": self.pointers["up"], "of_rows": self.pointers["of_rows"]}
        return launch, {**of, "bias": at["out"] if bias is None else BIAS, **at}

    def bias_within(self, bias: Tensor | None) -> Tensor | None:
        """Return the bias if the product with the residual adds it, and not `up`."""
        return None if self.branch.rows else bias

    def in_floats(self, x: Tensor, own: Own, weight: list[int], bias: Tensor | None) -> Tensor | None:
        rows = x.numel() // self.columns
        few = rows * self.columns <= self.few
        if 1 < rows <= self.most:
            usual, other = (self.by_packed, self.decoding) if few else (self.decoding, self.by_packed)
            name = "decoded" if few else "multiplied"
        elif few:
            return self.by_packed(x, own, weight, bias)
        else:
            return self.decoding(x, own, weight, bias)
        prefers = prefers_other(
            (name, *self.labels), rows, x.device,
            lambda: usual(x, own, [*weight], bias), lambda: other(x, own, [*weight], bias),
        )  # fmt: skip
        return (other if prefers else usual)(x, own, weight, bias)

    def decoding(self, x: Tensor, own: Own, weight: list[int], bias: Tensor | None) -> Tensor | None:
        """Decode the weight in the way that is faster; torch multiplies."""
        if self.dtype is float16:  # what is between the sides of a branch may be beyond its largest number
            return self.whole(x, own, weight, bias)
        prefers = prefers_other(
            ("whole", *self.labels), x.numel() // self.columns, x.device,
            lambda: self.with_side(x, own, [*weight], bias), lambda: self.whole(x, own, [*weight], bias),
        )  # fmt: skip
        return (self.whole if prefers else self.with_side)(x, own, weight, bias)

    def by_packed(self, x: Tensor, own: Own, addresses: list[int], bias: Tensor | None) -> Tensor | None:
        """Multiply the packed residual, between the two sides."""
        key = (x.shape, bias is None)
        steps = self.steps.get(key) or self._keep(key, self._sizes(x))
        memory = empty(steps.size, dtype=int8, device=self.where)
        out = empty(steps.out, dtype=self.dtype, device=self.where)
        base = memory.data_ptr()
        addresses += (out.data_ptr(), base, base + steps.pieces[0])
        if steps.launches is None:
            steps.first(self._launches(x, own, memory, out, bias, steps), self.where)
            return out
        return out if steps.again(self.device, addresses) else None

    def _keep(self, key: tuple[object, ...], steps: LaunchSequence) -> LaunchSequence:
        if len(self.steps) >= MOST_KEPT:
            self.steps = {}  # another thread may be about to read the one before
        return self.steps.setdefault(key, steps)

    def _sizes(self, x: Tensor) -> LaunchSequence:
        m = x.numel() // self.columns
        inputs = m * self.columns * self.dtype.itemsize if self.branch.smooth or self.rotation else 0
        between = after(0, inputs)
        size = between + m * self.width * dtype_between(self.dtype).itemsize
        return LaunchSequence(m, (*x.shape[:-1], self.rows), size, (between,))

    def _launches(
        self, x: Tensor, own: Own, memory: Tensor, out: Tensor, bias: Tensor | None, steps: LaunchSequence
    ) -> Iterator[Launched]:
        """Yield the launches, and which address each pointer is."""
        m, columns, (between_at,) = steps.m, self.columns, steps.pieces
        to, inputs_at, middle = range(self.more, self.more + 3)
        flat, results = x.view(m, columns), out.view(m, self.rows)
        between = piece(memory, between_at, dtype_between(self.dtype), m, self.width)
        inputs, at = None, {"between": middle}
        if between_at:
            inputs, at = piece(memory, 0, self.dtype, m, columns), {"between": middle, "inputs": inputs_at}
        yield self.down(flat, own, Inputs(inputs), between, at)
        within, activations = self.bias_within(bias), flat if inputs is None else inputs
        at = {"x": X if inputs is None else inputs_at, "out": to, "bias": BIAS if within is not None else to, **self.at}
        yield product(self.form, self.tensors(own), activations, within, results), at
        yield self.up(results, results, own, between, bias, {"y": to, "out": to, "between": middle})

    def with_side(self, x: Tensor, own: Own, addresses: list[int], bias: Tensor | None) -> Tensor | None:
        """Decode the residual with the second side to its right."""
        m, columns = x.numel() // self.columns, self.columns
        inputs = empty(m, columns + self.width, dtype=self.dtype, device=self.where)
        floats = empty(self.rows, columns + self.width, dtype=self.dtype, device=self.where)
        addresses += (floats.data_ptr(), inputs.data_ptr(), inputs[:, columns:].data_ptr())
        to, inputs_at, between_at = range(self.more, self.more + 3)
        key = ("inputs", m)
        if not self.again(key, addresses):
            of = Inputs(inputs[:, :columns]), inputs[:, columns:], {"inputs": inputs_at, "between": between_at}
            launch, at = self.down(x.view(m, columns), own, *of)
            if not self.first(key, lambda: launch, at):
                return None
        if not self.again("side", addresses) and not self._decode_branch("side", own, floats, to):
            return None
        return F.linear(inputs, floats, bias).view(*x.shape[:-1], self.rows)

    def whole(self, x: Tensor, own: Own, addresses: list[int], bias: Tensor | None) -> Tensor | None:
        """Decode the weight with its branch."""
        inputs = self.rotated(x) if self.rotation else x
        floats = empty(self.rows, self.columns, dtype=self.dtype, device=self.where)
        addresses.append(floats.data_ptr())
        if inputs is None or not (
            self.again("whole", addresses) or self._decode_branch("whole", own, floats, self.more)
        ):
            return None
        return F.linear(inputs, floats, bias)

    def _decode_branch(self, key: str, own: Own, floats: Tensor, to: int) -> bool:
        def make() -> Launch:
            return decoding_with_branch(self.form, self.tensors(own), self.own, own, floats)  # type: ignore[arg-type]

        return self.first(key, make, {"out": to, **self.at, **self.pointers})


class Int8WithBranch(Int8):
    """The product in integers with the residual, between the two sides."""

    __slots__ = ()

    def __init__(self, form: PackedLayout, eight: EightBit) -> None:
        # Torch's product would take two launches more, which it is not measured with.
        super().__init__(form, replace(eight, left=None))

    def _sizes(self, bound: BoundWeight, x: Tensor) -> LaunchSequence:
        assert isinstance(bound, BoundBranch)
        steps = super()._sizes(bound, x)
        between = after(0, steps.size)
        size = between + steps.m * bound.width * dtype_between(bound.dtype).itemsize
        return LaunchSequence(steps.m, steps.out, size, (*steps.pieces, between))

    def _launches(
        self, bound: BoundWeight, x: Tensor, own: Own, memory: Tensor, out: Tensor, bias: Tensor | None,
        steps: LaunchSequence,
    ) -> Iterator[Launched]:  # fmt: skip
        assert isinstance(bound, BoundBranch)
        *_, middle = places = range(bound.more, bound.more + 2 + len(steps.pieces))
        between = piece(memory, steps.pieces[-1], dtype_between(bound.dtype), steps.m, bound.width)
        inputs = Inputs(*self.codes_of(bound, memory, steps))
        at = {"inputs": places[1], "scale": places[2], "between": middle}
        if inputs.sums is not None:
            at["sums"] = places[3]
        yield bound.down(x.view(steps.m, -1), own, inputs, between, at)
        launches = super()._launches(bound, x, own, memory, out, bound.bias_within(bias), steps)
        next(launches)  # quantizes activations, which is done
        yield from launches
        results, to = out.view(steps.m, -1), places[0]
        yield bound.up(results, results, own, between, bias, {"y": to, "out": to, "between": middle})


class Float8WithBranch(Float8):
    """The product in 8-bit floats with the residual, between the two sides."""

    __slots__ = ()

    def __call__(
        self, bound: BoundWeight, x: Tensor, own: Own, addresses: list[int], bias: Tensor | None
    ) -> Tensor | None:
        assert isinstance(bound, BoundBranch)
        m, first = x.numel() // bound.columns, [*addresses]
        out = empty(*x.shape[:-1], bound.rows, dtype=x.dtype, device=bound.where)
        between = empty(m, bound.width, dtype=dtype_between(bound.dtype), device=bound.where)
        operands = self.operands(bound, x, own, addresses, between)
        if operands is None:
            return None
        y = self.product(*operands, bound.bias_within(bias))
        y_at, to, middle = range(bound.more, bound.more + 3)
        key = ("up", m, bias is None)
        if not bound.again(key, [*first, y.data_ptr(), out.data_ptr(), between.data_ptr()]):
            at = {"y": y_at, "out": to, "between": middle}
            launch, at = bound.up(y, out.view(m, bound.rows), own, between, bias, at)
            if not bound.first(key, lambda: launch, at):
                return None
        return out

    def of_rows(
        self, bound: BoundWeight, x: Tensor, own: Own, codes: Tensor, scale: Tensor, between: Tensor | None
    ) -> Launched:
        assert isinstance(bound, BoundBranch) and between is not None
        x_codes, x_scale = bound.more, bound.more + 1
        middle = bound.more + (5 if self.again else 2)
        return bound.down(
            x, own, Inputs(codes, scale), between, {"inputs": x_codes, "scale": x_scale, "between": middle}
        )
