"""SDNQ's files: the scheme of a weight by its config, and checks of its tensors. Needs no sdnq."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from ..core import COMPUTE_DTYPES, ROTATION
from ..errors import UnsupportedFileError
from ._sdnq_codes import OF_DTYPE, code_named
from ._sdnq_storage import CODE, CODEBOOK, OTHER, SCALE, TABLES, ZERO_POINT, stored_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from ._sdnq_codes import Code
    from ._sdnq_storage import Storage


# Whether a weight may lie as [in, out]: as SDNQ's rule has it, or in a way that its config does not tell.
BY_RULE, EITHER = "by rule", "either"
# Codes, not packed, that SDNQ multiplies as they are; and those that it quantizes again for a product.
_NOT_OF_PRODUCTS = ("int16", "uint16", "float32")
_OF_PRODUCTS = (
    "int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float16", "bfloat16",
)  # fmt: skip


def of_weight(weight: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of one weight by SDNQ's config, which has some for all and some for named ones."""
    for pattern, own in (settings.get("modules_quant_config") or {}).items():
        if _matches(weight, [pattern]):
            return {**settings, **own}
    return settings


def products_of(weight: str, settings: Mapping[str, Any]) -> str:
    """Return how the settings of a weight say that it lies: "" as [out, in], or `BY_RULE`, or `EITHER`."""
    if not (settings.get("use_quantized_matmul") or settings.get("use_quantized_matmul_conv")):
        return ""
    code = settings.get("weights_dtype", "int8")
    usual = code if code == "uint8" else "int8" if "int" in code else "float8_e4m3fn" if "8" in code else "float16"
    if settings.get("quantized_matmul_dtype") not in (None, usual):
        return EITHER
    if not settings.get("use_quantized_matmul") or _matches(weight, settings.get("modules_to_not_use_matmul") or ()):
        return ""
    return BY_RULE


