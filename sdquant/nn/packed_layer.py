"""Protocol of a quantized layer, for the files of this package that must not import the layers themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ..core import Backend, Packed, PackedSpec


class PackedLayer(Protocol):
    """A layer whose weight is packed: `quantized_layers.QuantizedLayer`."""

    spec: PackedSpec
    part_names: tuple[str, ...]
    _backend: Backend
    _parameters: dict[str, nn.Parameter | None]
    _path: str

    @property
    def packed(self) -> Packed:
        """Return the packed weight."""

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight as floats."""

    def set_part(self, name: str, value: Tensor) -> None:
        """Replace one packed tensor."""

    def set_detail(self, name: str, value: Any) -> None:
        """Replace one entry of `spec.details`."""

    def _know(self, packed: Packed) -> None:
        """Take over the spec of another packed weight."""
