"""ComfyUI's quantized weights in a file, by what it says of their layers. Imports no torch.

`formats.comfy_metadata` reads what a file says: for each weight a mapping of "format", and of options that change its
meaning. Here are the formats, and the tensors that each consists of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core import ROTATION, PackedSpec, PrequantizedWeight, TensorInfo, leaf
from ..errors import BadFileError, UnsupportedFileError
from ._hub_find import BYTES, GROUP_SIZE, PACKING, lacking

METADATA = "_quantization_metadata"  # the entry of a file's metadata that says of all layers what their tensors say
# The format that a file names there for ComfyUI to refuse it: it is said of layers that need not be in the file.
REFUSED = "sdquant's own: load it with the nodes of 'sdquant install-extension'"
TILED = "tiled"  # in the details of weights found: scales are in tiles, and padded
INVERSE = "inverse_factor"  # and: scales are to be divided by the factor of the file
LOW_FIRST = "low first"  # in those of others' weights in tiles: halves of bytes are as here, and exponent 0 is a number
SHIFTED = "act_unsigned"  # of SVDQuant: what is added to its activations was taken out of the layer's bias
GROUP = 16  # columns of asym_w4a8_int8 that share a scale, unless a file says another number
ORIGINAL_SHAPE = "orig_shape"  # before weights were padded: convert_to_quant says it
LINEAR_DTYPE = "linear_dtype"  # of convrot_w4a4: what comfy-kitchen rounds activations to, "int4" or "int8"
EXACT = "full_precision_matrix_mult"  # that ComfyUI multiplies with activations as they are
_GROUPS = (256, 64, 16)  # of rotations that are made, the first that divides the inputs


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of layers.

    Attributes:
        name: in ComfyUI's files. schemes: here; `_scheme` chooses one for a weight. words: what it is, for people.
        codes: their dtype.
        parts: last words of the file key of each other part, in all spellings. optional: parts that may be missing.
        details: of each weight, from the format alone. unread: last words of tensors that change the weight, and are
            not read. hints: of tensors about it that do not.
        group: weights that share a scale of one byte, where the file's scales are padded; 0 elsewhere.
    """

    name: str
    schemes: tuple[str, ...]
    words: str
    codes: str
    parts: Mapping[str, tuple[str, ...]]
    optional: frozenset[str] = frozenset()
    details: Mapping[str, Any] = field(default_factory=dict)
    group: int = 0
    unread: tuple[str, ...] = ()
    hints: tuple[str, ...] = ("comfy_quant", "input_scale")


