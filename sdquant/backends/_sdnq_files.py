"""SDNQ's files: the scheme of a weight by its config, and checks of its tensors. Needs no sdnq."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from ..core import COMPUTE_DTYPES
from ..errors import UnsupportedFileError
from ._sdnq_codes import OF_DTYPE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from ._sdnq_codes import Code


def scheme_of(weight: str, settings: Mapping[str, Any]) -> str:
    """Return the scheme of one weight by SDNQ's config.

    Raises:
        UnsupportedFileError: SDNQ stored it in a way that no scheme here supports.
    """
    for pattern, own in (settings.get("modules_quant_config") or {}).items():
        if _matches(weight, [pattern]):
            settings = {**settings, **own}
            break
    dtype = settings.get("weights_dtype", "int8")
    for name, patterns in (settings.get("modules_dtype_dict") or {}).items():
        if _matches(weight, patterns):
            dtype = _at_least(name.lower(), dtype)
            break
    extras = [name for name in ("use_hadamard", "use_codebook") if settings.get(name)]
    extras += [name for name in ("scale_dtype", "zero_point_dtype") if settings.get(name) not in (None, "none")]
    if dtype in OF_DTYPE and not extras:
        return OF_DTYPE[dtype]
    raise UnsupportedFileError(
        f"Cannot read {weight}, stored by SDNQ as {dtype!r}{' with ' + ', '.join(extras) if extras else ''}",
        f"sdquant only reads SDNQ's {', '.join(sorted(OF_DTYPE))}, with plain scales and no rotation or codebook",
        "Load it with diffusers and the sdnq package, or quantize the original model with one of these",
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


def belong_together(code: Code, shape: tuple[int, ...], parts: Mapping[str, Tensor]) -> bool:
    """Return whether these are the parts of a weight of this shape, as `SDNQ` describes them."""
    weight, scale = parts["weight"], parts["scale"]
    if len(shape) < 2 or str(weight.dtype) != f"torch.{code.dtype}" or code.zero_point != ("zero_point" in parts):
        return False
    groups = scale.shape[1] if scale.ndim == len(shape) + 1 else 1
    kernel = scale.shape[3:] if groups > 1 else scale.shape[2:]
    # A scale for each row and group; for a convolution, also for each kernel position or for all of them.
    if scale.ndim != len(shape) + (groups > 1) or scale.shape[0] != shape[0] or shape[1] % groups:
        return False
    if scale.shape[2 if groups > 1 else 1] != 1 or any(n not in (1, k) for n, k in zip(kernel, shape[2:], strict=True)):
        return False
    units = math.prod(shape) // (len(code.fields) or 1)
    split = (shape[0], groups, shape[1] // groups, *shape[2:])
    stored = {(units,), (units, code.unit), (units * code.unit,)} if code.fields else {shape, split}
    if tuple(weight.shape) not in stored:
        return False
    zeros, up, down = parts.get("zero_point"), parts.get("svd_up"), parts.get("svd_down")
    if (zeros is not None and zeros.shape != scale.shape) or (up is None) != (down is None):
        return False
    if up is not None and down is not None:
        row = math.prod(shape[1:])
        if up.ndim != 2 or tuple(down.shape) != (up.shape[1], row) or up.shape[0] != shape[0]:
            return False
    if zeros is not None and zeros.dtype != scale.dtype:
        return False
    return all(tensor.is_floating_point() for part, tensor in parts.items() if part != "weight")


def turned(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the transposed matrix of a weight: [in, out]."""
    return (math.prod(shape[1:]), shape[0])


def shape_of(parts: Mapping[str, Tensor], code: Code) -> tuple[int, ...]:
    """Infer the float weight's shape from the scale's: [out, 1, kernel...] or [out, groups, 1, kernel...]."""
    scale = parts["scale"]
    numel = parts["weight"].numel() * (len(code.fields) or 1) // code.unit
    if scale.ndim == 2 and scale.shape[1] > 1:  # written as [in, out]
        return (scale.shape[1], numel // scale.shape[1])
    if scale.ndim < 2:
        return (0,)  # no scale of SDNQ's: `read` refuses it
    kernel = tuple(scale.shape[3:] if scale.shape[1] > 1 else scale.shape[2:])
    return (scale.shape[0], numel // max(1, scale.shape[0] * math.prod(kernel)), *kernel)


def float_dtype(dtypes: Iterable[str]) -> str:
    """Infer the model's float dtype from its unquantized tensors; SDNQ does not record it."""
    floats = Counter(dtype for dtype in dtypes if dtype in COMPUTE_DTYPES)
    return floats.most_common(1)[0][0] if floats else "bfloat16"
