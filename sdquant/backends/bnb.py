"""bitsandbytes: nf4 and fp4, LLM.int8() rows, and 8-bit floats. Formats and names are bitsandbytes' own (0.50)."""

from __future__ import annotations

import importlib.util
import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Any

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
    PackedSpec,
    PrequantizedWeight,
    QuantSpec,
    Requirement,
    Scheme,
    TensorInfo,
    TensorSpec,
)
from . import _bnb_find

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from ..core import PackedLayout
    from ._bnb_codec import Codec

_log = logging.getLogger(__name__)

_EIGHT_BIT_OPTIONS = {
    "wo": Option(
        default=False,
        help="quantize what transformers and diffusers keep in floats too: T5's wo, 1.5 GB of T5-XXL; they cannot read "
        "it then",
    ),
}
_FOUR_BIT_OPTIONS = {
    "double_quant": Option(default=False, help="quantize the scales too: 4.13 instead of 4.5 bits a weight"),
    "block_size": Option(
        default=64, help="how many weights share a scale", choices=(32, 64, 128, 256, 512, 1024, 2048, 4096)
    ),
    "compute_dtype": Option(
        default=None,
        help="what bitsandbytes' modules multiply in; by default the dtype of the activations",
        choices=(None, "float32", "bfloat16", "float16"),
        library=True,
    ),
    GPTQ: GPTQ_OPTION,
    RANGE: RANGE_OPTION,
    BIAS: BIAS_OPTION,
    **_EIGHT_BIT_OPTIONS,
}


def _scheme(name: str, bits: int, summary: str, options: Mapping[str, Option], group: int | None = None) -> Scheme:
    """Return a scheme that bitsandbytes has modules for."""
    return Scheme(
        name=name, backend="bnb", bits=bits, summary=summary, group=group, options=options,
        runtimes=("library", "plain"), library_kinds=frozenset({"linear"}),
    )  # fmt: skip


class Bnb(Backend):
    """The bitsandbytes backend. It delegates to the codec of each scheme."""

    name = "bnb"
    title = "bitsandbytes"
    requires = Requirement(package="bitsandbytes", minimum="0.48", extra="bnb")
    magnitudes = frozenset({"absmax", "nested_absmax", "scb", "scale"})
    schemes = (
        _scheme("nf4", 4, "4-bit NormalFloat of QLoRA, blocks of 64", _FOUR_BIT_OPTIONS, group=64),
        _scheme("fp4", 4, "4-bit float, blocks of 64", _FOUR_BIT_OPTIONS, group=64),
        Scheme(
            name="fp8",
            backend="bnb",
            bits=8,
            summary="8-bit float (E4M3), blocks of 256; reads and writes float8 files too",
            group=256,
            aliases=("fp8_scaled",),  # as its single files are called
            options={
                "packing": Option(
                    default="auto",
                    help="blockwise: bitsandbytes' codes; float8: torch's dtype with row scales, for other tools; "
                    "auto: blockwise where bitsandbytes is installed",
                    choices=("auto", "blockwise", "float8"),
                )
            },
        ),
        _scheme("bnb-int8", 8, "8-bit integers of LLM.int8(), a scale for each row", _EIGHT_BIT_OPTIONS),
    )

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        return _codec(spec.scheme.name, _packing(spec)).layout(spec, shape, dtype)

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        if spec.scheme.name == "fp8" and spec["packing"] == "auto" and _packing(spec) == "float8":
            _say_float8()
        return _codec(spec.scheme.name, _packing(spec)).encode(weight, spec)

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        if out.is_contiguous():
            _codec_of(packed.spec).decode_into(packed, out)
        else:
            out.copy_(self.decode(packed, out.dtype))

    def form(self, packed: Packed) -> PackedLayout | None:
        return _codec_of(packed.spec).form(packed)

    def by_row(self, packed: Packed) -> bool:
        return _codec_of(packed.spec).by_row(packed)

    def cuttable(self, packed: Packed) -> Packed:
        return _codec_of(packed.spec).cuttable(packed)

    def to_library(self, module: nn.Module, packed: Packed, spec: QuantSpec | None = None) -> nn.Module:
        return _codec_of(packed.spec).to_library(module, packed, spec)

    def from_library(self, module: nn.Module) -> Packed | None:
        packed = (codec.from_library(module) for codec in _codecs().values())
        return next((one for one in packed if one is not None), None)

    def key(self, name: str, part: str, spec: PackedSpec) -> str:
        return _bnb_find.key(name, part, spec)

    def write(self, name: str, packed: Packed) -> dict[str, Tensor]:
        return _codec_of(packed.spec).write(name, packed)

    def find(self, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
        return _bnb_find.find(tensors, config)

    def missing(self, found: PrequantizedWeight) -> str | None:
        return _bnb_find.missing(found)

    def read(self, found: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        return _codec(found.scheme, found.details.get("packing")).read(found, shape, get)

    def config(self, spec: QuantSpec, dtype: str) -> dict[str, Any] | None:
        return _codec(spec.scheme.name, _packing(spec)).config(spec, dtype)


@lru_cache(maxsize=1)
def _codecs() -> Mapping[str, Codec]:
    # Inside a function, because the codecs import torch and listing schemes must not.
    from ._bnb_fourbit import FourBit
    from ._bnb_fp8 import Blockwise
    from ._bnb_int8 import Int8
    from ._float8 import Float8

    return {"four-bit": FourBit(), "bnb-int8": Int8(), "blockwise": Blockwise(), "float8": Float8()}


def _codec(scheme: str, packing: str | None) -> Codec:
    return _codecs()[_bnb_find.packing_of(scheme, packing)]


def _codec_of(spec: PackedSpec) -> Codec:
    return _codec(spec.scheme.name, spec.details.get("packing"))


def _packing(spec: QuantSpec) -> str | None:
    """Return the requested packing; None if the scheme has only one."""
    if spec.scheme.name != "fp8":
        return None
    if spec["packing"] != "auto":
        return str(spec["packing"])
    return "blockwise" if importlib.util.find_spec("bitsandbytes") else "float8"


@lru_cache(maxsize=1)
def _say_float8() -> None:
    _log.warning("bitsandbytes is not installed: fp8 uses torch's float8 with one scale per row instead")


BACKEND = Bnb()
