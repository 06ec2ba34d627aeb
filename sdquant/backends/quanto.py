"""optimum-quanto: qint8, qint4, qint2, qfloat8, and a qint3 that it does not have.

Codes, scales and shifts are those of `quanto.quantize(model); quanto.freeze(model)`, bit for bit, in the layout that
quanto saves. Two exceptions: a row of zeros in qfloat8 gets codes 0 where quanto gets NaN, and qint3 is ours: quanto's
scale search and rounding (`MaxOptimizer` with 3 bits), with eight codes packed into three bytes.

quanto compiles a C++ extension when it first unpacks 4 or 2 bits; here it never does: see `_quanto_extension`.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, ClassVar

from ..core import (
    BIAS,
    BIAS_OPTION,
    GPTQ,
    GPTQ_OPTION,
    RANGE,
    RANGE_OPTION,
    Backend,
    Option,
    Packed,
    PackedLayout,
    PackedSpec,
    PrequantizedWeight,
    QuantSpec,
    Requirement,
    Scheme,
    TensorInfo,
    TensorSpec,
    dtype_name,
)
from . import _quanto_files as files
from ._quanto_layout import BITS, check, group_of_all, group_of_row, parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn


def _scheme(name: str, bits: float, summary: str, group: int | None = None, aliases: tuple[str, ...] = ()) -> Scheme:
    return Scheme(
        name=name,
        backend="quanto",
        bits=bits,
        summary=summary,
        group=group,
        runtimes=("library", "plain"),
        library_kinds=frozenset({"linear", "Conv2d"}),
        aliases=aliases,
        options={GPTQ: GPTQ_OPTION, RANGE: RANGE_OPTION, BIAS: BIAS_OPTION} if bits < 8 else {},
    )


class Quanto(Backend):
    """The optimum-quanto backend; see the module."""

    name: ClassVar[str] = "quanto"
    title: ClassVar[str] = "optimum-quanto"
    requires: ClassVar[Requirement | None] = Requirement(package="optimum-quanto", minimum="0.2.7", extra="quanto")
    magnitudes: ClassVar[frozenset[str]] = frozenset({"scale"})
    schemes: ClassVar[tuple[Scheme, ...]] = (
        _scheme("qint8", 8, "8-bit integers, a scale per output row"),
        _scheme("qfloat8", 8, "float8 e4m3, a scale per output row", aliases=("qfloat8_e4m3fn",)),
        _scheme("qint4", 4, "4-bit integers with scale and shift, in groups of 128", group=128),
        Scheme(
            name="qint3",
            backend="quanto",
            bits=3,
            summary="3-bit integers with scale and shift, in groups of 128 (packing by sdquant)",
            group=128,
            options={
                "group_size": Option(default=128, help="weights that share a scale and a shift", choices=(128, 64, 32)),
                GPTQ: GPTQ_OPTION,
                RANGE: RANGE_OPTION,
                BIAS: BIAS_OPTION,
            },
        ),
        _scheme("qint2", 2, "2-bit integers with scale and shift, in groups of 128", group=128),
    )

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        check(spec.scheme.name, shape, dtype)
        return parts_of(spec.scheme.name, shape, dtype, _group(spec, shape))

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        from ._quanto_codec import encode

        scheme, shape, dtype = spec.scheme.name, tuple(weight.shape), dtype_name(weight.dtype)
        check(scheme, shape, dtype)
        group = _group(spec, shape)
        details = {"group_size": group} if spec.scheme.bits < 8 else {}
        described = PackedSpec(scheme=spec.scheme, shape=shape, dtype=dtype, details=details)
        layout = parts_of(scheme, shape, dtype, group)
        return Packed(spec=described, parts=encode(weight, scheme, group, layout))

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        from ._quanto_codec import decode_into

        decode_into(packed, out)

    def form(self, packed: Packed) -> PackedLayout | None:
        from ._quanto_layout import PACKINGS

        scale, shift = packed.parts["scale"], packed.parts.get("shift")
        rows, columns = packed.spec.shape[0], math.prod(packed.spec.shape[1:])
        group = packed.spec.details.get("group_size") or columns
        bits = BITS[packed.spec.scheme.name]
        if scale.ndim == 0:
            group = rows * columns
        if scale.numel() != rows * columns // group:  # a scale for each weight of a single row
            return None
        whole = shift is not None and not shift.is_floating_point()
        if whole and bits == 8:
            return None
        data = dtype_name(packed.parts["data"].dtype)
        return PackedLayout(
            rows=rows,
            columns=columns,
            codes="data",
            packing=data if bits == 8 else PACKINGS[bits],
            group=group,
            scale="scale",
            zero="shift" if whole else 0,
            zero_packing="int8",
            shift="shift" if shift is not None and not whole else "",
            arithmetic=dtype_name(scale.dtype),
        )

    def by_row(self, packed: Packed) -> bool:
        if packed.spec.scheme.name == "qint3":
            return bool(math.prod(packed.spec.shape[1:]) % packed.spec.details["group_size"] == 0)
        return BITS[packed.spec.scheme.name] == 8  # fewer bits: a byte holds codes of rows far apart

    def to_library(self, module: nn.Module, packed: Packed, spec: QuantSpec | None = None) -> nn.Module:
        from ._quanto_modules import to_library

        if packed.spec.scheme.name == "qint3":
            raise NotImplementedError("optimum-quanto has no 3-bit type; use runtime='plain' for qint3")
        return to_library(module, packed)

    def from_library(self, module: nn.Module) -> Packed | None:
        if "optimum.quanto" not in sys.modules:  # then nobody can have made one of its modules
            return None
        from ._quanto_modules import from_library

        return from_library(module)

    def key(self, name: str, part: str, spec: PackedSpec) -> str:
        return name + (files.data_key(spec.scheme.name) if part == "data" else f"._{part}")

    def write(self, name: str, packed: Packed) -> dict[str, Tensor]:
        tensors = super().write(name, packed)
        if packed.spec.scheme.name == "qint3":
            return tensors
        module = name.rpartition(".")[0]
        for buffer in files.BUFFERS:  # of quanto's activation quantization, which is off: one
            key = f"{module}.{buffer}" if module else buffer
            tensors[key] = packed.parts["scale"].new_ones(())
        return tensors

    def find(self, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
        return files.find(tensors, config)

    def missing(self, found: PrequantizedWeight) -> str | None:
        return files.missing(found)

    def read(self, found: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        return files.read(found, shape, get)

    def config(self, spec: QuantSpec, dtype: str) -> dict[str, Any] | None:
        word = files.CONFIG_NAMES.get(spec.scheme.name)
        return {"quant_method": "quanto", "weights_dtype": word, "modules_to_not_convert": None} if word else None


def _group(spec: QuantSpec, shape: tuple[int, ...]) -> int | None:
    """Return the group size for the details: None for 8 bits and if a whole row shares its scale."""
    if spec.scheme.name == "qint3":
        return group_of_all(shape, spec["group_size"])
    return group_of_row(shape) if spec.scheme.bits < 8 else None


BACKEND = Quanto()
