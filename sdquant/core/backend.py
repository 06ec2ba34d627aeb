"""The backend interface, and the data types that backends share with the rest of sdquant.

A backend quantizes float weights to *packed* ones and dequantizes them. A packed weight is a few plain tensors
(`parts`) and a small frozen description (`PackedSpec`), nothing else, so that moving, saving and copying need no
knowledge of the backend. Nothing here imports torch at run time: the planner uses schemes and layouts with only names
and shapes.
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

    from .packed_layout import Activations, PackedLayout
    from .scheme import QuantSpec, Requirement, Scheme

# Sizes in bits of the dtypes that occur in files, by torch name.
DTYPE_BITS: Mapping[str, int] = {
    "float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8,
    "float8_e4m3fnuz": 8, "float8_e5m2fnuz": 8, "float8_e8m0fnu": 8,
    "int64": 64, "int32": 32, "int16": 16, "int8": 8, "uint64": 64, "uint32": 32, "uint16": 16, "uint8": 8, "bool": 8,
}  # fmt: skip


# Key in the details of weights that no module of the scheme's library can run: `Found.plain_only`.
PLAIN_ONLY = "plain_only"
# Key in the details of weights with doubly quantized scales: a float32 number that is added to every scale.
OFFSET = "offset"


class Unfit(Exception):
    """The scheme cannot quantize this weight (the message says why); it stays as it is and the plan reports it."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Layout of one tensor of a packed weight: torch dtype name and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, kw_only=True)
class PackedSpec:
    """Description of a packed weight: JSON-serializable and sufficient to dequantize its parts.

    Attributes:
        scheme: canonical scheme name.
        shape: shape of the float weight: [out, in] for linear, [out, in, k...] for convolutions.
        dtype: torch dtype name of the float weight that was encoded.
        details: other parameters of the codec (block size, packing, offsets): JSON values only.
    """

    scheme: str
    shape: tuple[int, ...]
    dtype: str
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "scheme": self.scheme,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "details": dict(self.details),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PackedSpec:
        """Invert `to_dict`. Raises KeyError or TypeError if a field is missing or of the wrong kind."""
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
        """Return a copy with its parts on `device`."""
        return Packed(spec=self.spec, parts={name: part.to(device) for name, part in self.parts.items()})

    @property
    def device(self) -> torch.device:
        """Device of the parts."""
        return next(iter(self.parts.values())).device

    @property
    def nbytes(self) -> int:
        """Size of all parts in bytes."""
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
        evidence: description of how the header shows it, the same for all weights of one format.
        details: entries of `PackedSpec.details` that are known from the header.
        nbytes: size of the parts in memory, if it differs from the file.
        cut: set if the weight is only some rows of the tensors in the file; the fields above are those of the whole.
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
        """True if the scheme's library has no module for this variant, so that only plain layers can run it."""
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
        """Number of rows."""
        return sum(end - begin for begin, end in self.rows) if self.rows else self.shape[0]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Parameters of a convolution, one number per spatial dimension. For padding modes other than zeros the input is
    already padded.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True, kw_only=True)
class FloatGemm:
    """`Backend.linear` or `convolve` expressed as a floating-point GEMM.

    Attributes:
        x: replaces the activations.
        scales: factors of the product, applied one after another, each result rounded to the dtype of x. If there are
            any, x is multiplied by the codes of the weight as numbers, else by the dequantized weight.
    """

    x: Tensor
    scales: tuple[Tensor, ...] = ()


