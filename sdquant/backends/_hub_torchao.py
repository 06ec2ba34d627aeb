"""torchao's tensors in a file's header, as diffusers and transformers save them (torchao 0.16 and later). No torch.

A weight M.weight is stored as M._weight_<part>. The file's metadata lists all names in "tensor_names", and has an entry
for each: JSON with the class of the tensor ("_type"), its attributes ("_data") and its parts ("_tensor_data_names").
The format is that of `flatten_tensor_state_dict` of torchao 0.18. Before 0.16 torchao's tensors were pickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..core import FACTOR, PrequantizedWeight, TensorInfo
from ..errors import BadFileError, UnsupportedFileError
from ..utils import strict_json
from ._comfy_find import LOW_FIRST, TILED
from ._hub_find import BYTES, GROUP_SIZE, MXFP4, NIBBLES, PACKING

_NAMES = "tensor_names"
_QDATA = "_weight_qdata"
_USE = (
    "Load the unquantized model and quantize it here (quant='int8' or 'nf4'), or use a file of it in a format that "
    "`sdquant matrix` lists"
)
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Weight:
    """A weight in torchao's tensors.

    Attributes:
        name: of the weight. type: the class of the tensor. data: its attributes; {} without metadata.
        keys: file key of each part. infos: of the parts.
    """

    name: str
    type: str
    data: Row
    keys: Mapping[str, str]
    infos: Mapping[str, TensorInfo]

    @property
    def blocks(self) -> tuple[int, int]:
        """Return the rows and columns of a weight that share a scale, by the shapes alone without metadata.

        Raises:
            BadFileError: there are other scales than its block_size makes.
        """
        given = self.data.get("block_size")
        (rows, columns), scale = self.infos["qdata"].shape, self.infos["scale"].shape
        if self.type == "Int4Tensor":  # two columns in a byte, scales [groups, rows]
            columns, scale = columns * 2, scale[::-1]
        if given is None and len(scale) == 2 and all(scale) and rows % scale[0] == 0 and columns % scale[1] == 0:
            return rows // scale[0], columns // scale[1]
        if isinstance(given, list) and len(given) == 2 and all(type(size) is int and size > 0 for size in given):
            grid = (rows // given[0], columns // given[1])
            whole = rows % given[0] == 0 and columns % given[1] == 0
            if whole and (scale == grid or (len(scale) < 2 and math.prod(scale) == math.prod(grid))):
                return given[0], given[1]
        why = f"its block_size is {given!r:.80}, its scales are {list(scale)}, and it has {[rows, columns]} codes"
        raise _bad(self.name, why)


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A class of torchao's tensors that is read here.

    Attributes:
        words: what it is, for people. parts: those that all have. optional: those that may be there.
        attributes: those that are known. Others, unless null, are of a later version that may mean something else.
        read: makes a quantized weight of it.
    """

    words: str
    parts: frozenset[str]
    optional: frozenset[str]
    attributes: frozenset[str]
    read: Callable[[_Weight], tuple[str, dict[str, Any]]]


