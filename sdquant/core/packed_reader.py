"""Read one quantized weight from a file and check its parts against each other, for loading and verification."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import BadFileError
from . import registry
from .backend import Backend, Packed, PackedSpec, PrequantizedWeight, QuantSpec, Unfit
from .dtypes import dtype_name

if TYPE_CHECKING:
    from torch import Tensor


Get = Callable[[str], "Tensor"]

AGAIN = "Download the file again, or quantize the model again"
NOT_FINITE = "it has values that are not finite"


class ShapeUnknown(Unfit):
    """A file does not record the shape of a weight, only how many values it has: `count`."""

    def __init__(self, why: str, count: int) -> None:
        super().__init__(why)
        self.count = count


def read_weight(weight: PrequantizedWeight, spec: PackedSpec | None, shape: tuple[int, ...] | None, get: Get) -> Packed:
    """Read a packed weight.

    Args:
        spec: the weight's description in sdquant's metadata; None for files of other tools.
        shape: of the float weight in the model; None if no model is known.
        get: reads a tensor by its file key.

    Raises:
        BadFileError: the parts are inconsistent, do not fit the model or the metadata, or contain scales that no
            encoder writes: NaN, infinite, or negative where a scale is a magnitude.
        Unfit, NotImplementedError: see `Backend.read`.
    """
    backend = registry.of_scheme(weight.scheme)
    try:
        packed = backend.read(weight, shape, get) if spec is None else _own(backend, weight, spec, shape, get)
    except Unfit:
        _check_scales(backend, weight, {part: get(key) for part, key in weight.keys.items()})
        raise
    except NotImplementedError:  # a RuntimeError, for Python
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise _bad(weight.name, f"its parts are inconsistent ({error!r})") from error
    _check_scales(backend, weight, packed.parts)
    return packed


def require_sound(weight: PrequantizedWeight, packed: Packed) -> None:
    """Raise BadFileError if a scale among the codes of a weight is NaN or infinite: see `Backend.sound`."""
    if not packed.spec.scheme.codec.sound(packed):
        key = next(iter(weight.keys.values()))
        raise _bad(key, f"it is in {weight.scheme}, and the scale of one of its blocks is not finite (NaN or infinite)")


def _own(
    backend: Backend, weight: PrequantizedWeight, spec: PackedSpec, shape: tuple[int, ...] | None, get: Get
) -> Packed:
    """Read a weight from sdquant's own files and check it like any reader of its format, if the format has readers."""
    if shape is not None and spec.shape != shape:
        raise _bad(weight.name, f"its shape is {list(spec.shape)}, but the model expects {list(shape)}")
    packed = Packed(spec=spec, parts={part: get(key) for part, key in weight.keys.items()})
    try:
        reread = backend.read(replace(weight, details={"dtype": spec.dtype, **weight.details}), spec.shape, get)
    except NotImplementedError:
        sound = has_layout(packed) and not spec.rotation  # which no format without a reader has
    else:
        sound = forms(reread) == forms(packed)
        _compare(weight.name, spec.details, reread.spec.details)
    if not sound:
        parts = ", ".join(f"{part} {dtype} {list(size)}" for part, (dtype, size) in forms(packed).items())
        why = f"its parts ({parts}) do not match a weight of shape {list(spec.shape)} in {spec.scheme}"
        raise _bad(weight.name, why)
    return packed


def _compare(name: str, metadata: Mapping[str, Any], shown: Mapping[str, Any]) -> None:
    """Raise BadFileError unless the metadata agrees with the tensors, including JSON number types."""
    for key in sorted(metadata.keys() | shown.keys()):
        one, other = (json.dumps(table[key]) if key in table else "nothing" for table in (metadata, shown))
        if one != other:
            raise _bad(name, f"sdquant's metadata says {key}={one:.40}, but its tensors say {other:.40}")


def _check_scales(backend: Backend, weight: PrequantizedWeight, parts: Mapping[str, Tensor]) -> None:
    import torch

    for part, tensor in parts.items():
        if not tensor.is_floating_point() or tensor.itemsize == 1 or not tensor.numel():
            continue  # codes: `verify` decodes them
        low, high = (bound.item() for bound in torch.aminmax(tensor))
        if not (low > -torch.inf and high < torch.inf):  # NaN is neither
            raise _bad(weight.keys[part], f"it is the {part} of a quantized weight, and has values that are not finite")
        if low < 0 and part in backend.magnitudes:
            raise _bad(weight.keys[part], f"it is the {part} of a quantized weight, and has negative values")


def _bad(name: str, why: str) -> BadFileError:
    return BadFileError(f"Cannot read tensor {name!r}", why, AGAIN)


def forms(packed: Packed) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and shape of each part."""
    return {part: (dtype_name(t.dtype), tuple(t.shape)) for part, t in packed.parts.items()}


def has_layout(packed: Packed) -> bool:
    """Return whether the parts match the scheme's layout for such a weight, for some values of its options."""
    spec = packed.spec
    recorded = spec.scheme.codec.spec_of(spec)
    if recorded is not None:
        return _is_of(packed, recorded)
    values = [
        (spec.details[name],) if name in spec.details else option.choices or _both(option.default)
        for name, option in spec.scheme.options.items()
    ]
    for combination in itertools.product(*values):
        if _is_of(packed, QuantSpec(spec.scheme, tuple(zip(spec.scheme.options, combination, strict=True)))):
            return True
    return False


def _is_of(packed: Packed, spec: QuantSpec) -> bool:
    try:
        layout = spec.scheme.codec.layout(spec, packed.spec.shape, packed.spec.dtype)
    except Unfit:
        return False
    return forms(packed) == {part: (row.dtype, row.shape) for part, row in layout.items()}


def _both(default: bool | int | str | None) -> tuple[bool | int | str | None, ...]:
    return (False, True) if isinstance(default, bool) else (default,)
