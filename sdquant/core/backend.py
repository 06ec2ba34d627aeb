"""What a backend is, and the values that pass between a backend and the rest.

A backend turns float weights into *packed* ones and back. Packed is a few plain tensors (`parts`) and a small frozen
description (`PackedSpec`), nothing else, so that moving, saving and copying need no knowledge of the backend.
Nothing here imports torch at run time: rows and layouts are read by the planner, which knows only names and shapes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .packed_layout import Activations, Form

# Sizes in bits of the dtypes that occur in files, by safetensors-independent torch names.
DTYPE_BITS: Mapping[str, int] = {
    "float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8,
    "float8_e4m3fnuz": 8, "float8_e5m2fnuz": 8, "float8_e8m0fnu": 8,
    "int64": 64, "int32": 32, "int16": 16, "int8": 8, "uint64": 64, "uint32": 32, "uint16": 16, "uint8": 8, "bool": 8,
}  # fmt: skip


# The option of every scheme that asks for tables of embeddings to be quantized as well.
EMBEDDINGS = "embeddings"


# In the details of weights that no module of the scheme's library runs: `Found.plain_only`.
PLAIN_ONLY = "plain_only"
# In the details of weights with doubly quantized scales: what is added to all of them, a float32 number that belongs to
# the weight's values as its parts do.
OFFSET = "offset"


class Unfit(Exception):
    """This scheme cannot hold this weight (its text says why); the weight stays as it is and the plan reports it."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One plain tensor of a packed weight, before it exists: torch dtype name and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, kw_only=True)
class Option:
    """A choice that a scheme leaves to the user, given as `nf4,block_size=128` or `nf4,double_quant`.

    Attributes:
        library: whether it is about the library's modules alone: who gives it and names no runtime gets those.
    """

    default: bool | int | str | None
    help: str
    choices: tuple[bool | int | str | None, ...] = ()
    library: bool = False


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A name for how bits stand for weights: one row of the registry.

    Attributes:
        name: canonical lower-case name, what the user types.
        backend: the backend that encodes and decodes it.
        bits: nominal bits of one code, scales not counted.
        summary: one line for help and tables.
        group: how many weights share a scale; None where a whole output row does.
        runtimes: what can run it: "library" (the library's own modules), "plain" (sdquant's) or "openvino" (a whole
            component at once). The first says which weights are quantized where none is asked for, and is the default
            where `compat.runtimes` knows of no faster one.
        library_kinds: the kinds of layer ("linear", "conv", or "Conv2d" of the convolutions) that the library has
            modules for. There are plain ones for these and for "embedding".
        on_the_fly: whether float weights can be quantized to it while or after loading.
        least_bits: of any weight in it, where that is less than `bits`.
        options: what the user may choose, by name.
        aliases: other names that mean this scheme.
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
        """Whether `runtime` has a module for a layer of this kind ("linear", "conv") and with a weight of this shape.

        Tables of embeddings are plain layers in every runtime, as whoever asks knows.
        """
        return runtime != "library" or not self.library_kinds.isdisjoint({kind, layer_name(kind, shape)})


def layer_name(kind: str, shape: tuple[int, ...]) -> str:
    """A kind of layer with the dimensions of a convolution: "conv" with a weight of five dimensions is a "Conv3d"."""
    return f"Conv{len(shape) - 2}d" if kind == "conv" else kind.capitalize()


@dataclass(frozen=True)
class QuantSpec:
    """A scheme together with the options asked for: what `nf4,double_quant` is parsed into.

    Attributes:
        options: those of the scheme that were given.
        embeddings: whether tables of embeddings are quantized too (`nf4,embeddings`); every scheme can be asked that.
    """

    scheme: Scheme
    options: tuple[tuple[str, bool | int | str | None], ...] = ()
    embeddings: bool = False

    def __getitem__(self, name: str) -> Any:
        """The value of option `name`: as asked, else its default."""
        return dict(self.options).get(name, self.scheme.options[name].default)

    def of(self, name: str, shape: tuple[int, ...]) -> QuantSpec:
        """What is asked for one weight, by its name and shape: the same for all, but where rules differ by layer.

        Raises:
            Unfit: nothing is; its text says why.
        """
        return self

    def of_component(self, name: str) -> QuantSpec:
        """The same for the component of this name."""
        return self

    def described(self) -> str:
        """All that the bits of what is encoded depend on, as a text."""
        return str(self)

    def __str__(self) -> str:
        words = [self.scheme.name]
        words += [name if value is True else f"{name}={value}" for name, value in self.options]
        words += [EMBEDDINGS] if self.embeddings else []
        return ",".join(words)


