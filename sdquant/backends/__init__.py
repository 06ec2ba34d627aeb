"""The backends: a file for each library, with its codecs and its file format.

In: float weights, or the tensors of a file. Out: packed weights. May import `kernels`, `core`, `utils`.
A module here with a `BACKEND` is a backend (`core.registry` finds it), as is every entry point of the group
`sdquant.backends`. Modules whose name starts with an underscore are helpers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core import Backend, PrequantizedWeight, QuantSpec, Scheme
from ..core.registry import get, names, of_scheme, parse, scheme, schemes
from ..utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ._bnb_library import library as bnb_library
    from ._chunks import by_rows
    from ._comfy_find import EXACT as COMFY_EXACT
    from ._comfy_find import FORMATS as COMFY_FORMATS
    from ._comfy_find import METADATA as COMFY_METADATA
    from ._comfy_find import ORIGINAL_SHAPE as COMFY_ORIGINAL_SHAPE
    from ._comfy_find import REFUSED as COMFY_REFUSED
    from ._comfy_find import SHIFTED as COMFY_SHIFTED
    from ._comfy_find import details_of as comfy_details
    from ._comfy_find import entry as comfy_entry
    from ._encode import encode
    from ._float8_find import FORMATS as FLOAT8_FORMATS
    from ._float8_find import MARKER as FLOAT8_MARKER
    from ._gptq import unexplained
    from ._nunchaku import bias as nunchaku_bias
    from ._nunchaku import unshifted_bias as comfy_bias
    from ._nunchaku_find import ORDER as NUNCHAKU_ORDER
    from ._nunchaku_find import SPLITS as NUNCHAKU_SPLITS
    from ._nunchaku_find import SVDQUANT as NUNCHAKU_SCHEMES
    from ._nunchaku_find import is_text as is_nunchaku_text
    from ._nunchaku_find import picked as nunchaku_picked
    from ._nunchaku_find import piece as nunchaku_piece
    from ._nunchaku_kernels import REPOSITORY as NUNCHAKU_REPOSITORY
    from ._nunchaku_kernels import SCHEMES as NUNCHAKU_KERNELS
    from ._nunchaku_kernels import Lack, trusts_remote_kernels
    from ._nunchaku_kernels import lack as nunchaku_lack
    from ._nunchaku_order import picked as nunchaku_rows
    from ._nunchaku_pack import lite as nunchaku_lite
    from ._nunchaku_pack import lite_kind as nunchaku_lite_kind
    from ._nvfp4_find import COMFYUI, swizzle_told, ways_to_say
    from ._quanto_extension import without_compiler
    from ._without_effect import without_effect
else:
    __getattr__ = lazy_exports(__name__)

Found = PrequantizedWeight  # its name in the first backends outside of this package

__all__ = [
    "COMFYUI", "COMFY_EXACT", "COMFY_FORMATS", "COMFY_METADATA", "COMFY_ORIGINAL_SHAPE", "COMFY_REFUSED",
    "COMFY_SHIFTED", "FLOAT8_FORMATS", "FLOAT8_MARKER",
    "NUNCHAKU_KERNELS", "NUNCHAKU_ORDER", "NUNCHAKU_REPOSITORY", "NUNCHAKU_SCHEMES", "NUNCHAKU_SPLITS", "Backend",
    "Found", "Lack", "PrequantizedWeight",
    "QuantSpec", "Scheme", "bnb_library", "by_rows", "comfy", "comfy_bias", "comfy_details", "comfy_entry",
    "encode", "get",
    "gguf", "is_nunchaku_text", "names", "nunchaku_bias", "nunchaku_lack", "nunchaku_lite", "nunchaku_lite_kind",
    "nunchaku_picked", "nunchaku_piece", "nunchaku_rows", "of_scheme", "parse", "scheme", "schemes", "swizzle_told",
    "trusts_remote_kernels", "unexplained", "ways_to_say", "without_compiler", "without_effect",
]  # fmt: skip
