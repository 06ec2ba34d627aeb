"""Nunchaku's quantized weights in a file's header, by their tensors alone. Imports no torch.

A layer X has X.qweight and tensors beside it, all in the order in which the tensor cores of a GPU read them; see
`_nunchaku_order`. What else its runtime does to a model (layers merged, rows interleaved, activations shifted) depends
on the model's family: `formats.nunchaku_names` undoes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..core import PrequantizedWeight, TensorInfo, leaf

# Keys in the details of weights found. The first is there in each of them.
ORDER = "order"
ROWS = "rows"  # [first, the one after the last]: it is only these rows of the tensors
HEIGHT = "height"  # with ROWS, the number of all
# It is picked rows: for each [first, size, step, count] `size` rows from `first` on, then `size` from `step` after that
# on, `count` times in all.
PICKS = "picks"
STACKED = "stacked"  # a second weight lies under it, not beside it
SPLITS = "splits"  # its rows are interleaved: of so many chunks the first row of each, then the second, ...
GROUP_SIZE = "group_size"
NUNCHAKU = "nunchaku"
NVFP4 = "svdquant_nvfp4"
SVDQUANT = ("svdquant_w4a4", NVFP4)  # its schemes
_TEXT_GROUP = 128  # of the text encoder's AWQ


@dataclass(frozen=True, kw_only=True)
class _Form:
    """A format of layers.

    Attributes:
        scheme, words: what it is here, and for people.
        codes: dtype of X.qweight. rows, columns: weights for each of its rows and columns.
        beside: dtypes of the scales, of which it has one; () for any. sign: last words of tensors, one of which is
            there.
        parts: last words of the key of each part, in all spellings. whole: parts that do not have the weight's rows.
        optional: those that may be missing. hints: last words of tensors that do not change the weight.
    """

    scheme: str
    words: str
    codes: str
    rows: int
    columns: int
    parts: Mapping[str, tuple[str, ...]]
    sign: tuple[str, ...]
    beside: tuple[str, ...] = ()
    whole: frozenset[str] = frozenset({"smooth", "down", "factor"})
    optional: frozenset[str] = frozenset({"factor", "rows"})
    hints: tuple[str, ...] = ()
    group: int = 0


_SVD = {
    "scale": ("wscales",), "smooth": ("smooth", "smooth_factor"), "down": ("lora_down", "proj_down"),
    "up": ("lora_up", "proj_up"),
}  # fmt: skip
_FACTORS = {"factor": ("wtscale",), "rows": ("wcscales",)}
_SIGN = tuple(word for words in _SVD.values() for word in words)
_ORIGINAL = ("smooth_orig", "smooth_factor_orig")  # what smoothing was before it went into the layer before
# Dtypes of powers of two as scales: AutoRound writes MXFP4 in Nunchaku's tiles, which is not read.
_OTHERS = ("uint8", "float8_e8m0fnu")
_FORMS: tuple[_Form, ...] = (
    _Form(
        scheme=NVFP4, words="4-bit floats and a low-rank branch", codes="int8", rows=1, columns=2, sign=_SIGN,
        parts={**_SVD, **_FACTORS}, beside=("float8_e4m3fn",), hints=_ORIGINAL,
    ),
    _Form(
        scheme="svdquant_w4a4", words="4-bit integers and a low-rank branch", codes="int8", rows=1, columns=2,
        sign=_SIGN, parts={**_SVD, **_FACTORS}, hints=_ORIGINAL,
    ),
    _Form(
        scheme="awq_w4a16", words="4-bit integers, scales and zero points of groups (AWQ)", codes="int32", rows=4,
        columns=2, sign=("wzeros",), parts={"scale": ("wscales",), "zero": ("wzeros",)},
    ),
    _Form(
        scheme="awq_w4a16", words="4-bit integers, scales and zero points of groups of 128 (AWQ)", codes="int16",
        rows=4, columns=1, sign=("scaled_zeros",), parts={"scale": ("scales",), "zero": ("scaled_zeros",)},
        group=_TEXT_GROUP,
    ),
)  # fmt: skip


def find(tensors: Mapping[str, TensorInfo]) -> list[PrequantizedWeight]:
    """See `Backend.find`. Names are X.weight, for the file's own names of layers."""
    keys = [key for key in tensors if key.rpartition(".")[2] == "qweight" and _is_matrix(tensors[key])]
    found = ((key, _form(key, tensors)) for key in keys)
    return [_weight(key, form, tensors) for key, form in found if form is not None]


def _is_matrix(info: TensorInfo) -> bool:
    return len(info.shape) == 2 and 0 not in info.shape


