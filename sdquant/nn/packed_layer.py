"""What the other files of this room need of a quantized layer, so that they do not import the layers themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ..core.backend import Backend, Packed, PackedSpec


class PackedLayer(Protocol):
    """A layer whose weight is packed: `quantized.QuantizedLayer`."""

    spec: PackedSpec
    part_names: tuple[str, ...]
    _backend: Backend
    _parameters: dict[str, nn.Parameter | None]
    _path: str

    @property
    def packed(self) -> Packed:
        """The packed weight."""

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight as floats."""

    def set_part(self, name: str, value: Tensor) -> None:
        """Replace one packed tensor."""

    def set_detail(self, name: str, value: Any) -> None:
        """Replace one number of the description."""

    def _know(self, packed: Packed) -> None:
        """Take over the description of another packed weight."""
