"""The backend interface, and the data types that backends share with the rest of sdquant.

A backend quantizes float weights to *packed* ones and dequantizes them. A packed weight is a few plain tensors
(`parts`) and a small frozen description (`PackedSpec`), nothing else, so that moving, saving and copying need no
knowledge of the backend. The description leads to the scheme, and the scheme to its backend (`Scheme.codec`), which is
why all of these are in one file. Nothing here imports torch at run time: the planner uses schemes and layouts with only
names and shapes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from .detail_keys import FACTOR, NUMBERS, OFFSET, ROTATION
from .dtypes import DTYPE_BITS, TensorInfo, TensorSpec
from .input_statistics import InputStatistics
from .library_runtime import LibraryRuntime
from .options import EMBEDDINGS, Option, Requirement, layer_name
from .packed_layout import FloatGemm, Geometry
from .prequantized_weight import PLAIN_ONLY, Cut, PrequantizedWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .expansion import Expansion
    from .low_rank import LowRank
    from .packed_layout import Activations, FloatRounding, PackedLayout

# All that a backend is written with.
__all__ = [
    "DTYPE_BITS", "FACTOR", "NUMBERS", "OFFSET", "PLAIN_ONLY", "ROTATION", "Backend", "Cut", "FloatGemm", "Geometry",
    "Option", "Packed", "PackedSpec", "PrequantizedWeight", "QuantSpec", "Requirement", "Scheme", "TensorInfo",
    "TensorSpec", "Unfit",
]  # fmt: skip


class Unfit(Exception):
    """The scheme cannot quantize this weight (the message says why); it stays as it is and the plan reports it."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A quantization scheme: one row of the registry.

    Attributes:
        name: canonical lower-case name, what the user types; `backend:name` where another backend has the name.
        backend: the name of the backend that encodes and decodes it.
        codec: that backend, once there is one.
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
        calibrated: weights are better quantized with the magnitudes of their inputs (`QuantSpec.magnitudes`).
        moments: the same, with the second moments of their inputs (`QuantSpec.second_moments`).
        rotates: each weight is rotated first, as option `hadamard` of others does; it belongs to the format.
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
    calibrated: bool = False
    moments: bool = False
    rotates: bool = False
    codec: Backend = field(init=False, repr=False, compare=False)

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> tuple[Callable[[type[Backend], str], Scheme], tuple[type[Backend], str]]:
        """Pickle and copy a reference to this row of its backend, whose file is all that unpickling imports."""
        return _row, (type(self.codec), self.name)

    def runs(self, runtime: str, kind: str, shape: tuple[int, ...]) -> bool:
        """Return whether `runtime` has a module for this layer type ("linear", "conv") with a weight of this shape.

        Not for embeddings, which are plain layers in every runtime.
        """
        return runtime != "library" or not self.library_kinds.isdisjoint({kind, layer_name(kind, shape)})


def _row(backend: type[Backend], name: str) -> Scheme:
    return next(row for row in backend.schemes if row.name == name)


@dataclass(frozen=True)
class QuantSpec(InputStatistics):
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

    @property
    def takes_statistics(self) -> bool:
        """Return whether a file of `sdquant calibrate` changes how weights are quantized."""
        options = [self.scheme.options[name] for name, value in self.options if value and name in self.scheme.options]
        has_option = any(one.uses_statistics for one in options)
        return self.scheme.calibrated or self.scheme.moments or has_option

    def described(self) -> str:
        """Return a string with everything that the encoded bits depend on."""
        return str(self)

    def __str__(self) -> str:
        words = [self.scheme.name]
        words += [name if value is True else f"{name}={value}" for name, value in self.options]
        return ",".join([*words, *([EMBEDDINGS] if self.embeddings else [])])


