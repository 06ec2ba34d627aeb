"""ComfyUI's own formats, those of its library comfy-kitchen (Apache-2.0), which is needed for its own products
alone (`runtime="library"`), as are Nunchaku's kernels.

What is made is equal to what comfy-kitchen makes of a float32 weight. Each format has a codec in a file of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from ..core import (
    BIAS,
    BIAS_OPTION,
    GPTQ,
    GPTQ_OPTION,
    RANGE,
    RANGE_OPTION,
    Backend,
    Expansion,
    LowRank,
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
)
from . import _comfy_find, _nunchaku_find, _nunchaku_kernels, _nvfp4_find
from ._nunchaku_kernels import CODES

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from ._comfy_codec import ComfyCodec


_RANK = Option(default=32, help="rank of the branch", choices=(16, 32, 48, 64, 80, 96, 112, 128))


def _options(name: str) -> dict[str, Option]:
    options = {GPTQ: GPTQ_OPTION} if name in ("w4a4", "comfy:nvfp4") else {}
    return options | ({RANGE: RANGE_OPTION, BIAS: BIAS_OPTION} if name == "comfy:nvfp4" else {})


def _scheme(name: str, bits: float, summary: str, group: int | None = None, *, on_the_fly: bool = True) -> Scheme:
    return Scheme(
        name=name, backend="comfy", bits=bits, summary=summary, group=group, on_the_fly=on_the_fly,
        runtimes=("plain", "library"), library_kinds=frozenset({"linear"}),
        options=_options(name),
        rotates=name in ("int8_convrot", "w4a8", "w6a8", "w4a4"),
    )  # fmt: skip


def _read_only(name: str, bits: float, summary: str, group: int) -> Scheme:
    return _scheme(name, bits, summary, group, on_the_fly=False)


def _svdquant(name: str, alias: str, codes: str, group: int) -> Scheme:
    return Scheme(
        name=name, backend="comfy", bits=4, group=group, aliases=(alias,), options={"rank": _RANK, GPTQ: GPTQ_OPTION},
        calibrated=True, runtimes=("plain", "library"), library_kinds=frozenset({"linear"}),
        summary=f"{codes} and a low-rank branch (SVDQuant), a scale per {group} weights",
    )  # fmt: skip


class Comfy(Backend):
    """See the module. Parts are those of the codecs."""

    name: ClassVar[str] = "comfy"
    title: ClassVar[str] = "ComfyUI"
    requires: ClassVar[Requirement | None] = None
    runtime_requires: ClassVar[Mapping[str, Requirement]] = {
        "library": Requirement(package="comfy-kitchen", minimum="0.2.40", extra="comfy")
    }
    library_in_layers: ClassVar[bool] = True
    magnitudes: ClassVar[frozenset[str]] = frozenset({"scale", "s_rel", "s_channel"})
    schemes: ClassVar[tuple[Scheme, ...]] = (
        _scheme("int8_convrot", 8, "8-bit integers of the rotated weight (ConvRot), a scale per output row"),
        _scheme("int8_row", 8, "8-bit integers, a scale per output row"),
        _scheme("int8_tensor", 8, "8-bit integers, one scale for the weight"),
        _scheme("w4a8", 4, "4-bit codes of 8-bit integers of the rotated weight, a scale per 16 and per row", 16),
        _scheme("w6a8", 6, "6-bit codes of 8-bit integers of the rotated weight, a scale per 16 and per row", 16),
        _scheme("w4a4", 4, "4-bit integers of the rotated weight (ConvRot), a scale per output row"),
        _svdquant("svdquant_w4a4", "svdq-int4", "4-bit integers", 64),
        _svdquant("svdquant_nvfp4", "svdq-nvfp4", "4-bit floats (E2M1)", 16),
        _read_only("awq_w4a16", 4, "4-bit integers, a scale and a zero point per 64 weights (AWQ)", 64),
        _scheme("mxfp8", 8, "8-bit floats (E4M3), a power of two as scale of 32 weights", 32),
        _scheme("comfy:nvfp4", 4, "4-bit floats (E2M1), an 8-bit float as scale of 16 weights, one for all", 16),
    )

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        return _codec(spec.scheme).layout(spec, shape, dtype)

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        return _codec(spec.scheme).encode(weight, spec)

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        _codec(packed.spec.scheme).decode_into(self.for_files(packed), out)

    def form(self, packed: Packed) -> PackedLayout | None:
        return None if self.is_for_kernels(packed) else _codec(packed.spec.scheme).form(packed)

    def by_row(self, packed: Packed) -> bool:
        return not self.is_for_kernels(packed) and _codec(packed.spec.scheme).by_row(packed)

    def rows_by(self, packed: Packed, chosen: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        return _codec(packed.spec.scheme).rows_by(packed, chosen)

    def cuttable(self, packed: Packed) -> Packed:
        return _codec(packed.spec.scheme).cuttable(self.for_files(packed))

    def low_rank(self, packed: Packed) -> LowRank | None:
        return None if self.is_for_kernels(packed) else _codec(packed.spec.scheme).low_rank(packed)

    def integers(self, packed: Packed) -> Expansion[Packed] | None:
        return _codec(packed.spec.scheme).integers(packed)

    # The order of Nunchaku's kernels, for schemes that both libraries can multiply.

    def is_for_kernels(self, packed: Packed) -> bool:
        return CODES in packed.parts

    def for_kernels(self, packed: Packed) -> Packed:
        from ._nunchaku_tiles import tiled

        return tiled(packed) if packed.spec.scheme.name in _nunchaku_kernels.SCHEMES else packed

    def for_files(self, packed: Packed) -> Packed:
        if not self.is_for_kernels(packed):
            return packed
        from ._nunchaku_tiles import natural

        return natural(packed)

    def has_library_order(self, packed: Packed, dtype: torch.dtype, device: str) -> bool:
        if packed.spec.scheme.name not in _nunchaku_kernels.SCHEMES:
            return False
        from . import _nunchaku_library, _nunchaku_tiles

        return _nunchaku_library.is_ready(packed.spec.scheme.name, device) and _nunchaku_tiles.can_tile(packed, dtype)

    def prepare_library(self, scheme: str, device: str) -> None:
        if scheme in _nunchaku_kernels.SCHEMES:
            from . import _nunchaku_library

            _nunchaku_library.import_layers(scheme, device)

    def library_linear(self, packed: Packed, x: Tensor, bias: Tensor | None) -> Tensor | None:
        if self.is_for_kernels(packed):
            from . import _nunchaku_library

            return _nunchaku_library.linear(packed, x, bias)
        if packed.spec.scheme.name == _nunchaku_find.NVFP4:
            return None
        from . import _comfy_library

        return _comfy_library.linear(packed, x, bias)

    def spec_of(self, packed: PackedSpec) -> QuantSpec | None:
        return None if packed.scheme.options else QuantSpec(packed.scheme)

    def encode_as(self, weight: Tensor, packed: PackedSpec) -> Packed | None:
        return _codec(packed.scheme).encode_as(weight, packed)

    def key(self, name: str, part: str, spec: PackedSpec) -> str:
        return _codec(spec.scheme).key(name, part)

    def write(self, name: str, packed: Packed) -> dict[str, Tensor]:
        return _codec(packed.spec.scheme).write(name, self.for_files(packed))

    def export(self, name: str, packed: Packed) -> dict[str, Tensor]:
        """Return the tensors of ComfyUI's own files for weight `name`; `packed` may be on the meta device."""
        return _codec(packed.spec.scheme).export(name, self.for_files(packed))

    def find(self, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
        return [
            *_comfy_find.find(tensors, config), *_nvfp4_find.find(tensors, config), *_nunchaku_find.find(tensors)
        ]  # fmt: skip

    def missing(self, found: PrequantizedWeight) -> str | None:
        if _nvfp4_find.has_branch(found):
            return _nvfp4_find.missing(found)
        if _nunchaku_find.ORDER in found.details or found.scheme == _nunchaku_find.NVFP4:
            return _nunchaku_find.missing(found)
        return _comfy_find.missing(found)

    def read(self, found: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        if _nunchaku_find.ORDER in found.details:
            from . import _nunchaku

            return _nunchaku.read(found, shape, get)
        packed = _codecs()[found.scheme].read(found, shape, get)
        if not found.details.get(_comfy_find.EXACT):
            return packed
        details = {**packed.spec.details, _comfy_find.EXACT: True}
        return replace(packed, spec=replace(packed.spec, details=details))


@lru_cache(maxsize=1)
def _codecs() -> Mapping[str, ComfyCodec]:
    # Inside a function, because the codecs import torch and listing schemes must not.
    from ._comfy_awq import Awq
    from ._comfy_int4 import Int4
    from ._comfy_int8 import Int8
    from ._comfy_mxfp8 import Mxfp8
    from ._comfy_nvfp4 import Nvfp4
    from ._comfy_svdquant import SvdQuant
    from ._comfy_svdquant_nvfp4 import SvdQuantNvfp4
    from ._comfy_w4a8 import W4A8

    return {
        **dict.fromkeys(("int8_convrot", "int8_row", "int8_tensor"), Int8()),
        **dict.fromkeys(("w4a8", "w6a8"), W4A8()),
        "w4a4": Int4(),
        "svdquant_w4a4": SvdQuant(),
        "svdquant_nvfp4": SvdQuantNvfp4(),
        "awq_w4a16": Awq(),
        "mxfp8": Mxfp8(),
        "comfy:nvfp4": Nvfp4(),
    }


def _codec(scheme: Scheme) -> ComfyCodec:
    return _codecs()[scheme.name]


BACKEND = Comfy()