_SCALE = {"scale": ("weight_scale",)}
# Last words of tensors that change a weight in one format or another, and are not ignored beside the others.
_CHANGES = (
    "pre_quant_scale", "smooth_factor", "proj_down", "proj_up", "weight_correction", "weight_scale_2", "weight_zero",
    "weight_zeros", "weight_codebook", "weight_s_rel", "weight_s_channel",
)  # fmt: skip
INT8, W4A8, SVDQUANT, BLOCKS = "int8_tensorwise", "asym_w4a8_int8", "svdquant_w4a4", "int8_blockwise"
ROWS: tuple[Format, ...] = (
    Format(
        name=INT8,
        schemes=("int8_row", "int8_tensor", "int8_convrot"),
        words="int8 codes",
        codes="int8",
        parts=_SCALE,
    ),
    Format(  # convert_to_quant's, for nodes of its author's: ComfyUI never had it
        name=BLOCKS,
        schemes=("hub-int8",),
        words="int8 codes, a scale for each block of rows and columns",
        codes="int8",
        parts=_SCALE,
        details={PACKING: BYTES, GROUP_SIZE: 128},
    ),
    Format(
        name="nvfp4",
        schemes=("comfy:nvfp4",),
        words="4-bit floats, the even column in the high half of a byte, scales of 16 in tiles",
        codes="uint8",
        parts={**_SCALE, "factor": ("weight_scale_2",), "columns": ("pre_quant_scale",)},
        optional=frozenset({"columns"}),
        details={TILED: True},
        group=16,
    ),
    Format(
        name="mxfp8",
        schemes=("mxfp8",),
        words="8-bit floats, powers of two as scales of 32, in tiles",
        codes="float8_e4m3fn",
        parts=_SCALE,
        details={TILED: True},
        group=32,
    ),
    Format(  # convert_to_quant's, with one more scale, for cards that have no MXFP8
        name="hybrid_mxfp8",
        schemes=("mxfp8",),
        words="8-bit floats, powers of two as scales of 32, in tiles",
        codes="float8_e4m3fn",
        parts=_SCALE,
        details={TILED: True},
        group=32,
        hints=("comfy_quant", "input_scale", "weight_scalar"),
    ),
    Format(
        name="convrot_w4a4", schemes=("w4a4",), words="4-bit integers, a scale for each row", codes="int8", parts=_SCALE
    ),
    Format(
        name=W4A8,
        schemes=("w4a8", "w6a8"),
        words="codes of 8-bit integers, a scale for each row, and of the codes one for each group",
        codes="int8",
        parts={
            "s_rel": ("weight_s_rel",),
            "s_channel": ("weight_s_channel",),
            "codebook": ("weight_codebook",),
        },
        optional=frozenset({"codebook"}),
        unread=("weight_correction",),
    ),
    Format(
        name=SVDQUANT,
        schemes=("svdquant_w4a4",),
        words="4-bit integers and a low-rank branch",
        codes="int8",
        parts={
            **_SCALE,
            "smooth": ("smooth_factor", "weight_smooth_factor"),
            "down": ("proj_down", "weight_proj_down"),
            "up": ("proj_up", "weight_proj_up"),
        },
    ),
    Format(
        name="awq_w4a16",
        schemes=("awq_w4a16",),
        words="4-bit integers, scales and zero points of groups",
        codes="int8",
        parts={**_SCALE, "zero": ("weight_zero", "weight_zeros")},
    ),
)
_BY_NAME = {row.name: row for row in ROWS}
# The first is written.
_BY_SCHEME = {scheme: row for row in reversed(ROWS) for scheme in row.schemes if row.name != BLOCKS}
# The formats of this backend, and the dtype of their codes.
FORMATS: Mapping[str, str] = {row.name: row.codes for row in ROWS}
_ROTATED = ("int8_convrot", "w4a4", "w4a8", "w6a8")


def details_of(scheme: str, columns: int) -> dict[str, Any]:
    """Return the details of a weight with so many inputs that is quantized to a scheme."""
    rotation = next((group for group in _GROUPS if columns % group == 0), 0) if scheme in _ROTATED else 0
    of_groups = {GROUP_SIZE: GROUP} if scheme in ("w4a8", "w6a8") else {}
    return {**of_groups, **({ROTATION: rotation} if rotation else {})}


def entry(spec: PackedSpec) -> dict[str, Any]:
    """Return what ComfyUI's files say of the layer of a weight, as JSON values in comfy-kitchen's order."""
    form = _BY_SCHEME[spec.scheme.name].name
    of_groups = {GROUP_SIZE: spec.details[GROUP_SIZE]} if GROUP_SIZE in spec.details else {}
    flag = {"convrot": True} if spec.rotation and form == INT8 else {}
    turned = {"convrot_groupsize": spec.rotation} if spec.rotation else {}
    shift = {"act_unsigned": False} if form == SVDQUANT else {}  # of some layers ComfyUI assumes it
    eight = {LINEAR_DTYPE: spec.details[LINEAR_DTYPE]} if LINEAR_DTYPE in spec.details else {}
    exact = {EXACT: True} if spec.details.get(EXACT) else {}
    return {"format": form, **of_groups, **flag, **turned, **eight, **shift, **exact}


