"""What `sdquant calibrate` found for quality, layer by layer. No torch until a tensor is read.

Beside `<operand>.count` and `<operand>.sum_of_absmax` (see `static_range`) a layer has

* `<operand>.rows` (int64): how many inputs x were seen, of those that count, and `<operand>.sum_of_moments` (float32
  [blocks, b, b]): the blocks along the diagonal of the sum of x x^T, each weighed by how much noise in its place of the
  layer's output changes the model's, where gradients were measured. See `QuantSpec.second_moments`.
* `<operand>.total` (float32 [inputs]): the sum of x, weighed the same.
* `<path>.weight.count` (int32) and `<path>.weight.sum_of_gradient2` (float32 [out]): for how many calls of the model,
  and the sum over these of |row of G|^2, where G is the gradient of (v . y) / |y| by the layer's weight, y the model's
  output in that call and v as many standard normal numbers.

With H = E[x x^T], noise dW in the weight makes noise of about sum_o s_o dW_o H dW_o^T in y, relative to |y|^2 and on
average over calls. It is exact for independent errors of one size in a row: their noise is |dW_o|^2 E|G_o|^2 / inputs,
hence s_o = E|G_o|^2 / trace H.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ..errors import BadFileError
from .qconfig import OPERATIONS
from .statistics_file import component_in, names_in, read_tensor

if TYPE_CHECKING:
    from torch import Tensor

SUM = "sum_of_"  # as `static_range` has it, which imports torch
MOMENTS = f"{SUM}moments"
ROWS, TOTAL = "rows", "total"
GRADIENT = "gradient2"
_ROWS_AT_ONCE = 256
WEIGHT = "weight"  # the operand whose gradient it is


@dataclass(frozen=True, kw_only=True)
class LayerStatistics:
    """What calibration found about one layer. Tensors are read from the file when they are asked for.

    Attributes:
        file: path of the file. component: the layer's, in the file. path: of the layer in it. operand: of its input.
    """

    file: str
    component: str
    path: str
    operand: str

    @property
    def rows(self) -> int:
        """The number of inputs that were looked at. Raises BadFileError if it is no number."""
        return self._number(f"{self.operand}.{ROWS}")

    @property
    def second_moments(self) -> Tensor | None:
        """E[x x^T], float32 [blocks, b, b] with memory of their own; None if no input was seen.

        Raises:
            BadFileError: they are not numbers of this shape, mean squares are negative, or no inputs have such
                products.
        """
        rows, total = self.rows, self._read(f"{self.operand}.{MOMENTS}")
        if total is None or not rows:
            return None
        is_square = total.ndim == 3 and total.shape[1] == total.shape[2] and total.numel() > 0
        moments = self._finite(total, is_square).div_(rows)
        if bool((moments.diagonal(dim1=1, dim2=2) < 0).any()) or not _are_products(moments):
            raise self._damaged()
        return moments

    @property
    def mean_square(self) -> Tensor | None:
        """The mean squares of the inputs, the diagonal of `second_moments`, with its padding: float32 [inputs]."""
        blocks = self.second_moments
        return None if blocks is None else blocks.diagonal(dim1=1, dim2=2).flatten()

    @property
    def mean_input(self) -> Tensor | None:
        """E[x], float32 [inputs]; None if no input was seen, or if the file is of a version that did not sum them.

        Raises:
            BadFileError: they are not numbers of this shape, or larger than mean squares allow.
        """
        total, squares, rows = self._read(f"{self.operand}.{TOTAL}"), self.mean_square, self.rows
        if total is None or squares is None:
            return None
        mean = self._finite(total, total.ndim == 1 and 0 < total.numel() <= squares.numel()).div_(rows)
        if bool((mean.square() > 1.3 * squares[: len(mean)] + 1e-6 * squares.amax()).any()):
            raise self._damaged()
        return mean

    @property
    def sensitivity(self) -> Tensor | None:
        """s_o of each row of the weight, float32 [out] (see above); None if no gradient was measured. Raises
        BadFileError if a number is missing or negative."""
        total, squares = self._read(self._of_weight(SUM + GRADIENT)), self.mean_square
        count = self._number(self._of_weight("count"))
        if total is None or squares is None or not count:
            return None
        sums = self._finite(total, total.ndim == 1)
        if bool((sums < 0).any()):
            raise self._damaged()
        return self._finite(sums / (count * squares.double().sum().clamp(min=1e-30)), True)

    def _number(self, name: str) -> int:
        """Return a count, 0 if there is none."""
        value = self._read(name)
        if value is None:
            return 0
        if value.numel() != 1 or not 0 <= float(value) < math.inf:
            raise self._damaged()
        return int(value)

    def _finite(self, values: Tensor, is_so: bool) -> Tensor:
        """Return values as float32 if they are finite floats, and something else is so. Raises BadFileError."""
        floats = values.float()
        if is_so and values.is_floating_point() and bool(floats.isfinite().all()):
            return floats
        raise self._damaged()

    def _damaged(self) -> BadFileError:
        return BadFileError(
            f"Cannot use the statistics of {self.path!r} in {self.file}",
            "they are damaged: numbers are missing, not finite, negative, or contradict each other",
            "Create them again with `sdquant calibrate`",
        )

    def _of_weight(self, what: str) -> str:
        return f"{self.path}.{WEIGHT}.{what}" if self.path else f"{WEIGHT}.{what}"

    def _read(self, name: str) -> Tensor | None:
        whole = f"{self.component}.{name}" if self.component else name
        return read_tensor(self.file, whole) if whole in names_in(self.file) else None


def _are_products(moments: Tensor) -> bool:
    """Return whether these can be E[x x^T], float32 [blocks, n, n]: symmetric, and no product above the root of the
    squares of its two inputs, but for rounding (an eighth in float8, of both)."""
    squares = moments.diagonal(dim1=1, dim2=2)
    least = 1e-6 * squares.amax()
    for start in range(0, moments.shape[1], _ROWS_AT_ONCE):  # no second copy in memory
        rows = slice(start, start + _ROWS_AT_ONCE)
        most = (squares[:, rows, None] * squares[:, None]).sqrt_().add_(least)
        some = moments[:, rows]
        if bool((some.abs() > 1.3 * most).any()) or bool(((some - moments[:, :, rows].mT).abs() > 0.01 * most).any()):
            return False
    return True


class ComponentStatistics(Mapping[str, LayerStatistics]):
    """The layers of one component in a file of statistics, by path. `get` knows all spellings of a path.

    Args:
        component: its name; "" is the only UNet or transformer in the file.

    Raises:
        SettingsError, BadFileError: as `read_statistics`.
    """

    def __init__(self, file: str, component: str) -> None:
        self._file, self._component = file, component_in(file, component)
        self._operands = _operands(file, frozenset(names_in(file)), self._component)

    def __getitem__(self, path: str) -> LayerStatistics:
        from .core.static_range import spellings

        known = next(one for one in [*spellings(path), None] if one is None or one in self._operands)
        if known is None:
            raise KeyError(path)
        return LayerStatistics(
            file=self._file, component=self._component, path=known, operand=self._operands[known]
        )  # fmt: skip

    def __iter__(self) -> Iterator[str]:
        return iter(self._operands)

    def __len__(self) -> int:
        return len(self._operands)

    @property
    def has_gradients(self) -> bool:
        """Return whether gradients of this component's output were measured."""
        end = f".{WEIGHT}.{SUM}{GRADIENT}"
        return any(name.endswith(end) and name.startswith(f"{self._component}.") for name in names_in(self._file))


@lru_cache(maxsize=16)
def _operands(file: str, names: frozenset[str], component: str) -> Mapping[str, str]:
    """Return the operand of each layer, by path."""
    from .core.static_range import operand

    prefix, end = f"{component}." if component else "", f".{ROWS}"
    names_of_rows = sorted(
        name.removeprefix(prefix).removesuffix(end) for name in names if name.endswith(end) and name.startswith(prefix)
    )
    ends = {operand("", operation): None for operation in OPERATIONS}
    return {name.rpartition(".")[0]: name for name in names_of_rows if name.rpartition(".")[2] in ends}
