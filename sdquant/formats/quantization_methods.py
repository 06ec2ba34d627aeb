"""The method that a file or folder was quantized with; refuses methods that sdquant cannot read. No torch.

A method is named by a config (`quantization_config` and its like), by a file's metadata, or by tensor names that only
it has. Weights that a backend recognises are read whatever their method is called. What is left of a quantization after
that is refused by name: loaded as floats, codes would be used as weights or a scale left out, and generate noise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends import COMFYUI
from ..core import registry
from ..errors import BadFileError, UnsupportedFileError
from . import folders, method_names
from .activation_transforms import left_to_do
from .bits_in_words import disagreements
from .method_names import MAPS, SIDE_FILES, TABLES, named, tables, tables_of, with_stated
from .orphan_scales import CODES, stray_of, unread_codes

if TYPE_CHECKING:
    from ..core import PrequantizedWeight, TensorInfo

__all__ = [
    "FLOAT8", "NUNCHAKU", "READ", "SIDE_FILES", "TABLES", "TITLES", "contradictions", "named", "refuse_pickles",
    "refuse_unread", "refuse_unread_index", "tables", "with_stated",
]  # fmt: skip

_USE = (
    "Load the unquantized model and quantize it here (quant='int8' or 'nf4'), or use a file of it in a format that "
    "`sdquant matrix` lists"
)
# What configs call the methods that are read here, and the one that sdquant writes.
READ = frozenset({
    "bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit", "quanto", "sdnq", "fp8", "gguf", "sdquant", "gptq", "awq",
    "auto-round", "intel/auto-round", "hqq", "compressed-tensors", "torchao", COMFYUI,
})  # fmt: skip
# Those of which only float8 weights with scales are, which they write as all do, NVFP4 of the last two, and ModelOpt's
# integers. "mxfp8" is transformers' fine-grained FP8 with blocks of [1, 32].
FLOAT8 = frozenset({"fbgemm_fp8", "modelopt", "bfl", "mxfp8"})
# Nunchaku's, whose layers are found by their tensors.
NUNCHAKU = frozenset({"svdquant", "nunchaku", "nunchaku_lite"})
# What others call ComfyUI's formats by the libraries that write and run them; each layer says which it is in.
OF_COMFYUI = frozenset({"comfy_quant", "comfy-quant", "comfy_quants", "comfy-quants", "comfy_kitchen", "comfy-kitchen"})
_BY_TENSORS = FLOAT8 | NUNCHAKU | OF_COMFYUI
# How people know methods, by what configs call them.
TITLES: Mapping[str, str] = {
    "bitsandbytes_4bit": "bitsandbytes", "bitsandbytes_8bit": "bitsandbytes", "quanto": "optimum-quanto",
    "sdnq": "SDNQ", COMFYUI: "ComfyUI", "fp8": "fine-grained FP8", "gguf": "GGUF",
    "gptq": "GPTQ", "awq": "AWQ", "auto-round": "AutoRound", "intel/auto-round": "AutoRound", "hqq": "HQQ",
    "torchao": "torchao", "compressed-tensors": "compressed-tensors", "modelopt": "NVIDIA ModelOpt",
    "svdquant": "SVDQuant (Nunchaku)", "nunchaku": "SVDQuant (Nunchaku)", "nunchaku_lite": "SVDQuant (Nunchaku)",
    "bfl": "Black Forest Labs' NVFP4 and FP8", "eetq": "EETQ", "vptq": "VPTQ", "aqlm": "AQLM", "spqr": "SpQR",
    "higgs": "HIGGS", "quark": "AMD Quark", "bitnet": "BitNet", "fbgemm_fp8": "FBGEMM", "fp_quant": "FP-Quant",
    "mxfp4": "MXFP4", "mxfp8": "MXFP8", "nvfp4": "NVFP4", "sinq": "SINQ", "fouroversix": "Four Over Six",
    "mlx": "MLX", **dict.fromkeys(OF_COMFYUI, "ComfyUI"),
}  # fmt: skip
# The backends whose weights the methods have that no other has; see `contradictions`.
_BACKENDS: Mapping[str, str] = {
    "bitsandbytes": "bnb", "bitsandbytes_4bit": "bnb", "bitsandbytes_8bit": "bnb", "quanto": "quanto", "sdnq": "sdnq",
    COMFYUI: "comfy",
    **dict.fromkeys(("gptq", "awq", "hqq"), "hub"),  # not AutoRound, which writes NVFP4 and MXFP4, too
}  # fmt: skip
_ANY_BITS = "sdnq-other"  # the scheme whose weights have bits of their own
_OF_NUNCHAKU = frozenset({"svdquant_w4a4", "svdquant_nvfp4", "awq_w4a16"})


@dataclass(frozen=True, kw_only=True)
class _Sign:
    """Last words of tensor names (after `X.`) that only one method has.

    Attributes:
        title: of the method, or of what is read once it is said what it is: then `fix` is how to say that.
        every: those that are all there beside one X. some: of these at least one, if there are any.
        dtypes: of the first of `every`; () for any.
    """

    title: str
    every: tuple[str, ...]
    some: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    fix: str = ""


# The first that fits counts.
_SIGNS: tuple[_Sign, ...] = (
    _Sign(title=TITLES["svdquant"], every=("qweight", "wscales")),
    _Sign(title=TITLES["svdquant"], every=("qweight",), some=("proj_down", "lora_down", "smooth_factor", "smooth")),
    _Sign(title="GPTQ", every=("qweight", "g_idx")),
    _Sign(title="GPTQ, AWQ or AutoRound", every=("qweight", "qzeros")),
    _Sign(title="one of GPTQ's kind", every=("qweight",), dtypes=CODES),
    _Sign(title=TITLES["compressed-tensors"], every=("weight_packed",)),
    _Sign(title=TITLES["compressed-tensors"], every=("weight_global_scale",)),
    _Sign(title=TITLES["torchao"], every=("_weight_qdata",)),
    _Sign(title=TITLES["hqq"], every=("W_q",), dtypes=("uint8", "int32")),
    _Sign(title=TITLES["modelopt"], every=("weight_quantizer._scale",)),
    _Sign(title=TITLES["modelopt"], every=("weight_quantizer._amax",)),
    _Sign(title=TITLES["modelopt"], every=("weight_scale_2",)),
    _Sign(title="MXFP4 or another format of 4 bits", every=("weight", "weight_scale"), dtypes=("uint8",)),
    _Sign(
        title="8-bit integers with zero points, as compressed-tensors writes them, and no config says so",
        every=("weight", "weight_scale", "weight_zero_point"),
        dtypes=("int8",),
        fix="Put the config.json that belongs to it beside the weights, with its quantization_config, or say what it "
        'is, with config={"quant_method": "compressed-tensors"}',
    ),
    _Sign(
        title="8-bit integers that no comfy_quant marker describes (ComfyUI's int8 as it is, or rotated, ConvRot: the "
        "tensors look the same)",
        every=("weight", "weight_scale"),
        dtypes=("int8",),
        fix=f'Say which it is, with config={{"quant_method": "{COMFYUI}", "format": "int8_tensorwise"}}, or config='
        f'{{"quant_method": "{COMFYUI}", "format": "int8_tensorwise", "convrot": True}} if it is rotated; the other '
        "one generates noise",
    ),
    _Sign(title=TITLES["mlx"], every=("weight", "scales"), dtypes=("uint32",)),
    _Sign(title=TITLES["eetq"], every=("weight", "weight_scales"), dtypes=("int8",)),
)
# Titles of signs of which sdquant reads some variants: a sign that is left over is of another.
_READ_IN_PART = frozenset(
    {TITLES[word] for word in ("svdquant", "compressed-tensors", "torchao", "hqq", "modelopt")}
    | {"GPTQ", "GPTQ, AWQ or AutoRound"}
)
_TWO_WORDS = ("weight_quantizer._scale", "weight_quantizer._amax")
_HOOKS = "__nncf_hooks."  # what NNCF's own state dicts begin with


def refuse_unread(
    path: Path,
    tensors: Mapping[str, TensorInfo],
    quantized: Mapping[str, PrequantizedWeight],
    configs: Mapping[str, Mapping[str, Any]],
    metadata: Mapping[str, Any],
    home: Mapping[str, Path],
) -> None:
    """Raise if a component is quantized in a way that is not read here, in whole or in part.

    Args:
        path: of the component. quantized: the quantized weights that are read.
        configs: the JSON files that may name a method, by name without suffix. metadata: of the file.
        home: the file of each tensor.

    Raises:
        UnsupportedFileError: a method that is not read here, by name.
        BadFileError: parts of weights are missing, or a config says that floats are quantized, or makes no sense.
    """
    for where, table in tables(configs, metadata):
        rest = left_to_do(table)
        if rest is not None:
            raise _unread(path, f"{where} says {rest}")
    methods = tuple(row for row in named(path, configs, metadata) if not (quantized and _is_unknown_text(*row)))
    for where, word in methods:
        if word.lower() not in READ | (_BY_TENSORS if quantized else frozenset()):
            variant = word.lower() in _BY_TENSORS
            raise (_variant(path, tensors, where, word) if variant else _unread(path, _says(where, word)))
    nameless = next(method_names.nameless(configs, metadata), None)
    if nameless is not None and not quantized and tensors:
        raise UnsupportedFileError(
            f"Cannot load {path}",
            f"{nameless} has settings of a quantization without its quant_method, and the weights are floats",
            f"If they should be, remove the settings from {nameless.removeprefix('its ')}. Otherwise: {_USE}",
        )
    used = {key for row in quantized.values() for key in (*row.keys.values(), *row.extra)}
    plain = {key: info for key, info in tensors.items() if key not in used}
    signed = _signed(plain)
    if signed is not None:
        sign, key = signed
        title = f"{_title(methods[0][1])} ({methods[0][0]} says so)" if methods else sign.title
        if sign.title in _READ_IN_PART:
            raise UnsupportedFileError(f"Cannot load {path}", _in_a_variant(title, key), _USE)
        if sign.fix and not methods:
            raise UnsupportedFileError(f"Cannot load {path}", f"{key!r} belongs to {title}", sign.fix)
        raise _unread(path, f"it has weights of {title}, as {key!r} shows")
    twice = next((name for name in quantized if name in plain), None)
    if twice is not None:
        raise BadFileError(
            f"Cannot load {home.get(twice, path)}",
            f"it has {twice!r} both as it is and quantized ({quantized[twice].evidence}), and nothing says which is "
            "right",
            "Download the file again, or quantize the model again",
        )
    _refuse_missing_parts(quantized, home)  # sdquant's own files are held against their metadata
    stray = stray_of(plain)
    if stray is not None:
        raise BadFileError(
            f"Cannot load {path}",
            f"it has {stray[0]!r}, which is part of a quantized weight, but the rest does not match: {stray[1]}",
            "If it is damaged, download it again; if another tool wrote it, use a file in a format that "
            "`sdquant matrix` lists",
        )
    codes = next((key for key, info in plain.items() if _is_weight(key) and info.dtype in CODES), None)
    if codes is not None:
        by = f"{_title(methods[0][1])}, as {methods[0][0]} says" if methods else "an unknown quantization"
        raise UnsupportedFileError(
            f"Cannot load {path}",
            f"its {codes!r} is {plain[codes].dtype}: codes of {by}, {_with_scales(codes, plain)}",
            f"If a config.json belongs to it, as with SDNQ's files, pass the folder that has both. Otherwise: {_USE}",
        )
    left_over = unread_codes(plain)
    if left_over is not None:
        key, scale = left_over
        beside = f"with scales in {scale!r}" if scale is not None else "and nothing tells its scales"
        raise _unread(path, f"its {key!r} is {plain[key].dtype} {list(plain[key].shape)}, {beside}, in no linear layer")
    if methods and not quantized and tensors and not _of_products(configs):
        raise BadFileError(
            f"Cannot load {path}",
            f"{methods[0][0]} says that it is quantized by {_title(methods[0][1])}, but none of its {len(tensors)} "
            "tensors is",
            "Get the weights that belong to the config, or, if they should be floats, remove "
            + ("it" if any(name in methods[0][0] for name in (*SIDE_FILES, *MAPS)) else "quantization_config from it"),
        )


def refuse_unread_index(folder: Path, index: Mapping[str, Any]) -> None:
    """Raise UnsupportedFileError if a pipeline's model_index.json names a method that is not read here."""
    for place, word in named(folder, {"model_index": index}, {}):
        if word.lower() not in READ | _BY_TENSORS:
            raise _unread(folder, _says(place, word))


