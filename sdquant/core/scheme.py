"""Schemes: their names and options, and what users ask for with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The option of every scheme that also quantizes embeddings.
EMBEDDINGS = "embeddings"


@dataclass(frozen=True, kw_only=True)
class Option:
    """A user option of a scheme, written as `nf4,block_size=128` or `nf4,double_quant`.

    Attributes:
        library: it applies only to the library's modules, and selects them if the call names no runtime.
    """

    default: bool | int | str | None
    help: str
    choices: tuple[bool | int | str | None, ...] = ()
    library: bool = False


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A quantization scheme: one row of the registry.

    Attributes:
        name: canonical lower-case name, what the user types.
        backend: the backend that encodes and decodes it.
        bits: nominal bits per code, without scales.
        summary: one line for help and tables.
        group: number of weights that share a scale; None if it is a whole output row.
        runtimes: supported runtimes: "library" (the library's own modules), "plain" (sdquant's layers) or "openvino" (a
            whole component at once). The first determines which weights are quantized if the call names none, and is
            the default unless `compat.default_runtime` knows a faster one.
        library_kinds: the layer types ("linear", "conv", or only "Conv2d" of the convolutions) that the library has
            modules for. Plain layers exist for these and for "embedding".
        on_the_fly: float weights can be quantized to it while or after loading.
        least_bits: the fewest bits of any weight, if that is less than `bits`.
        options: user options, by name.
        aliases: other names of this scheme.
    """

    name: str
    backend: str
    bits: float
    summary: str
    group: int | None = None
    runtimes: tuple[str, ...] = ("plain",)
    library_kinds: frozenset[str] = frozenset()
    on_the_fly: bool = True
    options: Mapping[str, Option] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    least_bits: float | None = None

    def runs(self, runtime: str, kind: str, shape: tuple[int, ...]) -> bool:
        """Return whether `runtime` has a module for this layer type ("linear", "conv") with a weight of this shape.

        Not for embeddings, which are plain layers in every runtime.
        """
        return runtime != "library" or not self.library_kinds.isdisjoint({kind, layer_name(kind, shape)})


def layer_name(kind: str, shape: tuple[int, ...]) -> str:
    """Return the layer name of a layer type and weight shape: "conv" with a 5-dimensional weight is "Conv3d"."""
    return f"Conv{len(shape) - 2}d" if kind == "conv" else kind.capitalize()


@dataclass(frozen=True)
class QuantSpec:
    """A scheme with its options: the parsed form of `nf4,double_quant`.

    Attributes:
        options: the scheme's options that are set.
        embeddings: embeddings are quantized too (`nf4,embeddings`); an option of every scheme.
    """

    scheme: Scheme
    options: tuple[tuple[str, bool | int | str | None], ...] = ()
    embeddings: bool = False

    def __getitem__(self, name: str) -> Any:
        """Return the value of option `name`, or its default."""
        return dict(self.options).get(name, self.scheme.options[name].default)

    def of(self, name: str, shape: tuple[int, ...]) -> QuantSpec:
        """Return the spec for one weight, by its name and shape; it differs between weights only for rules.

        Raises:
            Unfit: the weight is not to be quantized; the message says why.
        """
        return self

    def of_component(self, name: str) -> QuantSpec:
        """Return the spec for the component of this name."""
        return self

    def described(self) -> str:
        """Return a string with everything that the encoded bits depend on."""
        return str(self)

    def __str__(self) -> str:
        words = [self.scheme.name]
        words += [name if value is True else f"{name}={value}" for name, value in self.options]
        words += [EMBEDDINGS] if self.embeddings else []
        return ",".join(words)


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """The package behind a backend: distribution name, least version that works, sdquant's extra that installs it."""

    package: str
    minimum: str
    extra: str
