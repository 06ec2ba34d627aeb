"""What a backend says of its library's own layers and kernels, for schemes whose `runtimes` name "library"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .options import Requirement

P = TypeVar("P")  # `Packed`
S = TypeVar("S")  # `QuantSpec`


class LibraryRuntime(Generic[P, S]):
    """The part of `Backend` that is about running weights by a library: in modules of its own, or (with
    `library_in_layers`) in sdquant's layers, whose products are the library's."""

    # Additional requirements of a runtime of its schemes, by the runtime's name.
    runtime_requires: ClassVar[Mapping[str, Requirement]] = {}
    # The library runtime is sdquant's layers with the library's products (`library_linear`), not its modules.
    library_in_layers: ClassVar[bool] = False

    def to_library(self, module: nn.Module, packed: P, spec: S | None = None) -> nn.Module:
        """Build the library's module that replaces the float `module`, whose weight may be on meta; same bias."""
        raise NotImplementedError(f"{type(self).__name__} has no library modules")

    def from_library(self, module: nn.Module) -> P | None:
        """Return the packed weight inside one of the library's modules; None for other modules."""
        return None

    def library_linear(self, packed: P, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """With `library_in_layers`: multiply as `linear` and add the bias by the library's kernels, or return None."""
        return None

    def has_library_order(self, packed: P, dtype: torch.dtype, device: str) -> bool:
        """Return whether `library_linear` multiplies activations of `dtype` on `device` by such a weight in the order
        of `Backend.for_kernels` alone."""
        return False

    def prepare_library(self, scheme: str, device: str) -> None:
        """Import what `library_linear` needs for a scheme on `device`, before any weight is read.

        Raises:
            BackendUnavailableError: that fails.
        """
