"""Detection of quanto's weights in a file by keys and shapes, and reading with every shape checked. No torch at import.

optimum-quanto saves a weight flattened into its tensors: `X.weight._data` for 8 bits; for 4 and 2 bits the packed bytes
are one level further down, `X.weight._data._data`; and `_scale`, `_shift`. Beside it, as buffers of the module, lie
`X.input_scale` and `X.output_scale`. Nothing in the tensors says how many bits a byte holds. `quantization_map.json`
(module name -> {"weights": "qint4", "activations": "none"}) does, as does diffusers' config ({"quant_method": "quanto",
"weights_dtype": "int4"}) for the whole file; else the number of rows against the number of scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core import (
    COMPUTE_DTYPES,
    PLAIN_ONLY,
    Packed,
    PackedSpec,
    PrequantizedWeight,
    ShapeUnknown,
    TensorInfo,
    TensorSpec,
    dtype_name,
    registry,
)
from ..errors import BadFileError
from ._quanto_layout import FLOAT8, GROUPS, parts_of

if TYPE_CHECKING:
    from torch import Tensor

BUFFERS = ("input_scale", "output_scale")
# What diffusers and transformers call the schemes.
CONFIG_NAMES = {"qint8": "int8", "qint4": "int4", "qint2": "int2", "qfloat8": "float8"}
DATA_KEYS = ("._data._data", "._data")
DATA_DTYPES = ("int8", "uint8", *FLOAT8)


def data_key(scheme: str) -> str:
    """Return the key suffix of the packed bytes. For qint3, which is ours, it is one that quanto ignores."""
    return DATA_KEYS[0] if scheme in ("qint4", "qint2") else DATA_KEYS[1]


def find(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
    """See `Backend.find`. `config` may contain "quantization_config" and "quantization_map"."""
    config_scheme = _asked(config.get("quantization_config") or {})
    weights: list[PrequantizedWeight] = []
    unsure: list[int] = []
    for key, info in tensors.items():
        ending = next((end for end in DATA_KEYS if key.endswith(end)), None)
        if ending is None or info.dtype not in DATA_DTYPES:
            continue
        name = key[: -len(ending)]
        keys = {"data": key} | {part: f"{name}._{part}" for part in ("scale", "shift") if f"{name}._{part}" in tensors}
        module = name.rpartition(".")[0]
        buffers = [f"{module}.{buffer}" if module else buffer for buffer in BUFFERS]
        possible = _possible({part: tensors[at] for part, at in keys.items()})
        mapped = _mapped(config.get("quantization_map") or {}, module)
        if len(possible) > 1 and not mapped and config_scheme is None:
            unsure.append(len(weights))
        scheme = mapped or config_scheme or (possible[0] if possible else "qint4")
        row = PrequantizedWeight(
            name=name, scheme=scheme, keys=keys, evidence="", extra=tuple(b for b in buffers if b in tensors)
        )
        weights.append(_explained(row, tensors))
    # A weight of one or two rows does not show its bits; in quanto's files they are those of its neighbours.
    sure = {row.scheme for at, row in enumerate(weights) if at not in unsure and row.scheme in ("qint4", "qint2")}
    for at in unsure:
        if len(sure) == 1:
            weights[at] = _explained(replace(weights[at], scheme=next(iter(sure))), tensors)
        else:
            note = "; one or two rows do not show their bits and nothing else in the file does: 4 assumed"
            weights[at] = replace(weights[at], evidence=weights[at].evidence + note)
    return weights


def _explained(row: PrequantizedWeight, tensors: Mapping[str, TensorInfo]) -> PrequantizedWeight:
    keys = ", ".join(f"*{key.removeprefix(row.name)}" for key in row.keys.values())
    codes = tensors[row.keys["data"]]
    details = {"group_size": codes.shape[-1] * 8 // 3} if row.scheme == "qint3" and codes.shape else {}
    return replace(row, evidence=f"optimum-quanto keys {keys} ({codes.dtype} codes): {row.scheme}", details=details)


def _possible(parts: Mapping[str, TensorInfo]) -> list[str]:
    """Return the schemes that dtypes and shapes allow, most bits first; none if the parts do not fit together."""
    data, scale = parts["data"], parts.get("scale")
    if data.dtype != "uint8":
        return ["qint8" if data.dtype == "int8" else "qfloat8"]
    if scale is None or not scale.shape or len(scale.shape) != len(data.shape):
        return []
    rows, stored = scale.shape[0], data.shape[0]
    per_weight = rows == 1 and scale.shape[-1] == data.shape[-1] > 1  # quanto's way with a single row
    if not per_weight and any(n != 1 for n in scale.shape[1:]):
        return []
    if len(data.shape) == 2 and stored == rows and data.shape[1] in {g * 3 // 8 for g in GROUPS} and not per_weight:
        return ["qint3"]  # with as many bytes as scales, 4 and 2 bits would be the single row of above
    return [f"qint{bits}" for bits in (4, 2) if stored == -(-rows * bits // 8)]


def _asked(config: Mapping[str, Any]) -> str | None:
    """Return the scheme named by a quantization_config of diffusers or transformers."""
    if config.get("quant_method") != "quanto":
        return None
    word = config.get("weights_dtype") or config.get("weights")
    return next((scheme for scheme, name in CONFIG_NAMES.items() if name == word), None)


def _mapped(quantization_map: Mapping[str, Any], module: str) -> str | None:
    """Return the scheme that quantization_map.json names for a module."""
    row = quantization_map.get(module)
    word = row.get("weights") if isinstance(row, Mapping) else None
    if not isinstance(word, str) or word == "none":
        return None
    return "qfloat8" if word.startswith("qfloat8") else word if word in CONFIG_NAMES else None


def missing(detected: PrequantizedWeight) -> str | None:
    """See `Backend.missing`."""
    part = next((part for part in _needed(detected.scheme) if part not in detected.keys), None)
    return None if part is None else f"{detected.name}._{part}"


def _needed(scheme: str) -> tuple[str, ...]:
    return ("data", "scale") if scheme in ("qint8", "qfloat8") else ("data", "scale", "shift")


def read(detected: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
    """See `Backend.read`."""
    needed, key = _needed(detected.scheme), missing(detected)
    if key is not None:
        raise _bad(detected, f"the file has no {key}")
    parts = {part: get(detected.keys[part]) for part in needed}
    # Folders of older versions have such weights of ComfyUI's files, which are now of the backend `comfy`.
    details: dict[str, Any] = {PLAIN_ONLY: True} if detected.plain_only else {}
    dtypes = {part: dtype_name(tensor.dtype) for part, tensor in parts.items()}
    if dtypes["scale"] not in COMPUTE_DTYPES:
        raise _bad(detected, f"its scale is {dtypes['scale']}, not one of {', '.join(COMPUTE_DTYPES)}")
    if shape is None:
        shape = _shape(detected, parts, dtypes)
    if "shift" in needed:
        details["group_size"] = _group(detected, shape, tuple(parts["data"].shape))
    float8 = dtypes["data"] if dtypes["data"] in FLOAT8 else FLOAT8[0]
    expected = parts_of(detected.scheme, shape, dtypes["scale"], details.get("group_size"), float8)
    for part, want in expected.items():
        have = TensorSpec(dtype=dtypes[part], shape=tuple(parts[part].shape))
        zeropoint = part == "shift" and have.dtype in ("uint8", "int8") and have.shape == want.shape
        if have != want and not zeropoint:
            raise _bad(
                detected,
                f"for a weight of {list(shape)} in {detected.scheme}, {detected.keys[part]} must be {want.dtype} "
                f"{list(want.shape)}, but is {have.dtype} {list(have.shape)}",
            )
    scheme = registry.scheme(detected.scheme)
    spec = PackedSpec(scheme=scheme, shape=tuple(shape), dtype=dtypes["scale"], details=details)
    return Packed(spec=spec, parts=parts)


def _shape(detected: PrequantizedWeight, parts: Mapping[str, Tensor], dtypes: Mapping[str, str]) -> tuple[int, ...]:
    """Return the float weight's shape, if the file alone determines it.

    Raises:
        ShapeUnknown: it does not: below 8 bits weights are stored in groups, whose shape does not depend on the row
            length.
    """
    if detected.scheme in ("qint8", "qfloat8"):
        return tuple(parts["data"].shape)
    infos = {
        part: TensorInfo(dtype=dtypes[part], shape=tuple(tensor.shape), nbytes=tensor.nbytes)
        for part, tensor in parts.items()
    }
    alike = infos["shift"].shape == infos["scale"].shape and dtypes["shift"] in (dtypes["scale"], "uint8", "int8")
    if detected.scheme not in _possible(infos) or not alike:
        shapes = ", ".join(f"{part} {list(info.shape)}" for part, info in infos.items())
        raise _bad(detected, f"its shapes ({shapes}) do not fit {detected.scheme}")
    count = infos["scale"].shape[0] * math.prod(infos["data"].shape[1:])
    raise ShapeUnknown(f"optimum-quanto's {detected.scheme} does not record the weight's shape in the file", count)


def _group(detected: PrequantizedWeight, shape: tuple[int, ...], data: tuple[int, ...]) -> int | None:
    """Return the group size, which is the width of the packed rows; None if they are the weight's own rows."""
    if detected.scheme == "qint3":
        return (data[-1] if data else 0) * 8 // 3 or 1
    return None if data[1:] == tuple(shape[1:]) or len(data) != 2 else data[1] or 1


def _bad(detected: PrequantizedWeight, why: str) -> BadFileError:
    return BadFileError(
        f"Cannot read weight {detected.name!r} as optimum-quanto's {detected.scheme}",
        why,
        "Download the file again (it is damaged, truncated or for another model), or quantize the model again",
    )