def find(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
    """See `Backend.find`. `config` may contain "comfy", what the file says of each of its weights."""
    rows = config.get("comfy") or {}
    return [
        _weight(name, tensors, row, _BY_NAME[row["format"]]) for name, row in rows.items() if row["format"] in _BY_NAME
    ]


def _weight(name: str, tensors: Mapping[str, TensorInfo], row: Mapping[str, Any], form: Format) -> PrequantizedWeight:
    is_shifted = form.name == SVDQUANT and _is_shifted(name, row)
    read = {word for words in form.parts.values() for word in words}
    strange = [word for word in dict.fromkeys((*form.unread, *_CHANGES)) if word not in read]
    unread = next((key for key in (leaf(name, word) for word in strange) if key in tensors), None)
    if unread is not None:
        raise UnsupportedFileError(
            f"Cannot read weight {name!r}",
            f"it is in ComfyUI's {form.name} with {unread!r}, which sdquant does not read",
            "Use a file of the same model in a format that `sdquant matrix` lists",
        )
    _refuse_banks(name, tensors[name].shape, form)
    keys = {"codes": name}
    for part, words in form.parts.items():
        here = [key for key in (leaf(name, word) for word in words) if key in tensors]
        keys |= {part: here[0]} if here else {}
    if form.name == BLOCKS and "scale" not in keys:  # the other backend, whose scheme it is, has no such names
        raise lacking(name, leaf(name, "weight_scale"))
    whole = form.name == INT8 and _is_single(tensors, name, keys.get("scale", ""))
    scales = ("one scale" if whole else "a scale for each row") + " in *.weight_scale" if form.name == INT8 else ""
    turned = f"rotated in groups of {row[ROTATION]}" if ROTATION in row else ""
    shift = "shifted activations" if is_shifted else ""
    evidence = ", ".join(words for words in (form.words, scales, turned, shift) if words)
    return PrequantizedWeight(
        name=name,
        scheme=_scheme(form, row, whole, tensors[name], tensors.get(keys.get("s_rel", ""))),
        keys=keys,
        extra=tuple(key for key in (leaf(name, hint) for hint in form.hints) if key in tensors),
        evidence=f"ComfyUI's {form.name}: {evidence}",
        details={
            **form.details,
            **{option: row[option] for option in (ROTATION, GROUP_SIZE, LINEAR_DTYPE, EXACT) if option in row},
            **({SHIFTED: True} if is_shifted else {}),
        },
        nbytes=_nbytes(form, tensors[name], tensors.get(keys.get("scale", ""))),
        shape=_shape_before_padding(name, tensors, row, form),
    )


def _refuse_banks(name: str, shape: tuple[int, ...], form: Format) -> None:
    """Raise UnsupportedFileError for the weights of several experts in one tensor, which ComfyUI has of mixtures.

    SVDQuant's weights lie in tiles: theirs with three dimensions are damaged, and the backend says how.
    """
    if len(shape) == 3 and form.name != SVDQUANT:
        raise UnsupportedFileError(
            f"Cannot read weight {name!r}",
            f"it has the weights of {shape[0]} experts in one tensor, {list(shape)} in ComfyUI's {form.name}, and "
            "sdquant reads one weight of a layer",
            "Use a file of the same model in a format that `sdquant matrix` lists",
        )


_TILES = "kitchen_tile_packed_w4a4"


def _is_shifted(name: str, row: Mapping[str, Any]) -> bool:
    """Return whether the activations of a layer of SVDQuant are shifted. Raise UnsupportedFileError for a layer whose
    branch sees others, or whose tensors are in another order."""
    shifted = row.get(SHIFTED, name.endswith("_mlp.net.2.weight"))  # as ComfyUI takes it where nothing is said
    basis, order = row.get("lowrank_branch_input_basis", "raw"), row.get("layout", _TILES)
    why = None
    if type(shifted) is not bool:
        why = f"whether its activations are shifted is {shifted!r:.40} ({SHIFTED})"
    elif basis != "raw":
        why = f"its low-rank branch is made for inputs in the basis {basis!r:.40}"
    elif order != _TILES:
        why = f"its tensors are in the order {order!r:.40}"
    if why is not None:
        raise UnsupportedFileError(
            f"Cannot read weight {name!r}",
            f"it is in ComfyUI's {SVDQUANT}, and {why}, which sdquant does not read",
            "Use a file of the same model in a format that `sdquant matrix` lists",
        )
    return bool(shifted)


def _scheme(form: Format, row: Mapping[str, Any], whole: bool, codes: TensorInfo, groups: TensorInfo | None) -> str:
    """Return the scheme of a weight. whole: it has one scale. groups: the scales of W4A8's groups."""
    if form.name == INT8:
        return "int8_convrot" if ROTATION in row else "int8_tensor" if whole else "int8_row"
    if form.name == W4A8 and groups is not None and groups.shape and codes.shape:
        size = row.get(GROUP_SIZE, GROUP)
        return "w6a8" if type(size) is int and codes.shape[-1] * 4 == groups.shape[-1] * size * 3 else "w4a8"
    return form.schemes[0]


def _is_single(tensors: Mapping[str, TensorInfo], name: str, key: str) -> bool:
    """Return whether a weight of several rows has one scale."""
    scale = tensors.get(key)
    return scale is not None and (not scale.shape or math.prod(scale.shape) == 1 < (tensors[name].shape or (1,))[0])


def _shape_before_padding(
    name: str, tensors: Mapping[str, TensorInfo], row: Mapping[str, Any], form: Format
) -> tuple[int, ...] | None:
    """Return the shape of a weight that is padded in its file: what the file says of it, else as many rows as its bias
    has. None for others, and where neither tells. Raise BadFileError if the file's words do not fit its codes."""
    codes, bias = tensors[name].shape, tensors.get(leaf(name, "bias"))
    if not form.group or len(codes) != 2:
        return None
    size = (codes[0], codes[1] * _in_a_byte(tensors[name]))

    def fits(shape: object) -> bool:
        if not isinstance(shape, (list, tuple)) or not all(type(n) is int and n > 0 for n in shape):
            return False
        return tuple(shape) == size or tuple(-(-n // form.group) * form.group for n in shape) == size

    words = row.get(ORIGINAL_SHAPE)
    if words is not None and not fits(words):
        raise BadFileError(
            f"Cannot read weight {name!r}",
            f"its comfy_quant says that its shape was {words!r:.60}, but its codes are of {list(size)}",
            "Download the file again from its source",
        )
    rows = (*bias.shape, size[1]) if bias is not None else size
    shape = words if words is not None else rows if fits(rows) else size
    return tuple(shape) if tuple(shape) != size else None


def _in_a_byte(codes: TensorInfo) -> int:
    return 2 if codes.dtype == "uint8" else 1


def _nbytes(form: Format, codes: TensorInfo, scale: TensorInfo | None) -> int | None:
    """Return the bytes in memory of a weight whose file has padded scales, or scales that rows share; None if it is as
    large there."""
    if form.name == BLOCKS:
        blocks = scale.shape[-1] if scale is not None and scale.shape else 0
        return codes.nbytes + codes.shape[0] * blocks * 4 if codes.shape else None
    return codes.nbytes + -(-codes.nbytes * _in_a_byte(codes) // form.group) if form.group else None


def missing(found: PrequantizedWeight) -> str | None:
    """See `Backend.missing`."""
    form = _BY_SCHEME[found.scheme]
    needed = ((part, words[0]) for part, words in form.parts.items() if part not in form.optional)
    # sdquant's own files have the factor of the scales among the details.
    there = found.keys.keys() | found.details.keys()
    return next((leaf(found.name, word) for part, word in needed if part not in there), None)
