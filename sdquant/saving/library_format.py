"""What a format of another library's quantizer is: `portable="torchao"`, `portable="bfl"`."""

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
        tensors: by the last part of their keys, which replaces "weight".
        metadata: what the file's metadata says of it.
    """

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LibraryFormat:
    """A format of another library's quantizer.

    Attributes:
        name: what the user types. title: for messages.
        file: written as one file, which diffusers reads with `from_single_file`; else as a folder.
        encoders: transformers reads it too.
        schemes: what stores a weight of each scheme that the format has. It takes the weight in file order and the
            dtype that its layer computes in, by name, and returns None for one that the format cannot represent.
        config: makes the `quantization_config` of a component, of the schemes of its weights and the names of those
            that stay floats; {} if the format has none.
        metadata: makes that of the file, of the stored weights by name and the keys of all other tensors.
    """

    name: str
    title: str
    file: bool
    encoders: bool
    schemes: Mapping[str, Callable[[Packed, str], StoredWeight | None]]
    config: Callable[[Collection[str], list[str]], dict[str, Any]]
    metadata: Callable[[Mapping[str, StoredWeight], Collection[str]], dict[str, str]]
