"""What a format of another library's quantizer is: `portable="torchao"`, "bfl", "nunchaku_lite"."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import Packed


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """A quantized weight as a library stores it.

    Attributes:
        tensors: by the last part of their keys, which replaces "weight"; a bias that is stored otherwise is among them.
        metadata: what the file's metadata says of it, or the config.
        create: if given, creates the tensors when they are written; `tensors` are then on the meta device.
    """

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    create: Callable[[], Mapping[str, Tensor]] | None = None


def _all(stored: Mapping[str, StoredWeight]) -> Mapping[str, StoredWeight]:
    return stored


Writer = Callable[["Packed", str, "Tensor | None"], StoredWeight | None]


@dataclass(frozen=True, kw_only=True)
class LibraryFormat:
    """A format of another library's quantizer.

    Attributes:
        name: what the user types. title: for messages.
        file: written as one file, which diffusers reads with `from_single_file`; else as a folder.
        encoders: transformers reads it too.
        schemes: what stores a weight of each scheme that the format has. It takes the weight in file order, the dtype
            that its layer computes in, by name, and the layer's bias, and returns None for a weight that the format
            cannot represent.
        config: makes the `quantization_config` of a component, of the stored weights by name and the names of those
            that stay floats; {} if the format has none.
        metadata: makes that of the file, of the stored weights by name and the keys of all other tensors.
        choose: returns those of a component's weights that can be in one file.
    """

    name: str
    title: str
    file: bool
    encoders: bool
    schemes: Mapping[str, Writer]
    config: Callable[[Mapping[str, StoredWeight], list[str]], dict[str, Any]]
    metadata: Callable[[Mapping[str, StoredWeight], Collection[str]], dict[str, str]]
    choose: Callable[[Mapping[str, StoredWeight]], Mapping[str, StoredWeight]] = _all