@dataclass(frozen=True, kw_only=True)
class PackedSpec:
    """Description of a packed weight: JSON-serializable and sufficient to dequantize its parts.

    `registry.packed_spec` inverts `to_dict`.

    Attributes:
        shape: shape of the float weight: [out, in] for linear, [out, in, k...] for convolutions.
        dtype: torch dtype name of the float weight that was encoded.
        details: other parameters of the codec (block size, packing, offsets): JSON values only.
    """

    scheme: Scheme
    shape: tuple[int, ...]
    dtype: str
    details: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def rotation(self) -> int:
        """Return the group size of the weight's rotation; 0 for none. See `Packed.without_rotation`.

        Raises:
            ValueError: there is no such rotation. Kernels write whole groups, so this must not be left to them.
        """
        size = self.details.get(ROTATION, 0)
        if size == 0:
            return 0
        from . import hadamard  # which imports torch

        if not hadamard.is_group(size) or len(self.shape) < 2 or self.shape[1] % size:
            raise ValueError(f"a weight of {list(self.shape)} cannot be rotated in groups of {size!r:.40}")
        return size  # type: ignore[no-any-return]

    @cached_property
    def without_rotation(self) -> PackedSpec:
        """Return the description of the rotated weight; see `Packed.without_rotation`."""
        return replace(self, details={name: value for name, value in self.details.items() if name != ROTATION})

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        named = {"scheme": self.scheme.name, "shape": list(self.shape), "dtype": self.dtype}
        return {**named, "details": dict(self.details)}


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A quantized weight: its description and its plain tensors by part name."""

    spec: PackedSpec
    parts: Mapping[str, Tensor]

    @property
    def without_rotation(self) -> Packed:
        """Return the same parts as the weight that they are if nothing is rotated back.

        A weight with a `rotation` was rotated along its inputs before it was quantized, group by group. It is a packed
        weight like any other: `Backend.decode` returns it in the model's own basis, and it has no memory layout
        (`Backend.form`). The same parts without the rotation in their description are the rotated weight R, which has
        one. Since a rotation is orthogonal, x W^T = rotate(x) R^T. Only `kernels.dispatch` and gradients compute with
        R, each beside the rotation of x or of the result.
        """
        return Packed(spec=self.spec.without_rotation, parts=self.parts)

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


class Backend(LibraryRuntime[Packed, QuantSpec], ABC):
    """Interface to a quantization library: the few operations that sdquant needs.

    A backend is one file in this folder (or an entry point in group `sdquant.backends`) with a module-level `BACKEND`.
    It imports its library inside its methods, so that listing backends costs nothing.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    requires: ClassVar[Requirement | None]
    schemes: ClassVar[tuple[Scheme, ...]]
    # Parts whose values are magnitudes: negative values mean that the file is damaged.
    magnitudes: ClassVar[frozenset[str]] = frozenset()

    def __new__(cls, *args: Any, **kwargs: Any) -> Backend:
        """Make the backend the codec of its schemes, unless another object of its class is that already."""
        backend = super().__new__(cls)
        for row in cls.schemes:
            vars(row).setdefault("codec", backend)
        return backend

    @abstractmethod
    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        """Return the parts that `encode` produces for a weight of this shape and dtype. Pure arithmetic, no torch.

        Raises:
            Unfit: the scheme cannot quantize such a weight.
        """

    @abstractmethod
    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        """Quantize a float weight ([out, in] or [out, in, k...]); the parts are on its device and own their memory."""

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """Dequantize to a tensor of `packed.spec.shape` and `dtype`. A backend overrides this or `decode_into`."""
        if type(self).decode_into is Backend.decode_into:
            raise NotImplementedError(f"{self.name} has neither decode nor decode_into")
        out = next(iter(packed.parts.values())).new_empty(packed.spec.shape, dtype=dtype)
        self.decode_into(packed, out)
        return out

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        """Dequantize into `out` ([*packed.spec.shape], any float dtype). Override to avoid a temporary tensor."""
        out.copy_(self.decode(packed, out.dtype))

    def spec_of(self, packed: PackedSpec) -> QuantSpec | None:
        """Return the spec that a weight of this description was encoded with; None if the description is not enough."""
        return None

    def encode_as(self, weight: Tensor, packed: PackedSpec) -> Packed | None:
        """Quantize a float weight like one of this description; return None if the description is not enough."""
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
        can dequantize it, as for every weight with a rotation (`without_rotation` has one)."""
        return None

    def activations(self, packed: Packed) -> Activations | None:
        """Return how `linear` quantizes activations to integers, for the kernels; None if it does something else."""
        return None

    def as_floats(self, packed: Packed, x: Tensor) -> FloatGemm | None:
        """Express `linear` or `convolve` as a floating-point GEMM, which kernels can run; None if impossible."""
        return None

    def float_rounding(self, packed: Packed, dtype: torch.dtype) -> FloatRounding | None:
        """Return how `as_floats` rounds activations [..., in] of `dtype` for a linear layer, if it does no more; else
        None."""
        return None

    def low_rank(self, packed: Packed) -> LowRank | None:
        """Return the residual and the low-rank branch that a weight is the sum of; None if it has no branch."""
        return None

    def integers(self, packed: Packed) -> Expansion[Packed] | None:
        """Return what expands a weight, for one product, to 8-bit integers and a scale per row; None if it has none."""
        return None

    def by_row(self, packed: Packed) -> bool:
        """Return whether `rows_by` can slice rows: every part is row-major over the outputs, a scalar or for all rows.
        Then an embedding dequantizes only the rows that are looked up."""
        return False

    def rows_by(self, packed: Packed, chosen: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the parts for some rows of a weight packed `by_row`. `chosen` selects the rows of one part."""
        return {name: chosen(part) for name, part in packed.parts.items()}

    def missing(self, found: PrequantizedWeight) -> str | None:
        """Return the file key of a missing part of a weight found in a header; None if it is complete."""
        return None

    def for_kernels(self, packed: Packed) -> Packed:
        """Return the weight with its bytes in the order of GPU kernels, under another part name if that is another."""
        return packed

    def for_files(self, packed: Packed) -> Packed:
        """Invert `for_kernels`: return the parts that `encode` produces and that files contain."""
        return packed

    def is_for_kernels(self, packed: Packed) -> bool:
        """Return whether the weight is as `for_kernels` returns it, which is not the order of files."""
        form = self.form(packed)
        return form is not None and form.apart

    def cuttable(self, packed: Packed) -> Packed:
        """Return the weight packed by row if possible, so that rows can be sliced. It dequantizes to the same bits."""
        return packed

    def sound(self, packed: Packed) -> bool:
        """Return whether all scales stored among the codes, if any, are finite.

        Called for every weight in a file before it is used, so it must be fast and copy little. Parts that are float
        tensors are checked elsewhere, including their signs.
        """
        return True

    def key(self, name: str, part: str, spec: PackedSpec) -> str:
        """Return the file key of a part of weight `name` (e.g. "proj.weight"), by the ecosystem's convention."""
        return f"{name}.{part}"

    def write(self, name: str, packed: Packed) -> dict[str, Tensor]:
        """Return the tensors to write for one weight; more than the parts if the ecosystem's readers expect more."""
        return {self.key(name, part, packed.spec): tensor for part, tensor in packed.parts.items()}

    def find(self, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
        """Find this backend's quantized weights in a file's header (names to infos) and its folder's config.json."""
        return []

    def read(self, found: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
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

    def config_of(self, weights: Mapping[str, Packed]) -> tuple[dict[str, Any], frozenset[str]] | None:
        """Return a `quantization_config` that describes as many of these weights as one can, by name, and the names of
        those; None if `config` for the scheme of most of them says as much."""
        return None
