"""Quantization settings of one tensor, and the shape of its scales. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import SettingsError
from .calibration_method import CalibrationMethod, method
from .qtypes import QType, qtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class HowToQuantize:
    """Quantization settings of one tensor.

    Attributes:
        qtype: name of the type.
        channelwise_axes: axes along which every index has its own scale.
        tiled_axes: axis to the size of its tiles (int), or to one over their number (float). 1 is a scale for each
            number, 1.0 one for all.
        calibration_method: "absmax|minmax|rms|fixed[,numbers]".
        noise: see `to_codes`.

    Raises:
        SettingsError: a type or method that does not exist, an axis both tiled and channelwise, or a tile size that the
            type is not defined for.
    """

    qtype: str
    channelwise_axes: tuple[int, ...] = ()
    tiled_axes: Mapping[int, int | float] = field(default_factory=dict)
    calibration_method: str = "absmax"
    noise: Callable[[torch.Size], Tensor] | None = None

    def __post_init__(self) -> None:
        both = set(self.channelwise_axes) & set(self.tiled_axes)
        if both:
            raise SettingsError(
                f"Cannot make axis {min(both)} both tiled and channelwise", "it can only be one of them", "Remove one"
            )
        row = self.row
        if row.tile is not None and set(self.tiled_axes.values()) != {row.tile}:
            raise SettingsError(
                f"Cannot use {row.name} with tiles of {list(self.tiled_axes.values()) or 'no size'}",
                f"it has one scale for every {row.tile} numbers",
                f"Use tile_size={row.tile}",
            )
        method(self.calibration_method)  # refused here, not at first use

    @property
    def row(self) -> QType:
        """Return the type's entry in the table of types."""
        return qtype(self.qtype)

    @property
    def method(self) -> CalibrationMethod:
        """Return the calibration method, parsed."""
        return method(self.calibration_method)


def scale_shape(shape: Sequence[int], how: HowToQuantize) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor of this shape.

    Raises:
        SettingsError: a tile size that does not divide its axis.
    """
    sizes = tile_sizes(shape, how)
    return tuple(
        size if axis in how.channelwise_axes else size // sizes[axis] if axis in sizes else 1
        for axis, size in enumerate(shape)
    )


def tile_sizes(shape: Sequence[int], how: HowToQuantize) -> dict[int, int]:
    """Return the tile size of each tiled axis.

    Raises:
        SettingsError: one that does not divide its axis.
    """
    sizes = {}
    for axis, tile in how.tiled_axes.items():
        size = round(shape[axis] * tile) if isinstance(tile, float) else tile
        if size <= 0 or shape[axis] % size:
            raise SettingsError(
                f"Cannot quantize a tensor of shape {list(shape)} in tiles of {tile} along axis {axis}",
                f"{shape[axis]} is not a multiple of that",
                "Choose a size that divides it, or exclude this layer from the rule",
            )
        sizes[axis] = size
    return sizes
