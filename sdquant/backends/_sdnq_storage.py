"""How SDNQ stored one weight, and whether its tensors are stored so. Needs no sdnq."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..core import INPUT_FIRST, ROTATION
from ._sdnq_codes import CODES, Code, code_named

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

OTHER = "sdnq-other"  # the scheme of all dtypes that have none of their own
# Keys in the details of a packed weight.
CODE, CODEBOOK = "code", "codebook"
SCALE, ZERO_POINT, TABLES = "scale_dtype", "zero_point_dtype", "codebook_scale"
DETAILS = (CODE, ROTATION, CODEBOOK, SCALE, ZERO_POINT, TABLES, INPUT_FIRST)
# Second-level scales: the factor and the offset of the first-level ones.
PARTS = (
    "weight", "scale", "zero_point", "scale_2", "scale_zero_point", "zero_point_scale", "zero_point_2", "svd_up",
    "svd_down",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Storage:
    """SDNQ's storage of a weight.

    Attributes:
        code: of the weight.
        codebook: a code is the index of a level; the levels lie in place of the scales.
        scales, zeros: the codes of the scales and zero points where these are quantized too, with a float32 factor (and
            an offset for unsigned codes) for all of them.
        tables: a code of these is the index of a level.
        hadamard: number of values that were rotated together along the flattened inputs; 0 for none.
        input_first: the weight is a transposed convolution's, [in, out, kernel...].
    """

    code: Code
    codebook: bool = False
    scales: Code | None = None
    zeros: Code | None = None
    tables: bool = False
    hadamard: int = 0
    input_first: bool = False

    @property
    def zero_point(self) -> bool:
        """True if each scale comes with a zero point."""
        return self.code.zero_point and not self.codebook

    @property
    def levels(self) -> int:
        """Number of scales, or levels of a codebook, for a group of weights."""
        return 1 << self.code.bits if self.codebook else 1

    @property
    def plain(self) -> bool:
        """True if scales are floats, one for each output or group of its inputs, and nothing was rotated."""
        return not (self.codebook or self.scales or self.zeros or self.hadamard or self.input_first)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the tensors besides those of an SVD."""
        names = ["weight", "scale", *_second("scale_2", "scale_zero_point", self.scales, self.tables)]
        if self.zero_point:
            names += ["zero_point", *_second("zero_point_scale", "zero_point_2", self.zeros, self.tables)]
        return tuple(names)


def _second(factor: str, offset: str, code: Code | None, tables: bool) -> tuple[str, ...]:
    if code is None:
        return ()
    return (factor, offset) if code.zero_point and not tables else (factor,)


def storage_of(scheme: str, details: Mapping[str, Any]) -> Storage:
    """Return the storage that a scheme and the details of a packed weight describe.

    Raises:
        ValueError: the details name a dtype that SDNQ does not have.
    """
    code = CODES[scheme] if scheme in CODES else code_of(details.get(CODE))
    if code is None:
        raise ValueError(f"{scheme} has no {CODE!r} in its details")
    return Storage(
        code=code,
        codebook=bool(details.get(CODEBOOK)),
        scales=code_of(details.get(SCALE)),
        zeros=code_of(details.get(ZERO_POINT)),
        tables=bool(details.get(TABLES)),
        hadamard=int(details.get(ROTATION, 0)),
        input_first=bool(details.get(INPUT_FIRST)),
    )


def code_of(name: str | None) -> Code | None:
    """Return the storage that SDNQ calls `name`; None if no name is given.

    Raises:
        ValueError: SDNQ has no such dtype.
    """
    if name is None or name == "none":
        return None
    code = code_named(name)
    if code is None:
        raise ValueError(f"SDNQ has no dtype {name!r}")
    return code


def stored_count(tensor: Tensor, code: Code) -> int:
    """Return the number of codes in a tensor."""
    return tensor.numel() * (len(code.fields) or 1) // code.unit


def group_shape(stored: Tensor, code: Code | None, shape: Shape, way: Storage, levels: int) -> Shape | None:
    """Return the shape of scales, zero points or levels once unpacked; None if they are too many or few.

    It is [out, 1, ...] or [out, groups, 1, ...], with a 1 for what all of a dimension share and `levels` in place of
    the 1 of the input channels, or [levels] alone. Of a transposed convolution it is [1, out, ...], or, where SDNQ
    splits the outputs into groups, [in, 1, groups, ...].

    Args:
        code: of the stored tensor; None for floats.
        levels: of a codebook, 1 for scales and zero points.
    """
    if code is None or not code.fields:
        return tuple(stored.shape)
    outputs = shape[1] if way.input_first else shape[0]
    count, row = stored_count(stored, code), outputs * math.prod(shape[2:]) * levels
    if count == levels:
        return (levels,) if levels > 1 else (1,) * len(shape)
    groups, rest = divmod(count, row)
    if rest or not groups:
        return None
    if way.input_first:
        return (shape[0], levels, groups, *shape[2:]) if groups > 1 else (levels, *shape[1:])
    return (shape[0], *((groups,) if groups > 1 else ()), levels, *shape[2:])