def contradictions(
    path: Path,
    quantized: Mapping[str, PrequantizedWeight],
    configs: Mapping[str, Mapping[str, Any]],
    metadata: Mapping[str, Any],
) -> Iterator[str]:
    """Yield a sentence for each place that names another method than that of any weight, or other bits."""
    found = {row.scheme for row in quantized.values()}
    backends = {registry.scheme(name).backend for name in found}
    for place, word in named(path, configs, metadata):
        if found and _is_unknown_text(place, word):
            yield (
                f"{place} is {word[:80]!r}, which sdquant does not know; its weights are in "
                f"{', '.join(sorted(found))}, and are read as such"
            )
        elif found and not _is_of(word.lower(), found, backends):
            yield (
                f"{place} says that it is quantized by {_title(word)}, but its weights are in "
                f"{', '.join(sorted(found))}, and are read as such"
            )
    bits = {registry.scheme(name).bits for name in found - {_ANY_BITS}}
    bits |= {row.details["bits"] for row in quantized.values() if "bits" in row.details}  # of the file, not in memory
    for place, table in tables(configs, metadata) if _ANY_BITS not in found else ():
        for words in disagreements(table, bits):
            yield f"{place} {words}; its weights are in {', '.join(sorted(found))}, and are read as such"


def _is_of(word: str, schemes: set[str], backends: set[str]) -> bool:
    """Return whether a file with weights in these schemes, of these backends, may be what the method `word` writes."""
    if word in NUNCHAKU:
        return bool(schemes & _OF_NUNCHAKU)
    return _BACKENDS.get(word) in (*backends, None)


