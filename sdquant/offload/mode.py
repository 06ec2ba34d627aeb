"""`OffloadMode`: what there is to know of an offload mode. Each mode is a subclass in the file that has its name."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..core import OFFLOAD_MODES, check_offload_mode
from ..errors import SettingsError
from ..utils.byte_sizes import parse_budget

if TYPE_CHECKING:
    import os

    import torch
    from torch import nn

    from .handle import OffloadHandle


@dataclass(frozen=True, kw_only=True)
class ComponentSizes:
    """A component whose weights are only sizes in bytes.

    Attributes:
        module: on the meta device.
        tensors: tensor name to bytes, alignment of the host store included; tied ones once.
        opaque: bytes of weights that are tensor subclasses, which no file can hold.
        from_library: whether its quantized weights are in a library's own layers.
    """

    module: nn.Module
    tensors: Mapping[str, int]
    opaque: int = 0
    from_library: bool = False

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(self.tensors.values())

    def by_module(self, names: Iterable[str]) -> dict[str, int]:
        """Return the bytes in each of the modules of these dotted names; "" for those in none of them."""
        known = set(names)
        sizes: dict[str, int] = {}
        for tensor, nbytes in self.tensors.items():
            words = tensor.split(".")
            prefixes = (".".join(words[:count]) for count in range(len(words) - 1, 0, -1))
            owner = next((prefix for prefix in prefixes if prefix in known), "")
            sizes[owner] = sizes.get(owner, 0) + nbytes
        return sizes

    def by_leaf(self) -> dict[str, int]:
        """Return the bytes in each module that has no children; "" for those in none."""
        return self.by_module(
            name for name, module in self.module.named_modules() if name and not any(module.children())
        )


@dataclass(frozen=True, kw_only=True)
class OffloadOptions:
    """The options of `offload.apply`.

    Attributes:
        budget: bytes that weights may take on the device; None for a default.
        folder: for offloaded weights if the device is the CPU; None for the system's temporary folder.
        activations: peak bytes of activations, for the default budget; None if unknown.
    """

    budget: int | None = None
    folder: str | os.PathLike[str] | None = None
    activations: int | None = None


class OffloadMode(ABC):
    """An offload mode. Its file has one, `MODE`, and imports no torch.

    Attributes:
        name: of its file.
        summary: one line for users.
        order: of modes that copy equally much in every step, the fastest first.
        hooks: library whose hooks move the weights; None if no weight moves after `apply`.
        takes_budget: whether it keeps weights on the device up to a budget.
        takes_turns: whether components take turns on the device even if all of them fit.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    order: ClassVar[int]
    hooks: ClassVar[str | None] = "sdquant"
    takes_budget: ClassVar[bool] = False
    takes_turns: ClassVar[bool] = False

    @property
    def trains(self) -> bool:
        """Return whether a LoRA can be trained: sdquant's hooks hand backward the stored weights, others do not."""
        return self.hooks in (None, "sdquant")

    def __reduce__(self) -> tuple[Callable[[str], OffloadMode], tuple[str]]:
        """Pickle and copy a reference to the mode of this name."""
        return mode_named, (self.name,)

    def budget_bytes(self, budget: str | int | None) -> int | None:
        """Return a budget, such as "6GB", in bytes; None stays None.

        Raises:
            SettingsError: the budget is not a size, or this mode has none.
        """
        size = parse_budget(budget)
        if size is None or self.takes_budget:
            return size
        names = [name for name in OFFLOAD_MODES if mode_named(name).takes_budget]
        raise SettingsError(
            f"Cannot use budget={budget!r} with offload={self.name!r}",
            f"only {' and '.join(names)} offload keeps to a budget",
            f"Use offload={names[0]!r}, or remove the budget",
        )

    def needed(self, *, total: int, largest: int, least: int) -> int | None:
        """Return the bytes of weights that the device must have room for; None if only `peak` can tell.

        Args:
            total: bytes of all weights. largest: of the largest component. least: of its largest blocks and what is
                outside blocks.
        """
        return None

    def each_step(self, largest: int, room: int) -> int:
        """Return the bytes copied to the device in every step.

        Args:
            largest: bytes of the largest component. room: bytes that weights may take on the device.
        """
        return max(0, largest - room)

    @abstractmethod
    def peak(self, parts: Mapping[str, ComponentSizes], device: torch.device, budget: int | None) -> dict[str, int]:
        """Predict the bytes of weights on the device while each component runs, one after the other in this order.

        Args:
            budget: bytes, for a mode that takes one; else None.

        Raises:
            BudgetError: a component cannot run within the budget.
        """

    @abstractmethod
    def apply(
        self, parts: dict[str, nn.Module], handle: OffloadHandle, device: torch.device, options: OffloadOptions
    ) -> None:
        """Offload these components, and push what undoes it on `handle.undo`; see `offload.apply` for errors."""


def mode_named(name: str) -> OffloadMode:
    """Return the mode of this name. Raises UnknownOffloadError if there is none."""
    check_offload_mode(name)
    mode: OffloadMode = importlib.import_module(f".{name}", __package__).MODE
    return mode