@dataclass(frozen=True, kw_only=True)
class PackedSpec:
    """The description of a packed weight; JSON-able, and enough to decode its parts.

    Attributes:
        scheme: canonical scheme name.
        shape: shape of the float weight: [out, in] for linear, [out, in, k...] for convolutions.
        dtype: torch dtype name of the float weight that was encoded.
        details: what else the codec needs (block size, packing, offsets): JSON values only.
    """

    scheme: str
    shape: tuple[int, ...]
    dtype: str
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "scheme": self.scheme,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "details": dict(self.details),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PackedSpec:
        """The inverse of `to_dict`. Raises KeyError or TypeError if a field is missing or of the wrong kind."""
        return cls(
            scheme=values["scheme"],
            shape=tuple(int(n) for n in values["shape"]),
            dtype=values["dtype"],
            details=dict(values["details"]),
        )


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A quantized weight: its description and its plain tensors by part name."""

    spec: PackedSpec
    parts: Mapping[str, Tensor]

    def to(self, device: torch.device) -> Packed:
        """The same with its parts on `device`."""
        return Packed(spec=self.spec, parts={name: part.to(device) for name, part in self.parts.items()})

    @property
    def device(self) -> torch.device:
        """Where the parts are."""
        return next(iter(self.parts.values())).device

    @property
    def nbytes(self) -> int:
        """Bytes of all parts: what the weight takes in memory."""
        return sum(part.numel() * part.element_size() for part in self.parts.values())


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """A tensor as a header describes it: torch dtype name (or GGUF type name), logical shape, bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Found:
    """A quantized weight found in a file's header.

    Attributes:
        name: the weight's name as the model knows it, e.g. "proj.weight".
        scheme: canonical scheme name.
        keys: file key of each part.
        extra: file keys that belong to the weight but are not weights (code tables, descriptions).
        evidence: what in the header shows it, in words, the same for all weights of one format.
        details: what the header already says for `PackedSpec.details`.
        nbytes: of the parts in memory, where these are not as in the file.
        cut: set where the weight is only some rows of what the file holds; the fields above are those of the whole.
    """

    name: str
    scheme: str
    keys: Mapping[str, str]
    evidence: str
    extra: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    nbytes: int | None = None
    cut: Cut | None = None

    @property
    def plain_only(self) -> bool:
        """Whether the library that has the scheme has no module for this form of it."""
        return bool(self.details.get(PLAIN_ONLY))


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Some rows of a quantized weight of a file.

    Attributes:
        of: the weight. shape: of the whole as floats.
        rows: ranges of its first dimension; () for all of it.
        nbytes: what these rows take in memory.
    """

    of: Found
    shape: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]
    nbytes: int

    @property
    def count(self) -> int:
        """How many rows."""
        return sum(end - begin for begin, end in self.rows) if self.rows else self.shape[0]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """How a convolution moves over its input, a number for each of its dimensions. The input is padded already where
    that is not with zeros.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True, kw_only=True)