def find(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
    """See `Backend.find`. `config` may contain "metadata" of all files and a "quantization_config".

    Raises:
        UnsupportedFileError: a class, attribute or part that is not read here, or nothing that says what they are.
        BadFileError: the metadata is malformed, or a part is missing.
    """
    metadata = config.get("metadata") or {}
    if _NAMES in metadata and _is_torchaos(metadata, tensors):
        rows: Iterator[tuple[str, Row]] = _described(metadata, tensors)
    else:
        rows = _undescribed(tensors, config.get("quantization_config") or {})
    return [_found(name, row, tensors) for name, row in rows]


def _is_torchaos(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> bool:
    """Return whether names in the metadata are torchao's: other tools have lists of names, too."""
    return any(key.endswith(f".{_QDATA}") for key in tensors) or any(
        isinstance(text, str) and '"_tensor_data_names"' in text for text in metadata.values()
    )


def _described(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Row]]:
    """Yield the name of each quantized weight, and what the metadata says of it."""
    names = _json(_NAMES, metadata[_NAMES])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _bad(_NAMES, "it is not a list of names")
    for name in names:
        row = _json(name, metadata.get(name))
        kind = row.get("_type") if isinstance(row, dict) else None
        if not isinstance(row, dict) or not isinstance(kind, str):
            raise _bad(name, "its entry in the file's metadata does not name the class of the tensor")
        if kind != "Tensor":
            yield name, row
    strange = next((key for key in tensors if key.endswith(f".{_QDATA}") and _name(key) not in names), None)
    if strange is not None:
        raise _bad(strange, f"the metadata does not list {_name(strange)!r}")


# The class of tensors that each config makes, for files without metadata.
_OF_CONFIG = {
    "Int8WeightOnlyConfig": "Int8Tensor",
    "Int8DynamicActivationInt8WeightConfig": "Int8Tensor",
    "Float8WeightOnlyConfig": "Float8Tensor",
    "Float8DynamicActivationFloat8WeightConfig": "Float8Tensor",
    "IntxWeightOnlyConfig": "IntxUnpackedToInt8Tensor",
    "Int8DynamicActivationIntxWeightConfig": "IntxUnpackedToInt8Tensor",
}


def _undescribed(tensors: Mapping[str, TensorInfo], quantization: Row) -> Iterator[tuple[str, Row]]:
    """Yield the name of each quantized weight, and what a `quantization_config` says of all."""
    names = [_name(key) for key in tensors if key.endswith(f".{_QDATA}")]
    if not names:
        return
    types = quantization.get("quant_type")
    table = types.get("default") if isinstance(types, Mapping) else None
    config = table.get("_type") if isinstance(table, Mapping) else None
    kind = _OF_CONFIG.get(config) if isinstance(config, str) else None
    if kind is None:
        says = "" if config is None else f", and {str(config)[:60]!r} in its quantization_config does not"
        raise UnsupportedFileError(
            f"Cannot read weight {names[0]!r}",
            "it is in parts as torchao writes them, but the file has no metadata that says of what class of torchao's "
            f"tensors they are{says}",
            "Use the file that diffusers or transformers saved, or, if its config.json names an int8, float8 or intx "
            f"config of torchao, put that beside it. Otherwise: {_USE}",
        )
    for name in names:
        stem = f"{name.removesuffix('weight')}_weight_"
        parts = [key.removeprefix(stem) for key in tensors if key.startswith(stem)]
        yield name, {"_type": kind, "_data": {}, "_tensor_data_names": parts}


def _found(name: str, row: Row, tensors: Mapping[str, TensorInfo]) -> PrequantizedWeight:
    kind = _KINDS.get(row["_type"])
    if row["_type"] in _FOR_KERNELS:
        raise UnsupportedFileError(
            f"Cannot read weight {name!r}",
            f"it is torchao's {row['_type']}, whose codes are in the order of {_FOR_KERNELS[row['_type']]}, which no "
            "source describes",
            "Quantize the model again with int4_packing_format='plain', if you have the float weights. Otherwise: "
            + _USE[0].lower() + _USE[1:],
        )  # fmt: skip
    if kind is None:
        known = ", ".join(_KINDS)
        raise _unknown(name, f"a {row['_type'][:60]}; sdquant only reads {known}")
    data, parts = row.get("_data"), row.get("_tensor_data_names")
    if not isinstance(data, dict) or not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise _bad(name, "its entry in the file's metadata lacks its attributes or its parts")
    strange = next((key for key, value in data.items() if key not in kind.attributes and value is not None), None)
    strange = strange or next((part for part in parts if part not in kind.parts | kind.optional), None)
    if strange is not None:
        raise _unknown(name, f"a {row['_type']} with {strange[:60]!r}, which torchao 0.18 does not have")
    module, _, word = name.rpartition(".")
    keys = {part: f"{module}{'.' if module else ''}_{word}_{part}" for part in parts}
    gone = next((key for key in keys.values() if key not in tensors), None)
    absent = next((part for part in kind.parts if part not in parts), None)
    if gone is not None or absent is not None:
        raise BadFileError(
            f"Cannot read weight {name!r}",
            f"it is a {row['_type']} of torchao, and has no {gone or absent!r}",
            "Download the file again, or quantize the model again",
        )
    infos = {part: tensors[key] for part, key in keys.items()}
    if len(infos["qdata"].shape) != 2 or not all(infos["qdata"].shape):
        raise _unknown(name, f"a {row['_type']} of {list(infos['qdata'].shape)}, which is not a matrix")
    weight = _Weight(name=name, type=row["_type"], data=data, keys=keys, infos=infos)
    scheme, details = kind.read(weight)
    dynamic = data.get("act_quant_kwargs") or data.get("activation_quantization")
    beside = ", which quantizes activations too" if dynamic else ""
    return _as_weight(weight, scheme, details, f"torchao's {weight.type}: {kind.words}{beside}")


# What the parts are called here, and those that belong to activations alone, or that are checked where they are read.
_PARTS = {
    "qdata": "codes", "scale": "scale", "zero_point": "zero", "act_pre_scale": "columns", "per_tensor_scale": "factor",
}  # fmt: skip
_ASIDE = frozenset({"act_quant_scale", "act_quant_zero_point", "act_per_tensor_scale"})


def _as_weight(weight: _Weight, scheme: str, details: dict[str, Any], evidence: str) -> PrequantizedWeight:
    grouped = scheme.startswith("hub-")
    aside = _ASIDE if grouped else _ASIDE | {"zero_point"}
    dtype = next((weight.data[key] for key in ("dtype", "orig_dtype") if key in weight.data), None)
    word = dtype.get("_data") if isinstance(dtype, Mapping) else None
    packed = scheme == "hub-int4" and details[PACKING] == BYTES
    rows, columns = weight.infos["qdata"].shape
    parts = _PARTS | ({"zero_point": "shift"} if details.get(PACKING) == NIBBLES else {})
    parts |= {"qdata": "blocks"} if scheme == "mxfp4" else {}
    return PrequantizedWeight(
        name=weight.name,
        scheme=scheme,
        keys={parts[part]: key for part, key in weight.keys.items() if part not in aside},
        extra=tuple(key for part, key in weight.keys.items() if part in aside),
        evidence=evidence,
        details={**details, **({"dtype": word} if word in ("float32", "float16", "bfloat16") else {})},
        nbytes=_packed_bytes(weight) if packed else None,
        shape=(rows, columns * 2) if scheme == "mxfp4" else None,
    )


def _packed_bytes(weight: _Weight) -> int:
    """Return the bytes in memory of codes of 4 bits that have a byte each in the file."""
    return weight.infos["qdata"].nbytes // 2 + sum(i.nbytes for part, i in weight.infos.items() if part != "qdata")


def _int8(weight: _Weight) -> tuple[str, dict[str, Any]]:
    rows, columns = weight.infos["qdata"].shape
    block = weight.blocks
    if "act_pre_scale" not in weight.keys and block in ((1, columns), (rows, columns)):
        return ("int8_row" if block[0] == 1 else "int8_tensor"), {}
    return "hub-int8", {PACKING: BYTES, GROUP_SIZE: block[1]}


def _intx(weight: _Weight) -> tuple[str, dict[str, Any]]:
    target, columns = weight.data.get("target_dtype"), weight.infos["qdata"].shape[1]
    word = target.get("_data") if isinstance(target, Mapping) else "int8"
    few = word in ("int1", "int2", "int3", "int4") and columns % 2 == 0
    return ("hub-int4" if few else "hub-int8"), {PACKING: BYTES, GROUP_SIZE: weight.blocks[1]}


def _int4(weight: _Weight) -> tuple[str, dict[str, Any]]:
    return "hub-int4", {PACKING: NIBBLES, GROUP_SIZE: weight.blocks[1]}


def _float8(weight: _Weight) -> tuple[str, dict[str, Any]]:
    (rows, columns), block = weight.infos["qdata"].shape, weight.blocks
    whole = block in ((1, columns), (rows, columns))
    return "fp8", {PACKING: "float8", **({} if whole else {"block": list(block)})}


_MX = {"float8_e4m3fn": "mxfp8", "float4_e2m1fn_x2": "mxfp4"}  # what it is here, by `elem_dtype`


def _mx(weight: _Weight) -> tuple[str, dict[str, Any]]:
    element = weight.data.get("elem_dtype")
    word = element.get("_data") if isinstance(element, Mapping) else element
    if word not in _MX or weight.data.get("block_size") != 32:
        raise _unknown(weight.name, f"an MXTensor of {word!r:.40} in blocks of {weight.data.get('block_size')!r:.20}")
    return _MX[word], {**_tiles(weight), **(MXFP4 if _MX[word] == "mxfp4" else {})}


def _nvfp4(weight: _Weight) -> tuple[str, dict[str, Any]]:
    if weight.data.get("block_size") != 16:
        raise _unknown(weight.name, f"an NVFP4Tensor in blocks of {weight.data.get('block_size')!r:.20}")
    factor = weight.infos.get("per_tensor_scale")
    if factor is not None and math.prod(factor.shape) != 1:
        raise _unknown(weight.name, f"an NVFP4Tensor with {list(factor.shape)} factors")
    return "comfy:nvfp4", _tiles(weight) | ({} if factor is not None else {FACTOR: 1.0})


def _tiles(weight: _Weight) -> dict[str, Any]:
    tiled = weight.data.get("is_swizzled_scales")
    if type(tiled) is not bool:
        raise _bad(weight.name, f"its is_swizzled_scales is {tiled!r:.40}, neither true nor false")
    return {TILED: True, LOW_FIRST: True} if tiled else {}


# Classes of tensors that are in the order of one kind of device.
_FOR_KERNELS = {
    "Int4TilePackedTo4dTensor": "tinygemm's CUDA kernels",
    "Int4PlainInt32Tensor": "Intel's or Huawei's kernels",
    "Int4PreshuffledTensor": "Hopper's tensor cores",
}
_SCALED = frozenset({"qdata", "scale"})
_NONE: frozenset[str] = frozenset()
_KINDS: Mapping[str, _Kind] = {
    "Int8Tensor": _Kind(
        words="8-bit integers",
        parts=_SCALED,
        optional=frozenset({"zero_point", "act_quant_scale", "act_quant_zero_point", "act_pre_scale"}),
        attributes=frozenset({"block_size", "dtype", "act_quant_kwargs", "reduce_range"}),
        read=_int8,
    ),
    "Float8Tensor": _Kind(
        words="8-bit floats",
        parts=_SCALED,
        optional=_NONE,
        attributes=frozenset({"block_size", "mm_config", "act_quant_kwargs", "kernel_preference", "dtype"}),
        read=_float8,
    ),
    "IntxUnpackedToInt8Tensor": _Kind(
        words="integers of 1 to 8 bits, a byte each",
        parts=_SCALED | {"zero_point"},
        optional=_NONE,
        attributes=frozenset({"target_dtype", "block_size", "dtype", "activation_quantization"}),
        read=_intx,
    ),
    "Int4Tensor": _Kind(
        words="4-bit integers, the even column in the low half of a byte",
        parts=_SCALED | {"zero_point"},
        optional=frozenset({"act_pre_scale"}),
        attributes=frozenset({"block_size", "shape", "activation_dtype"}),
        read=_int4,
    ),
    "MXTensor": _Kind(
        words="floats of 8 or 4 bits, powers of two as scales of 32",
        parts=_SCALED,
        optional=_NONE,
        attributes=frozenset(
            {
                "elem_dtype",
                "block_size",
                "orig_dtype",
                "kernel_preference",
                "act_quant_kwargs",
                "is_swizzled_scales",
            }
        ),
        read=_mx,
    ),
    "NVFP4Tensor": _Kind(
        words="4-bit floats, the even column in the low half of a byte, scales of 16",
        parts=_SCALED,
        optional=frozenset({"per_tensor_scale", "act_per_tensor_scale"}),
        attributes=frozenset(
            {
                "block_size",
                "orig_dtype",
                "is_swizzled_scales",
                "use_triton_kernel",
                "act_quant_kwargs",
            }
        ),
        read=_nvfp4,
    ),
}


def _name(key: str) -> str:
    return key.removesuffix(_QDATA) + "weight"


def _json(name: str, text: Any) -> Any:
    try:
        return strict_json.parse(text)
    except (TypeError, ValueError) as error:
        raise _bad(name, f"its entry in the file's metadata is not JSON ({error})") from error


def _bad(name: str, why: str) -> BadFileError:
    return BadFileError(f"Cannot read weight {name!r}", why, "Download the file again, or quantize the model again")


def _unknown(name: str, what: str) -> UnsupportedFileError:
    return UnsupportedFileError(f"Cannot read weight {name!r}", f"for torchao it is {what}", _USE)