def refuse_pickles(folder: Path, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise UnsupportedFileError if a folder's weights are tensors that torchao pickled, as it did before 0.16.

    Args:
        configs: see `refuse_unread`.
    """
    if not any(word == "torchao" for _, word in named(folder, configs, {})):
        return
    pickles = folders.visible_weights(folder, folders.PICKLES)
    if pickles and not folders.visible_weights(folder, folders.WEIGHTS):
        raise UnsupportedFileError(
            f"Cannot load {folder}",
            f"{pickles[0].name} has torchao's tensors as Python objects, which only the version of torchao that "
            "pickled them can open; sdquant reads those in .safetensors files, which torchao has since 0.16",
            "Load it with the diffusers and torchao that saved it, and save it as .safetensors with torchao 0.16, or "
            "load the unquantized model and quantize it here",
        )


def _unread(path: Path, why: str) -> UnsupportedFileError:
    return UnsupportedFileError(f"Cannot load {path}", f"{why}, which sdquant does not read", _USE)


def _says(place: str, word: str) -> str:
    return f"{place} says that it is quantized by {_title(word)}"


def _variant(path: Path, tensors: Mapping[str, TensorInfo], place: str, word: str) -> UnsupportedFileError:
    """Return the error for a component of a method of which sdquant reads something, and nothing in this one."""
    signed = _signed(tensors)
    none = "none of its weights is in a variant of it that sdquant reads"
    why = none if signed is None else _in_a_variant("it", signed[1])
    return UnsupportedFileError(f"Cannot load {path}", f"{_says(place, word)}, and {why}", _USE)


def _in_a_variant(title: str, key: str) -> str:
    """Return the reason why a layer is not read. key: of one of its tensors."""
    return (
        f"its layer {_split(key)[0].rstrip('.')!r} is in a variant of {title} that sdquant does not read, as {key!r} "
        "shows"
    )


def _title(word: str) -> str:
    """Return the usual name of the method that a config calls `word`."""
    return TITLES.get(word.lower(), repr(word[:80]) if word.lower() not in READ else word)


def _refuse_missing_parts(quantized: Mapping[str, PrequantizedWeight], home: Mapping[str, Path]) -> None:
    for row in quantized.values():
        key = registry.of_scheme(row.scheme).missing(row)
        if key is not None:
            raise BadFileError(
                f"Cannot load {home[next(iter(row.keys.values()))]}",
                f"it has no {key!r}, which belongs to its quantized weight {row.name!r} ({row.evidence})",
                "Download the file again, or quantize the model again",
            )


def _is_unknown_text(place: str, word: str) -> bool:
    """Return whether a word that `named` yields is of tools that write what they like there, and no method's name.

    Beside weights that are recognised it is only told, see `contradictions`; what is left over is refused as ever.
    """
    return method_names.is_free(place) and word.lower() not in READ | _BY_TENSORS


def _signed(plain: Mapping[str, TensorInfo]) -> tuple[_Sign, str] | None:
    """Return the sign of the method whose tensor names are present, and one of these names; None if there is none."""
    beside: dict[str, dict[str, str]] = {}
    for key in plain:
        if _HOOKS in key:
            return _Sign(title="NNCF in its own modules", every=()), key
        stem, last = _split(key)
        beside.setdefault(stem, {})[last] = key
    for sign in _SIGNS:
        for names in beside.values():
            if not names.keys() >= set(sign.every) or (sign.some and not names.keys() & set(sign.some)):
                continue
            if not sign.dtypes or plain[names[sign.every[0]]].dtype in sign.dtypes:
                return sign, names[sign.every[-1]]
    return None


def _split(key: str) -> tuple[str, str]:
    for words in _TWO_WORDS:
        if key.endswith(f".{words}"):
            return key.removesuffix(words), words
    stem, _, last = key.rpartition(".")
    return stem, last


def _with_scales(codes: str, plain: Mapping[str, TensorInfo]) -> str:
    """Return what an error says of the scales of codes: SDNQ's have them beside them, and the rest in a config."""
    scale = f"{codes.removesuffix('weight')}scale"
    return f"and nothing says how {scale!r} scales them" if scale in plain else "without their scales"


def _is_weight(key: str) -> bool:
    return re.search(r"(^|\.)weight$", key) is not None


def _of_products(configs: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether a config has quantization rules, which may apply only to products of activations."""
    return any(table.get("rules") for values in configs.values() for table in tables_of(values))