class Floats:
    """What `Backend.linear` or `convolve` does, as a product of floats.

    Attributes:
        x: takes the place of the activations.
        scales: by which the product is multiplied, one after another, each result rounded to the dtype of x. If there
            are any, x is multiplied by the codes of the weight, as numbers, else by the weight.
    """

    x: Tensor
    scales: tuple[Tensor, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """The package behind a backend: distribution name, least version that works, sdquant's extra that installs it."""

    package: str
    minimum: str
    extra: str


class Backend(ABC):
    """A quantization library, seen through the few operations that sdquant needs.

    A backend is one file in this folder (or an entry point in group `sdquant.backends`) with a module-level `BACKEND`.
    It imports its library inside its methods, so that listing backends costs nothing.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    requires: ClassVar[Requirement | None]
    schemes: ClassVar[tuple[Scheme, ...]]
    # What a runtime of its schemes needs beside that, by the runtime's name.
    runtime_requires: ClassVar[Mapping[str, Requirement]] = {}
    # The parts whose numbers are sizes of something: a file where one is negative is damaged.
    magnitudes: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, Part]:
        """The parts that `encode` makes of a weight of this shape and dtype. Pure arithmetic, no torch.

        Raises:
            Unfit: the scheme cannot hold such a weight.
        """

    @abstractmethod
    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        """Quantize a float weight ([out, in] or [out, in, k...]); the parts are on its device and own their memory."""

    @abstractmethod
    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """The float weight in `packed.spec.shape` and `dtype`."""

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        """Decode into `out` ([*packed.spec.shape], any float dtype). Override where a fresh tensor can be saved."""
        out.copy_(self.decode(packed, out.dtype))

    def spec_of(self, packed: PackedSpec) -> QuantSpec | None:
        """What was asked for when a weight of this description was encoded, where the description says it all."""
        return None

    def encode_as(self, weight: Tensor, packed: PackedSpec) -> Packed | None:
        """A float weight quantized as one of this description was, without the parts that do not come from the weight;
        None where the description does not say how."""
        return None

    def computes(self, packed: PackedSpec) -> bool:
        """Whether the products with such a weight are `linear` and `convolve`, and not those with the float weight."""
        return False

    def linear(self, packed: Packed, x: Tensor) -> Tensor:
        """x [..., in] times the transposed weight: [..., out] in x's dtype, without a bias."""
        raise NotImplementedError(f"{self.name} computes with float weights")

    def convolve(self, packed: Packed, x: Tensor, geometry: Geometry) -> Tensor:
        """x [b, in, ...] convolved with the weight: [b, out, ...] in x's dtype, without a bias."""
        raise NotImplementedError(f"{self.name} computes with float weights")

    def form(self, packed: Packed) -> Form | None:
        """How the numbers lie in the parts, for the kernels; None where no form says it, and `decode_into` alone can
        read them."""
        return None

    def activations(self, packed: Packed) -> Activations | None:
        """How `linear` makes integers of activations, for the kernels; None where it does something else."""
        return None

    def as_floats(self, packed: Packed, x: Tensor) -> Floats | None:
        """What `linear` or `convolve` does, where that is a product of floats, which kernels have; else None."""
        return None

    def by_row(self, packed: Packed) -> bool:
        """Whether `rows_by` gives the parts of some rows: every part holds the weight's rows one after the other, or is
        one number for all of them.

        Then the parts of some rows are the packed form of those rows, and a table of embeddings decodes only what is
        looked up in it.
        """
        return False

    def rows_by(self, packed: Packed, chosen: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The parts of some rows of a weight that is packed `by_row`. `chosen`: those of a tensor which holds the rows
        one after the other, or is one number for all."""
        return {name: chosen(part) for name, part in packed.parts.items()}

    def missing(self, found: Found) -> str | None:
        """The file key of a part that a weight found in a header needs and does not have; None if all are there."""
        return None

    def for_kernels(self, packed: Packed) -> Packed:
        """The same weight, its bytes in the order in which the kernels of GPUs read them best, under another part name;
        itself where that is the order that it is in."""
        return packed

    def for_files(self, packed: Packed) -> Packed:
        """The inverse of `for_kernels`: the parts that `encode` makes, and that files hold."""
        return packed

    def cuttable(self, packed: Packed) -> Packed:
        """The same weight, decoding to the same bits, packed by row where it can be: rows of it are to be taken."""
        return packed

    def sound(self, packed: Packed) -> bool:
        """Whether the scales that lie among the codes, if any do, are finite numbers.

        Asked of every weight that a file holds before it is used, so it must be fast and copy little. Parts that are
        float tensors, and their signs, are looked at elsewhere.
        """
        return True

    # The library's own modules, for schemes whose `runtimes` name "library".

    def to_library(self, module: nn.Module, packed: Packed, spec: QuantSpec | None = None) -> nn.Module:
        """The library's module in place of the float `module`, whose weight may be on the meta device; same bias."""
        raise NotImplementedError(f"{self.name} has no library modules")

    def from_library(self, module: nn.Module) -> Packed | None:
        """The packed weight inside one of the library's modules; None if the module is not one of them."""
        return None

    # Files.

    def key(self, name: str, part: str, spec: PackedSpec) -> str:
        """The file key of a part of weight `name` (e.g. "proj.weight"), by the habits of the backend's ecosystem."""
        return f"{name}.{part}"

    def write(self, name: str, packed: Packed) -> dict[str, Tensor]:
        """The file's tensors for one weight; more than the parts where the ecosystem's readers expect more."""
        return {self.key(name, part, packed.spec): tensor for part, tensor in packed.parts.items()}

    def find(self, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[Found]:
        """The quantized weights of this backend in a file's header (names to infos) and its folder's config.json."""
        return []

    def read(self, found: Found, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        """Read a found weight; `get` reads one tensor by file key.

        Args:
            shape: of the float weight, from the model. None where no model is known: then the file is believed.

        Raises:
            BadFileError: the parts do not belong together.
            Unfit: `shape` is None and the file does not tell it.
        """
        raise NotImplementedError(f"{self.name} reads no foreign files")

    def config(self, spec: QuantSpec, dtype: str) -> dict[str, Any] | None:
        """The `quantization_config` by which diffusers or transformers read what `write` wrote; None if they cannot."""
        return None
