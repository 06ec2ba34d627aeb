"""Second moments of the inputs of a layer, x^T x, in blocks along the diagonal, and the inputs, summed exactly.

Inputs count by how much noise in their place of the layer's output changes that of the model (`output_gradients`): the
padding of a prompt is most of what many layers of a transformer see, and hardly changes the image.

Sums are whole numbers of a power of two of the layer's own (`step`), so that neither the order of calls nor their
distribution over processes changes a bit. The step is 2**-40 of the inputs' largest mean square in one short run before
all others, which is the same in every process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import Geometry
from ..errors import SettingsError
from ..kernels import im2col
from ..rules import layer_statistics

if TYPE_CHECKING:
    from ..utils.distributed import Processes

BLOCKS = (1024, 512, 256, 128, 64, 32, 1)  # inputs of a block, if not all
MAX_ROWS = 1024  # of x that a call adds at most, evenly spaced
_LEAST = 0.01  # of a mean row's weight is what a row has at least
_PRECISION = 40  # bits below the largest mean square of a short run
_ROOM = 62  # bits of a sum
EXACT, EXACT_TOTAL, STEP = "exact_moments", "exact_total", "moments_step"


def columns_of(module: nn.Module) -> int:
    """Return the columns of a layer's weight as a matrix."""
    return math.prod(module.get_parameter("weight").shape[1:])


def block_size(columns: Sequence[int], limit: int) -> int | None:
    """Return how many inputs a block may have so that all layers' moments take at most `limit` bytes; None for all.

    Raises:
        SettingsError: not even the diagonals fit.
    """
    if _bytes(columns, None) <= limit:
        return None
    for size in BLOCKS:
        if _bytes(columns, size) <= limit:
            return size
    raise SettingsError(
        f"Cannot keep the statistics in {limit} bytes",
        f"the mean squares of all inputs alone take {_bytes(columns, 1)}",
        "Raise the limit, or choose fewer components",
    )


def _bytes(columns: Sequence[int], block: int | None) -> int:
    return sum(4 * math.prod(block_shape(count, block)) for count in columns)


