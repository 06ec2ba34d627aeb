"""GGUF mixes such as `q4_k_m`: names of files, not of types. Most weights get the base type, some a more precise one.

The rows follow llama.cpp's `llama_tensor_get_type` as city96's patch applies it to diffusion models, reduced to rules
on names: where llama.cpp uses the better type for every third block only, all blocks get it here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_END = r"(\.\d+)?(\.weight)?$"
# The same layer under the names of diffusers, of the original checkpoints, of transformers and of llama.cpp.
_VALUE = rf"(^|\.)(to_v|add_v_proj|v_proj|attn_v|SelfAttention\.v|EncDecAttention\.v|self_attn\.v|cross_attn\.v){_END}"
_FUSED = rf"(^|\.)(\w*qkv|attn_qkv|to_qkv|in_proj){_END}"
_DOWN = r"(^|\.)(ff(_context)?\.net\.2|ffn\.2|(img_|txt_)?mlp\.2|mlp\.fc2|down_proj|ffn_down|wo|w2)(\.weight)?$"
_OUT = rf"(^|\.)(to_out|to_add_out|out_proj|o_proj|attn_output|attn\.proj|attention\.out){_END}"
_EARLY = r"(^|\.)(blocks|layers|block|blk|\w+_blocks)\.[0-3]\..*"

BASES: Mapping[str, str] = {
    "q3_k_s": "q3_k", "q3_k_m": "q3_k", "q3_k_l": "q3_k", "q4_k_s": "q4_k", "q4_k_m": "q4_k", "q5_k_s": "q5_k",
    "q5_k_m": "q5_k",
}  # fmt: skip

# (mix, pattern of the weight's name, type). The first row that matches wins; none: the base type.
_ROWS: tuple[tuple[str, str, str], ...] = (
    ("q3_k_m", _VALUE, "q4_k"),
    ("q3_k_m", _FUSED, "q4_k"),
    ("q3_k_m", _DOWN, "q4_k"),
    ("q3_k_m", _OUT, "q4_k"),
    ("q3_k_l", _VALUE, "q5_k"),
    ("q3_k_l", _FUSED, "q4_k"),
    ("q3_k_l", _DOWN, "q5_k"),
    ("q3_k_l", _OUT, "q5_k"),
    ("q4_k_s", _EARLY + _VALUE, "q5_k"),
    ("q4_k_s", _DOWN, "q5_k"),
    ("q4_k_m", _VALUE, "q6_k"),
    ("q4_k_m", _FUSED, "q5_k"),
    ("q4_k_m", _DOWN, "q6_k"),
    ("q5_k_m", _VALUE, "q6_k"),
    ("q5_k_m", _FUSED, "q6_k"),
    ("q5_k_m", _DOWN, "q6_k"),
)
_COMPILED = tuple((mix, re.compile(pattern), kind) for mix, pattern, kind in _ROWS)

# Supported values of `general.file_type` (llama.cpp's LlamaFileType).
FILE_TYPES: Mapping[int, str] = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 7: "q8_0", 8: "q5_0", 9: "q5_1", 10: "q2_k", 11: "q3_k_s", 12: "q3_k_m",
    13: "q3_k_l", 14: "q4_k_s", 15: "q4_k_m", 16: "q5_k_s", 17: "q5_k_m", 18: "q6_k", 32: "bf16",
}  # fmt: skip
_FLOATS: Mapping[str, str] = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def mix_type(mix: str, weight_name: str) -> str:
    """Return the type of one weight in a mix; plain types are returned unchanged."""
    base = BASES.get(mix, mix)
    return next((kind for name, test, kind in _COMPILED if name == mix and test.search(weight_name)), base)


def dominant(types: Mapping[str, int], file_type: int | None = None, name: str = "") -> str:
    """Return the scheme of a file as a whole.

    Args:
        types: bytes by type, as GGUF type names or torch dtype names.
        file_type: the file's `general.file_type`.
        name: the file's name.

    It is the block type with the most bytes, since floats next to it are the unquantized rest; without block types, the
    float type with the most bytes. It is a mix if the file names one that contains that type.
    """
    sizes: dict[str, int] = {}
    for kind, nbytes in types.items():
        sizes[_FLOATS.get(kind, kind)] = sizes.get(_FLOATS.get(kind, kind), 0) + nbytes
    blocks = {kind: nbytes for kind, nbytes in sizes.items() if kind not in _FLOATS.values() and kind not in _NUMBERS}
    floats = {kind: nbytes for kind, nbytes in sizes.items() if kind in _FLOATS.values()}
    if not blocks and not floats:
        raise ValueError(f"no weights among the types {sorted(types)}")
    most: str = max(blocks or floats, key=sizes.__getitem__)
    spelled: list[str] = re.findall(r"q\d_k_[sml](?![a-z])", name.lower())
    for hint in (FILE_TYPES.get(-1 if file_type is None else file_type, ""), *spelled):
        if hint in BASES and BASES[hint] in sizes and most in _types_of(hint):
            return hint
    return most


_NUMBERS = frozenset({"float64", "int8", "int16", "int32", "int64", "uint8", "bool", "f64", "i8", "i16", "i32", "i64"})


def _types_of(mix: str) -> set[str]:
    return {BASES[mix]} | {kind for name, _, kind in _ROWS if name == mix}