def stored_as(weight: str, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the scheme of one weight by its settings, and what the details of the packed weight say of its storage.

    Args:
        settings: of this weight, see `of_weight`.

    Raises:
        UnsupportedFileError: SDNQ has no such storage, or not the version that sdquant knows.
    """
    dtype = settings.get("weights_dtype", "int8")
    for name, patterns in (settings.get("modules_dtype_dict") or {}).items():
        if _matches(weight, patterns):
            dtype = _at_least(name.lower(), dtype)
            break
    code = _code(weight, dtype)
    details: dict[str, Any] = {}
    if code.sdnq not in OF_DTYPE:
        details[CODE] = code.sdnq
    for key, other in ((SCALE, None), (ZERO_POINT, SCALE)):
        # A zero point without a dtype of its own is stored like the scale.
        name = settings.get(key)
        name = settings.get(other) if other and name in (None, "none") else name
        if name not in (None, "none") and (key == SCALE or code.zero_point):
            details[key] = _code(weight, name).sdnq
    if settings.get("use_codebook"):
        if not (code.sdnq.startswith("uint") and code.bits <= 16):
            raise _unknown(weight, f"indices of a codebook in {code.sdnq!r}")
        details[CODEBOOK] = True
        details.pop(ZERO_POINT, None)
    if settings.get("use_codebook_scale") and details.keys() & {SCALE, ZERO_POINT}:
        details[TABLES] = True
    if settings.get("use_hadamard"):
        size = settings.get("hadamard_group_size") or 256
        if type(size) is not int or size < 4:
            raise _unknown(weight, f"rotated in groups of {size!r:.40}")
        details[ROTATION] = size
    return OF_DTYPE.get(code.sdnq, OTHER), details


def words(details: Mapping[str, Any]) -> str:
    """Return what is special about a weight's storage, in parentheses after a space; "" if nothing is."""
    said = [str(details[CODE])] if CODE in details else []
    said += ["Hadamard rotation"] if ROTATION in details else []
    said += ["codebook"] if CODEBOOK in details else []
    said += [f"scales in {details[SCALE]}"] if SCALE in details else []
    return f" ({', '.join(said)})" if said else ""


def _code(weight: str, dtype: Any) -> Code:
    code = code_named(str(dtype).lower())
    if code is None:
        raise _unknown(weight, repr(dtype))
    return code


def _unknown(weight: str, what: str) -> UnsupportedFileError:
    return UnsupportedFileError(
        f"Cannot read {weight}, stored by SDNQ as {what}",
        "sdquant only knows what sdnq 0.2.8 writes: integers and floats of 1 to 16 bits, and of 32",
        "Update sdquant, or load it with diffusers and the sdnq package",
    )


def _at_least(name: str, dtype: str) -> str:
    """Resolve a key of SDNQ's `modules_dtype_dict`: a dtype, or a minimum of bits ("minimum_6bit", "uint4bits")."""
    match = re.fullmatch(r"(?:minimum)?[-_]?(u?int)?(\d+)[-_]?(?:bits?)?", name)
    if match is None or not (name.startswith("minimum") or name.endswith(("bit", "bits"))):
        return name
    sign, least = match[1], int(match[2])
    bits = re.search(r"\d+", dtype)
    if bits is None or int(bits[0]) >= least:
        return dtype
    return f"uint{least}" if sign == "uint" or least <= 4 else f"int{least}"


def _matches(weight: str, patterns: Iterable[str]) -> bool:
    """Apply SDNQ's rule for naming weights: in full, by one dotted component, by ".prefix", or with stars."""
    for pattern in patterns:
        if pattern.startswith("."):
            hit = weight.startswith(pattern[1:])
        else:
            starred = "*" in pattern and re.match(pattern.replace(".*", "\\.*").replace("*", ".*"), weight)
            hit = pattern == weight or pattern in weight.split(".") or bool(starred)
        if hit:
            return True
    return False


def upright(
    parts: Mapping[str, Tensor], shape: tuple[int, ...], way: Storage, *, products: str
) -> dict[str, Tensor] | None:
    """Return the parts as [out, in] and the like; None if the shapes do not tell which way the weight lies.

    For its quantized products SDNQ writes weights that are not packed as [in, out], with their scales, and the factors
    of an SVD so in any case. `products`: see `products_of`.
    """
    from ..utils.buffers import dense

    made, turned = dict(parts), (math.prod(shape[1:]), shape[0])
    up, down = parts.get("svd_up"), parts.get("svd_down")
    low_rank = up is not None and down is not None and _lies(up, down, turned)
    if low_rank:
        made |= {name: dense(parts[name].t()) for name in ("svd_up", "svd_down")}
    weight, scale = parts["weight"], parts["scale"]
    if len(shape) < 2 or way.code.fields or tuple(weight.shape) != turned:
        return made
    if way.codebook or way.scales is not None or way.code.sdnq in _NOT_OF_PRODUCTS:
        return made  # for a product they are quantized again; only the factors of an SVD are turned
    if tuple(scale.shape) != (1, shape[0]):
        if scale.numel() != 1:
            return made
        if turned == shape:  # a square with one scale
            if not low_rank and (up is not None or not products):
                return made
            if products != BY_RULE or way.code.sdnq not in _OF_PRODUCTS:
                return None
            if not low_rank and (shape[0] < 32 or shape[0] % 16):
                return made
    made["weight"] = dense(weight.t()).view(shape)
    for part in {"scale", "zero_point"} & parts.keys():
        made[part] = parts[part].reshape(-1, *(1,) * (len(shape) - 1))
    return made


def _lies(up: Tensor, down: Tensor, turned: tuple[int, int]) -> bool:
    """Return whether the factors of an SVD are [rank, out] and [in, rank], and not [out, rank] and [rank, in]."""
    if (tuple(up.shape), tuple(down.shape)) == ((turned[1], len(down)), (len(down), turned[0])):
        return False
    return (tuple(up.shape), tuple(down.shape)) == ((len(up), turned[1]), (turned[0], len(up)))


def shape_of(parts: Mapping[str, Tensor], way: Storage, *, products: bool) -> tuple[int, ...] | None:
    """Infer the float weight's shape from the scale's: [out, 1, kernel...] or [out, groups, 1, kernel...]; None if that
    does not tell it. `products`: see `upright`."""
    scale, weight = parts["scale"], parts["weight"]
    if scale.ndim < 2 and not (way.scales and way.scales.fields) and scale.numel() != way.levels:
        return (0,)  # no scale of SDNQ's: `read` refuses it
    if way.scales and way.scales.fields:
        return None
    if scale.numel() == way.levels:  # for all: codes that are not packed have the shape, unless they lie as [in, out]
        return None if products or way.code.fields or weight.ndim < 2 else tuple(weight.shape)
    if scale.ndim < 2:
        return None
    numel = stored_count(weight, way.code)
    if scale.ndim == 2 and scale.shape[1] != way.levels:  # written as [in, out]
        return (scale.shape[1], numel // scale.shape[1])
    if scale.shape[0] == way.levels and scale.ndim > 2 and way.levels not in scale.shape[1:3]:  # [1, out, kernel...]
        return (numel // max(1, math.prod(scale.shape[1:])), *scale.shape[1:])
    grouped = scale.shape[1] != way.levels or (scale.ndim > 2 and scale.shape[2] == way.levels > 1)
    kernel = tuple(scale.shape[3 if grouped else 2 :])
    return (scale.shape[0], numel // max(1, scale.shape[0] * math.prod(kernel)), *kernel)


def float_dtype(dtypes: Iterable[str]) -> str:
    """Infer the model's float dtype from its unquantized tensors; SDNQ does not record it."""
    floats = Counter(dtype for dtype in dtypes if dtype in COMPUTE_DTYPES)
    return floats.most_common(1)[0][0] if floats else "bfloat16"