class Backend(ABC):
    """Interface to a quantization library: the few operations that sdquant needs.

    A backend is one file in this folder (or an entry point in group `sdquant.backends`) with a module-level `BACKEND`.
    It imports its library inside its methods, so that listing backends costs nothing.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    requires: ClassVar[Requirement | None]
    schemes: ClassVar[tuple[Scheme, ...]]
    # Additional requirements of a runtime of its schemes, by the runtime's name.
    runtime_requires: ClassVar[Mapping[str, Requirement]] = {}
    # Parts whose values are magnitudes: negative values mean that the file is damaged.
    magnitudes: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        """Return the parts that `encode` produces for a weight of this shape and dtype. Pure arithmetic, no torch.

        Raises:
            Unfit: the scheme cannot quantize such a weight.
        """

    @abstractmethod
    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        """Quantize a float weight ([out, in] or [out, in, k...]); the parts are on its device and own their memory."""

    @abstractmethod
    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """Dequantize to a tensor of `packed.spec.shape` and `dtype`."""

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        """Dequantize into `out` ([*packed.spec.shape], any float dtype). Override to avoid a temporary tensor."""
        out.copy_(self.decode(packed, out.dtype))

    def spec_of(self, packed: PackedSpec) -> QuantSpec | None:
        """Return the spec that a weight of this description was encoded with; None if the description is not enough."""
        return None

    def encode_as(self, weight: Tensor, packed: PackedSpec) -> Packed | None:
        """Quantize a float weight like one of this description, without the parts that do not depend on the weight;
        return None if the description is not enough."""
        return None

    def computes(self, packed: PackedSpec) -> bool:
        """Return whether `linear` and `convolve` compute products with such a weight, instead of dequantizing it."""
        return False

    def linear(self, packed: Packed, x: Tensor) -> Tensor:
        """Multiply x [..., in] by the transposed weight: [..., out] in x's dtype, without a bias."""
        raise NotImplementedError(f"{self.name} computes with float weights")

    def convolve(self, packed: Packed, x: Tensor, geometry: Geometry) -> Tensor:
        """Convolve x [b, in, ...] with the weight: [b, out, ...] in x's dtype, without a bias."""
        raise NotImplementedError(f"{self.name} computes with float weights")

    def form(self, packed: Packed) -> PackedLayout | None:
        """Return the memory layout of the parts for the kernels; None if no layout describes it and only `decode_into`
        can dequantize it."""
        return None

    def activations(self, packed: Packed) -> Activations | None:
        """Return how `linear` quantizes activations to integers, for the kernels; None if it does something else."""
        return None

    def as_floats(self, packed: Packed, x: Tensor) -> FloatGemm | None:
        """Express `linear` or `convolve` as a floating-point GEMM, which kernels can run; None if impossible."""
        return None

    def by_row(self, packed: Packed) -> bool:
        """Return whether every part is row-major over the output dimension (or a scalar), so that `rows_by` can slice
        rows.

        Then the parts of some rows are the packed form of those rows, and an embedding dequantizes only the rows that
        are looked up.
        """
        return False

    def rows_by(self, packed: Packed, chosen: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the parts for some rows of a weight that is packed `by_row`. `chosen` selects the rows of one tensor,
        which is row-major or a scalar."""
        return {name: chosen(part) for name, part in packed.parts.items()}

    def missing(self, found: Found) -> str | None:
        """Return the file key of a missing part of a weight found in a header; None if it is complete."""
        return None

    def for_kernels(self, packed: Packed) -> Packed:
        """Return the weight with its bytes reordered for GPU kernels, under another part name; unchanged if that is
        already their order."""
        return packed

    def for_files(self, packed: Packed) -> Packed:
        """Invert `for_kernels`: return the parts that `encode` produces and that files contain."""
        return packed

    def cuttable(self, packed: Packed) -> Packed:
        """Return the weight packed by row if possible, so that rows can be sliced. It dequantizes to the same bits."""
        return packed

    def sound(self, packed: Packed) -> bool:
        """Return whether all scales stored among the codes, if any, are finite.

        Called for every weight in a file before it is used, so it must be fast and copy little. Parts that are float
        tensors are checked elsewhere, including their signs.
        """
        return True

    # The library's own modules, for schemes whose `runtimes` name "library".

    def to_library(self, module: nn.Module, packed: Packed, spec: QuantSpec | None = None) -> nn.Module:
        """Build the library's module that replaces the float `module`, whose weight may be on meta; same bias."""
        raise NotImplementedError(f"{self.name} has no library modules")

    def from_library(self, module: nn.Module) -> Packed | None:
        """Return the packed weight inside one of the library's modules; None for other modules."""
        return None

    # Files.

    def key(self, name: str, part: str, spec: PackedSpec) -> str:
        """Return the file key of a part of weight `name` (e.g. "proj.weight"), by the ecosystem's convention."""
        return f"{name}.{part}"

    def write(self, name: str, packed: Packed) -> dict[str, Tensor]:
        """Return the tensors to write for one weight; more than the parts if the ecosystem's readers expect more."""
        return {self.key(name, part, packed.spec): tensor for part, tensor in packed.parts.items()}

    def find(self, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[Found]:
        """Find this backend's quantized weights in a file's header (names to infos) and its folder's config.json."""
        return []

    def read(self, found: Found, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        """Read a found weight; `get` reads one tensor by file key.

        Args:
            shape: of the float weight, from the model. None if no model is known: then the file is trusted.

        Raises:
            BadFileError: the parts are inconsistent.
            Unfit: `shape` is None and cannot be determined from the file.
        """
        raise NotImplementedError(f"{self.name} reads no foreign files")

    def config(self, spec: QuantSpec, dtype: str) -> dict[str, Any] | None:
        """Return the `quantization_config` for diffusers or transformers to read `write`'s output, if supported."""
        return None