def block_shape(columns: int, block: int | None) -> tuple[int, int, int]:
    """Return the shape of the moments of so many inputs: [blocks, b, b]."""
    size = columns if block is None else min(block, columns)
    return -(-columns // size), size, size


def input_rows(module: nn.Module, x: Tensor, most: int = MAX_ROWS) -> Tensor:
    """Return what the rows of a layer's weight, as a matrix, are multiplied with: float32 [rows, columns].

    Of a grouped convolution, the inputs of all groups are rows.
    """
    if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        x = x.reshape(-1, x.shape[-1])
        return x[chosen_rows(len(x), most, x.device)].float()
    x = x[None] if x.ndim == module.weight.ndim - 1 else x
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
    how = Geometry(stride=module.stride, padding=(0,) * (x.ndim - 2), dilation=module.dilation, groups=module.groups)
    view = im2col.patches(x, module.kernel_size, how)  # [b, *places, in, *kernel]
    places = view.shape[: x.ndim - 1]
    index = torch.unravel_index(chosen_rows(math.prod(places), most, x.device), places)
    return view[index].reshape(-1, columns_of(module)).float()


def _scaled(total: Tensor, step: int) -> Tensor:
    """Return a sum of integer multiples of 2 ** step as float32, rounded once."""
    return (total.double() * math.ldexp(1, step)).float()


def chosen_rows(count: int, most: int, device: torch.device) -> Tensor:
    """Return the places, evenly spaced, of at most `most` rows of `count`."""
    if count <= most:
        return torch.arange(count, device=device)
    return torch.arange(most, device=device) * count // most


@dataclass(kw_only=True)
class InputMoments:
    """The sums of x x^T and of x of one layer.

    Attributes:
        name: of the operand, see `layer_statistics`. shape: [blocks, b, b]. columns: of the weight.
        rows: number of x. largest: mean square of the input that has the largest, in the short run.
        step: exponent of the power of two that the sum of x x^T is a whole number of; see `_step_of_inputs` for that
            of x. total, inputs: the two sums, int64, on the CPU.
    """

    name: str
    shape: tuple[int, int, int]
    columns: int
    rows: int = 0
    largest: float = 0.0
    step: int = -_PRECISION
    total: Tensor | None = None
    inputs: Tensor | None = None

    def look(self, x: Tensor) -> None:
        """Note how large rows x [rows, columns] are."""
        if len(x):
            self.largest = max(self.largest, float(x.square().mean(dim=0).amax()))

    def begin(self) -> None:
        """Set the step by what `look` has seen."""
        power = math.frexp(self.largest)[1] if 0 < self.largest < math.inf else 0
        self.step = power - _PRECISION

    def add(self, x: Tensor, weights: Tensor | None = None) -> None:
        """Add rows x [rows, columns]. Where few of them count for all, only so few have been seen.

        Args:
            weights: squared gradients of each row, float32 [rows], whose roots it counts for: they are of one random
                sum of the output, so that squares differ by chance as well. None if all count alike.

        Raises:
            SettingsError: they are not finite, or a million times what the short run saw.
        """
        blocks, size, _ = self.shape
        count, scale = len(x), None
        if weights is not None and 0 < float(weights.sum()) < math.inf:
            weights = weights.sqrt()
            weights = weights / weights.sum() + _LEAST / count
            count = max(1, round(float(weights.sum().square() / weights.square().sum())))
            scale = (weights * (count / weights.sum())).sqrt()
            x = x * scale.unsqueeze(1)
        inputs = x.sum(0) if scale is None else scale @ x
        x = F.pad(x, (0, blocks * size - x.shape[1]))
        tiles = x.reshape(len(x), blocks, size).transpose(0, 1)  # [blocks, rows, b]
        product = tiles.square().sum(1)[..., None] if size == 1 else tiles.transpose(1, 2) @ tiles
        units = product.cpu() * 2.0**-self.step
        most = float(units.abs().amax()) if units.numel() else 0.0
        if not most < 2.0 ** (_ROOM - 8):  # NaN, too
            raise SettingsError(
                f"Cannot calibrate {self.name}",
                "its input has values that are not finite, or far larger ones than in the first step",
                "Look for the earlier layer that produces them; bfloat16 instead of float16 often helps",
            )
        added = units.round().to(torch.int64)
        added_inputs = (inputs.cpu().double() * 2.0**-self._step_of_inputs).round().to(torch.int64)
        self.total = added if self.total is None else self.total.add_(added)
        self.inputs = added_inputs if self.inputs is None else self.inputs.add_(added_inputs)
        self.rows += count

    @property
    def _step_of_inputs(self) -> int:
        """The exponent of the power of two that the sum of x is a whole number of."""
        return (self.step + _PRECISION) // 2 - _PRECISION

    def _sums(self) -> tuple[Tensor, Tensor]:
        """Return the sums, zero if there was no input."""
        total = torch.zeros(self.shape, dtype=torch.int64, device="cpu") if self.total is None else self.total
        inputs = torch.zeros(self.columns, dtype=torch.int64, device="cpu") if self.inputs is None else self.inputs
        return total, inputs

    def to_dict(self, *, exact: bool) -> dict[str, Tensor]:
        """Return named tensors: the sum as float32, or exact."""
        total, inputs = self._sums()
        rows = {f"{self.name}.{layer_statistics.ROWS}": torch.tensor(self.rows, dtype=torch.int64, device="cpu")}
        if exact:
            step = torch.tensor(self.step, dtype=torch.int32, device="cpu")
            exact_sums = {f"{self.name}.{EXACT}": total, f"{self.name}.{EXACT_TOTAL}": inputs}
            return {**rows, **exact_sums, f"{self.name}.{STEP}": step}
        if not self.rows:
            return rows
        sums = _scaled(total, self.step)
        inputs = _scaled(inputs, self._step_of_inputs)
        return {
            **rows,
            f"{self.name}.{layer_statistics.MOMENTS}": sums,
            f"{self.name}.{layer_statistics.TOTAL}": inputs,
        }

    def load(self, known: Mapping[str, Tensor]) -> None:
        """Load what `to_dict(exact=True)` returned, without the name."""
        self.rows, self.step = int(known[layer_statistics.ROWS]), int(known[STEP])
        self.total, self.inputs = known[EXACT].clone(), known[EXACT_TOTAL].clone()

    def merge(self, processes: Processes) -> None:
        """Add the sums of all processes."""
        self.total, self.inputs = map(processes.summed, self._sums())
        self.rows = sum(processes.gathered(self.rows))