def split_shape(scales: Shape, shape: Shape, way: Storage) -> tuple[Shape, int]:
    """Return the shape that a weight has beside its unpacked scales, and the axis along which these are shared."""
    grouped = len(scales) == len(shape) + 1
    if way.input_first:
        groups = scales[2] if grouped else 1
        return ((shape[0], shape[1] // groups, groups, *shape[2:]), 1) if grouped else (shape, 0)
    groups = scales[1] if grouped else 1
    return ((shape[0], groups, shape[1] // groups, *shape[2:]), 2) if groups > 1 else (shape, 1)


def is_input_first(scale: Tensor, shape: Shape, way: Storage) -> bool:
    """Return whether scales or levels can only be those of a transposed convolution, whose weight is [in, out, ...]:
    [1, out, ...], or [in, 1, groups, ...]."""
    scales, levels = tuple(scale.shape), way.levels
    if len(shape) < 3 or (way.scales is not None and way.scales.fields) or _is_grouped(scales, shape, way):
        return False
    return _is_grouped(scales, shape, replace(way, input_first=True)) and len(scales) > 1 and scale.numel() > levels


def belong_together(way: Storage, shape: Shape, parts: Mapping[str, Tensor]) -> bool:
    """Return whether these are the parts of a weight of this shape, as `SDNQ` describes them."""
    if len(shape) < 2 or not set(way.parts) <= parts.keys() <= {*way.parts, "svd_up", "svd_down"}:
        return False
    scales = group_shape(parts["scale"], way.scales, shape, way, way.levels)
    if scales is None or not _is_grouped(scales, shape, way) or not _coded(way, shape, scales, parts["weight"]):
        return False
    if not _two_level(parts, way.scales, way.tables, "scale", "scale_2", "scale_zero_point"):
        return False
    if way.zero_point:
        if group_shape(parts["zero_point"], way.zeros, shape, way, 1) != scales:
            return False
        if not _two_level(parts, way.zeros, way.tables, "zero_point", "zero_point_scale", "zero_point_2"):
            return False
        if way.scales is None and way.zeros is None and parts["zero_point"].dtype != parts["scale"].dtype:
            return False
    return _low_rank(shape, parts)


def _is_grouped(scales: Shape, shape: Shape, way: Storage) -> bool:
    """Return whether a weight of this shape may have scales of that: for each output and group, and in a convolution
    for each kernel position or for all of them; or for the whole weight."""
    levels, grouped = way.levels, len(scales) == len(shape) + 1
    if scales == ((levels,) if levels > 1 else (1,) * len(shape)):
        return True
    if way.input_first:
        groups = scales[2] if grouped else 1
        return scales == ((shape[0], levels, groups, *shape[2:]) if grouped else (levels, *shape[1:])) and not (
            shape[1] % max(1, groups)
        )
    groups = scales[1] if grouped else 1
    if len(scales) != len(shape) + (groups > 1) or scales[0] != shape[0] or groups < 1 or shape[1] % groups:
        return False
    axis = 2 if groups > 1 else 1
    kernel = zip(scales[axis + 1 :], shape[2:], strict=True)
    return scales[axis] == levels and all(n in (1, k) for n, k in kernel)


def _coded(way: Storage, shape: Shape, scales: Shape, weight: Tensor) -> bool:
    code, split = way.code, split_shape(scales, shape, way)[0]
    units, rest = divmod(math.prod(shape), len(code.fields) or 1)
    if rest:
        return False
    stored = {(units,), (units, code.unit), (units * code.unit,)} if code.fields else {shape, split}
    return str(weight.dtype) == f"torch.{code.dtype}" and tuple(weight.shape) in stored


def _two_level(
    parts: Mapping[str, Tensor], code: Code | None, tables: bool, name: str, factor: str, offset: str
) -> bool:  # fmt: skip
    if code is None:
        return parts[name].is_floating_point() and parts[name].itemsize > 1
    if str(parts[name].dtype) != f"torch.{code.dtype}" or str(parts[factor].dtype) != "torch.float32":
        return False
    if tables:  # whose values its codes are the indices of
        return code.sdnq.startswith("uint") and tuple(parts[factor].shape) == (1 << code.bits,)
    return all(parts[one].numel() == 1 and parts[one].is_floating_point() for one in (factor, offset) if one in parts)


def _low_rank(shape: tuple[int, ...], parts: Mapping[str, Tensor]) -> bool:
    up, down = parts.get("svd_up"), parts.get("svd_down")
    if up is None and down is None:
        return True
    if up is None or down is None or up.ndim != 2 or not up.is_floating_point() or up.dtype != down.dtype:
        return False
    return tuple(down.shape) == (up.shape[1], math.prod(shape[1:])) and up.shape[0] == shape[0]