def _form(key: str, tensors: Mapping[str, TensorInfo]) -> _Form | None:
    for form in _FORMS:
        if tensors[key].dtype != form.codes or not any(leaf(key, word) in tensors for word in form.sign):
            continue
        scale = tensors.get(leaf(key, form.parts["scale"][0]))
        if scale is not None and scale.dtype in _OTHERS:
            return None
        if not form.beside or (scale is not None and scale.dtype in form.beside):
            return form
    return None


def _weight(key: str, form: _Form, tensors: Mapping[str, TensorInfo]) -> PrequantizedWeight:
    keys = {"codes": key}
    for part, words in form.parts.items():
        here = [at for at in (leaf(key, word) for word in words) if at in tensors]
        keys |= {part: here[0]} if here else {}
    rows, columns = tensors[key].shape
    return PrequantizedWeight(
        name=leaf(key, "weight"),
        scheme=form.scheme,
        keys=keys,
        extra=tuple(at for at in (leaf(key, word) for word in form.hints) if at in tensors),
        evidence=f"Nunchaku's {'AWQ' if form.scheme == 'awq_w4a16' else 'SVDQuant'}: {form.words}, in tiles",
        details={ORDER: NUNCHAKU, **({GROUP_SIZE: form.group} if form.group else {})},
        shape=(rows * form.rows, columns * form.columns),
        nbytes=sum(tensors[at].nbytes for at in keys.values()),
    )


def missing(found: PrequantizedWeight) -> str | None:
    """See `Backend.missing`."""
    form = next(form for form in _FORMS if form.scheme == found.scheme)
    needed = ((part, words[0]) for part, words in form.parts.items() if part not in form.optional)
    return next((leaf(found.name, word) for part, word in needed if part not in found.keys), None)


def is_text(found: PrequantizedWeight) -> bool:
    """Return whether a weight is one of the text encoder's, whose layers are as in transformers."""
    return GROUP_SIZE in found.details


def piece(
    weights: Sequence[PrequantizedWeight],
    rows: tuple[int, int] | None,
    splits: int,
    tensors: Mapping[str, TensorInfo],
    *,
    is_stacked: bool = False,
) -> PrequantizedWeight:
    """Return a weight that is some rows of one of the file's, or that two of them are side by side, or stacked.

    Args:
        weights: of the file, from `find`. rows: of the first, if there is one only; None for all.
        splits: see SPLITS; 1 for none.
    """
    first, *others = weights
    assert first.shape is not None
    height = first.shape[0] if rows is None else rows[1] - rows[0]
    details = {
        **first.details,
        **({ROWS: list(rows), HEIGHT: first.shape[0]} if rows else {}),
        **({SPLITS: splits} if splits > 1 else {}),
        **({STACKED: True} if is_stacked else {}),
    }
    keys, extra, width, nbytes = dict(first.keys), list(first.extra), first.shape[1], _nbytes(first, height, tensors)
    for other in others:  # of another rank and smoothing: the factors are blocks of larger ones
        assert other.shape is not None
        keys |= {f"{part}_2": key for part, key in other.keys.items()}
        extra += other.extra
        nbytes += sum(tensors[key].nbytes for key in other.keys.values())
        across = "up" if is_stacked else "down"
        nbytes += sum(tensors[one.keys[across]].nbytes for one in (first, other))  # at most: the zeros beside them
        height, width = (height + other.shape[0], width) if is_stacked else (height, width + other.shape[1])
    return replace(first, keys=keys, extra=tuple(extra), details=details, shape=(height, width), nbytes=nbytes)


def picked(
    weight: PrequantizedWeight,
    picks: Sequence[Sequence[int]],
    shape: tuple[int, ...],
    tensors: Mapping[str, TensorInfo],
) -> PrequantizedWeight:
    """Return a weight of `shape` that is picked rows of one of the file's, from `find`; see PICKS."""
    assert weight.shape is not None
    details = {**weight.details, PICKS: [list(pick) for pick in picks], HEIGHT: weight.shape[0]}
    return replace(weight, details=details, shape=shape, nbytes=_nbytes(weight, shape[0], tensors))


def _nbytes(weight: PrequantizedWeight, rows: int, tensors: Mapping[str, TensorInfo]) -> int:
    """Return what so many rows of a weight take."""
    assert weight.shape is not None
    form = next(form for form in _FORMS if form.scheme == weight.scheme)
    return sum(
        tensors[key].nbytes * (1 if part in form.whole else rows) // (1 if part in form.whole else weight.shape[0])
        for part, key in weight.keys.items()
    )
