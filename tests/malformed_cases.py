"""What can be wrong with a quantized weight: rows of a format (see `malformed`), a name, and a change to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .malformed import BIAS, FORMATS, NAME, OTHER, STATE, STEM, Change, Model, line

Edit = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One malformed model.

    Attributes:
        form: the format. change: makes the sound model malformed.
        load: whether `load_model` refuses it too. What the codes themselves stand for only `verify` looks at.
        lone: whether it shows in the weights file alone, without the JSON files beside it.
        says: what the error must name beside the file.
    """

    form: str
    change: Change
    load: bool = True
    lone: bool = True
    says: str = STEM.rstrip(".")


def _set(key: str, value: Tensor) -> Change:
    def change(model: Model) -> None:
        model.tensors[key] = value

    return change


def _edit(key: str, function: Edit) -> Change:
    def change(model: Model) -> None:
        model.tensors[key] = function(model.tensors[key])

    return change


def _drop(key: str) -> Change:
    def change(model: Model) -> None:
        del model.tensors[key]

    return change


def _last(value: float) -> Edit:
    """The last value replaced."""

    def function(tensor: Tensor) -> Tensor:
        made = tensor.clone()
        made.view(-1)[-1] = value
        return made

    return function


def _bytes(value: int) -> Edit:
    return lambda tensor: torch.full_like(tensor.view(torch.uint8), value).view(tensor.dtype)


# What can be wrong with any tensor: how many values it has, how they lie, and what they are.
_SHAPES: dict[str, Edit] = {
    "longer": lambda t: torch.cat([t, t[-1:]]) if t.ndim else torch.stack([t, t]),
    "twice": lambda t: torch.cat([t, t]) if t.ndim else torch.stack([t, t, t, t]),
    "shorter": lambda t: t[:-1],
    "empty": lambda t: t[:0] if t.ndim else t.reshape(1)[:0],
    "deeper": lambda t: t[None],
    "flat": lambda t: t.reshape(-1),
    "turned": lambda t: t.t(),
}
_ALL = tuple(_SHAPES)
_COUNTS = ("longer", "twice", "shorter", "empty")  # for parts of which only the number of values matters
_FLAT = (*_COUNTS, "deeper")  # for parts of one dimension


def _named(name: str, key: str) -> Change:
    """One of the above, "as <dtype>", or "missing"."""
    if name == "missing":
        return _drop(key)
    if name in _SHAPES:
        return _edit(key, _SHAPES[name])
    dtype = getattr(torch, name.removeprefix("as "))
    return _edit(key, lambda tensor: (tensor.float() if tensor.dtype.itemsize == 1 else tensor).to(dtype))


_NF4 = ("nf4", "fp4", "nf4 nested")
_SCALED = ("fp8 weight_scale", "fp8 weight_scale_inv")
_BITS8, _BITS4 = ("qint8", "qfloat8", "diffusers qint8"), ("qint4", "qint2", "diffusers qint4")
_UINT = ("sdnq-uint4", "sdnq-uint3")
_IN_TILES = ("comfy mxfp8", "comfy nvfp4")
_COMFY = ("comfy int8_row", "comfy int8_convrot", "comfy w4a4", "comfy w4a8", *_IN_TILES)
# Formats, part -> what must not be done to that part.
_PARTS: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (_NF4, "codes", (*_COUNTS, "as int8", "as float64", "missing")),
    (("nf4", "fp4"), "absmax", (*_FLAT, "as float64", "as int32", "as uint8", "missing")),
    (("nf4 nested",), "absmax", (*_FLAT, "as float32", "as int8", "missing")),
    (_NF4, "quant_map", (*_FLAT, "as int32", "missing")),
    (("nf4 nested",), "nested_absmax", (*_FLAT, "as float64", "as uint8", "missing")),
    (("nf4 nested",), "nested_quant_map", (*_FLAT, "as int32", "missing")),
    (_NF4, "state", ("twice", "shorter", "empty", "deeper", "as int16", "missing")),
    (("bnb-int8",), "codes", (*_ALL, "as uint8", "as int16", "as float16", "missing")),
    (("bnb-int8",), "scb", (*_FLAT, "as float64", "as int32", "missing")),
    (("bnb-int8",), "format", ("longer", "empty")),
    (("fp8 scale_weight", *_SCALED), "codes", (*_ALL, "as uint8", "as int8", "as float16", "missing")),
    (("fp8 plain",), "codes", (*_ALL, "missing")),
    (("fp8 scale_weight",), "scale", ("longer", "twice", "empty", "as int32", "as float64", "as uint8")),
    (_SCALED, "scale", (*_COUNTS, "turned", "deeper", "as int32", "as float64")),
    (_BITS8, "data", (*_ALL, "as int16", "as float32", "missing")),
    (_BITS4, "data", (*_FLAT, "flat", "as int8", "as int16", "missing")),
    ((*_BITS8, *_BITS4), "scale", (*_ALL, "as int32", "as float64", "missing")),
    (_BITS4, "shift", (*_ALL, "as int32", "as float64", "as float16", "missing")),
    (("sdnq-int8",), "weight", (*_ALL, "as uint8", "as int16", "as float16", "missing")),
    (_UINT, "weight", (*_FLAT, "as int8", "as int16", "missing")),
    (("sdnq-uint3",), "weight", ("turned",)),
    (("sdnq-int8", *_UINT), "scale", (*_ALL, "as int32", "missing")),
    (_UINT, "zero_point", (*_ALL, "as int32", "missing")),
    (_COMFY, "codes", (*_COUNTS, "deeper", "flat", "as int16", "as float16", "missing")),
    (("comfy int8_row", "comfy int8_convrot", "comfy w4a4"), "scale",
     (*_COUNTS, "as int32", "as uint8", "missing")),
    (_IN_TILES, "scale", (*_COUNTS, "as int32", "as float32", "missing")),
    (("comfy nvfp4",), "factor", ("longer", "twice", "empty", "as int32", "as uint8", "missing")),
    (("comfy w4a8",), "s_rel", (*_COUNTS, "deeper", "as int32", "as int8", "missing")),
    (("comfy w4a8",), "s_channel", (*_COUNTS, "as int32", "missing")),
    (("sdnq extras",), "weight", (*_COUNTS, "deeper", "as int8", "as int16", "missing")),
    (("sdnq extras",), "scale", (*_COUNTS, "as int32", "missing")),
    (("sdnq extras",), "svd_up", (*_ALL, "as int32", "as float64", "missing")),
    (("sdnq extras",), "svd_down", (*_ALL, "as int32", "as float64", "missing")),
    # Of sdquant's own files `test_verification` has the sizes of the first two parts.
    (("own nf4 nested",), "nested_absmax", (*_FLAT, "as float64", "missing")),
    (("own qint4", "own qint3"), "shift", (*_ALL, "as int32", "as float16", "missing")),
    (("own int8",), "zero_point", (*_ALL, "as int8", "as float16", "missing")),
    (("own int4",), "zero_point", (*_FLAT, "as int8", "as float16", "missing")),
    (("own sdnq-uint3",), "zero_point", (*_ALL, "as int32", "as float32", "missing")),
    (("own int8", "own int8_sym", "own bnb-int8"), "codes", ("flat", "turned", "empty")),
    (("own qint8",), "data", ("flat", "turned", "empty")),
    (("own float8", "own int8", "own int4_sym"), "scale", ("flat", "turned", "empty")),
)  # fmt: skip


# With one scale or none nothing in a lone file tells the shape of the codes; and quanto's 2 bits twice are its 4 bits.
_HIDDEN = {
    *(("fp8 plain", f"codes {name}") for name in (*_ALL, "missing")),
    *(("fp8 scale_weight", f"codes {name}") for name in _ALL),
    ("qint2", "data twice"),
}


def _part_cases() -> Iterator[tuple[str, Case]]:
    for forms, part, names in _PARTS:
        for form in forms:
            for name in names:
                # The sizes of ComfyUI's parts may fit each other, padded, without fitting the model.
                hidden = (form, f"{part} {name}") in _HIDDEN or (form in _COMFY and name in _SHAPES)
                yield f"{part} {name}", Case(form, _named(name, FORMATS[form].parts[part]), lone=not hidden)


# Values that a part must not hold.
_NUMBERS: dict[str, Edit] = {
    "with NaN": _last(float("nan")),
    "all NaN": lambda t: torch.full_like(t, float("nan")),
    "infinite": _last(float("inf")),
    "minus infinite": _last(float("-inf")),
}
_MAGNITUDES: dict[str, Edit] = _NUMBERS | {"with one negative": _last(-0.5), "all negative": lambda t: -t - 1}
_TABLES: dict[str, Edit] = {
    "turned round": lambda t: t.flip(0),
    "of zeros": torch.zeros_like,
    "with NaN": _last(float("nan")),
    "too large": lambda t: t * 1.5,
}
_VALUES: tuple[tuple[tuple[str, ...], str, Mapping[str, Edit]], ...] = (
    (("nf4", "fp4", "own nf4", "own fp8"), "absmax", _MAGNITUDES),
    (("nf4 nested", "own nf4 nested"), "nested_absmax", _MAGNITUDES),
    (("bnb-int8", "own bnb-int8"), "scb", _MAGNITUDES),
    (("fp8 scale_weight", *_SCALED, "own float8"), "scale", _MAGNITUDES),
    ((*_BITS8, *_BITS4, "own qint8", "own qint4", "own qint3"), "scale", _MAGNITUDES),
    ((*_BITS4, "own qint4", "own qint3"), "shift", _NUMBERS),
    (("sdnq-int8", *_UINT, "own sdnq-uint3"), "scale", _NUMBERS),
    ((*_UINT, "own sdnq-uint3"), "zero_point", _NUMBERS),
    (("own int8", "own int8_sym", "own int4", "own int4_sym"), "scale", _NUMBERS),
    (("comfy int8_row", "comfy int8_convrot", "comfy w4a4"), "scale", _MAGNITUDES),
    (("comfy mxfp8",), "scale", {"not a number": _bytes(255)}),
    (("comfy nvfp4",), "scale", {"not a number": _bytes(0x7F)}),
    (("comfy nvfp4",), "factor", {name: edit for name, edit in _MAGNITUDES.items() if name != "all negative"}),
    (("comfy w4a8",), "s_channel", _MAGNITUDES),
    (("sdnq extras",), "scale", _NUMBERS),
    (("sdnq extras",), "svd_up", _NUMBERS),
    (("sdnq extras",), "svd_down", _NUMBERS),
    (_NF4, "quant_map", _TABLES),
    (("nf4 nested",), "nested_quant_map", _TABLES),
    (("bnb-int8",), "format", {"col32": lambda t: t + 1, "unknown": lambda t: t + 200}),
)


def _value_cases() -> Iterator[tuple[str, Case]]:
    for forms, part, edits in _VALUES:
        for form in forms:
            for name, function in edits.items():
                yield f"{part} {name}", Case(form, _edit(FORMATS[form].parts[part], function))
    for form in ("fp8 scale_weight", "fp8 weight_scale_inv", "fp8 plain", "own float8", "qfloat8"):
        key = f"{NAME}._data" if form == "qfloat8" else NAME
        yield "codes that stand for NaN", Case(form, _edit(key, _bytes(0x7F)), load=False)
    for form in ("nf4", "bnb-int8", "fp8 plain", "qint4", "sdnq-int8", "own int8"):
        yield "a bias with NaN", Case(form, _edit(BIAS, _last(float("nan"))), load=False)
        yield "a bias of integers", Case(form, _edit(BIAS, lambda t: t.to(torch.int32)), lone=False)
        yield "a longer bias", Case(form, _edit(BIAS, _SHAPES["longer"]), lone=False)
        yield "no bias", Case(form, _drop(BIAS), lone=False)


# JSON inside tensors.
_LINES: dict[str, bytes] = {
    "nothing": b"", "half": b'{"blocksize": 64', "a list": b"[]", "null": b"null", "no UTF-8": b"\xff\xfe{}",
    "UTF-16": '{"format": "float8_e4m3fn"}'.encode("utf-16"), "nesting": b"[" * 4000,
    "nested tables": b'{"a":' * 700, "a long number": b'{"blocksize": ' + b"6" * 4060 + b"}", "spaces": b" " * 5000,
}  # fmt: skip


def _fields(rows: Mapping[str, tuple[Any, ...]]) -> dict[str, dict[str, Any]]:
    return {f"{name} {value!r:.16}": {name: value} for name, values in rows.items() for value in values}


_STATES = _fields(
    {
        "blocksize": (0, -64, 48, 128, 64.0, True, "64", None, [64]),
        "quant_type": ("fp5", "int8", None, 4),
        "dtype": ("int8", "__class__", "torch.bfloat16", None, 16),
        "shape": ([64, 255], [256], [256, 64, 2], [], [0, 64], [-256, -64], [256.0, 64], "256", None, [[256], [64]]),
    }
)
_NESTED = _fields(
    {
        "nested_blocksize": (0, 64, 255, "256", None, True),
        "nested_dtype": ("float16", "float64", "bfloat16", None, 32),
        "nested_offset": ("0", None, True, [0.1], 10**400, float("nan"), float("inf"), 1e39),
    }
)


def _state(key: str, changes: Mapping[str, Any], gone: str | None = None) -> Change:
    def change(model: Model) -> None:
        state = json.loads(bytes(model.tensors[key].tolist())) | changes
        state.pop(gone, None)
        model.tensors[key] = line(state)

    return change


def _repeated(model: Model) -> None:
    """A field that is there twice: readers disagree on which of the two counts."""
    text = bytes(model.tensors[STATE + "nf4"].tolist())
    model.tensors[STATE + "nf4"] = line(text.replace(b"{", b'{"blocksize": 128, ', 1))


def _two_states(model: Model) -> None:
    model.tensors[STATE + "fp4"] = model.tensors[STATE + "nf4"].clone()


def _json_cases() -> Iterator[tuple[str, Case]]:
    for form in _NF4:
        for name, raw in _LINES.items():
            yield f"state of {name}", Case(form, _set(FORMATS[form].parts["state"], line(raw)))
    for form, rows in (("fp4", _STATES), ("nf4 nested", _NESTED)):
        key = FORMATS[form].parts["state"]
        for name, changes in rows.items():
            yield f"state with {name}", Case(form, _state(key, changes))
        for gone in dict.fromkeys(field for changes in rows.values() for field in changes):
            yield f"state without {gone}", Case(form, _state(key, {}, gone))
    yield "state with its shape turned", Case("nf4 nested", _state(STATE + "nf4", {"shape": [64, 256]}), lone=False)
    yield "state with its shape split", Case("nf4 nested", _state(STATE + "nf4", {"shape": [256, 8, 8]}), lone=False)
    yield "state with a field twice", Case("nf4 nested", _repeated)
    yield "state of another scheme too", Case("nf4 nested", _two_states)
    yield "state that is nested", Case("nf4", _state(STATE + "nf4", {"nested_offset": 0.1}))
    form = "fp8 weight_scale"
    for name, raw in _LINES.items():
        yield f"comfy_quant of {name}", Case(form, _set(FORMATS[form].parts["line"], line(raw)))
    for kind in ("nvfp4", "mxfp8", "int8_tensorwise", "", None, 8, ["float8_e4m3fn"], "__class__"):
        yield f"comfy_quant {kind!r}", Case(form, _set(FORMATS[form].parts["line"], line({"format": kind})))
    for name in ("scale_weight", "weight_scale_inv", "weight_scale_2", "weight.scale", "weight_scales", "scales"):
        yield f"{name} too", Case(form, _set(STEM + name, torch.ones(())))
    for name in ("scale", "weight_scale_2", "weight.scales", "weight_scale_vec"):
        yield f"{name} beside it", Case("fp8 plain", _set(STEM + name, torch.ones(())))


# What sdquant's own metadata says of a weight.


def _row(change: Callable[[dict[str, Any], Model], Mapping[str, Any]]) -> Change:
    """Change the row of the weight to what `change` gives for it."""

    def apply(model: Model) -> None:
        own = model.own
        own["weights"][NAME] |= change(own["weights"][NAME], model)
        model.metadata["sdquant"] = json.dumps(own)

    return apply


def _detail(name: str, value: Any) -> Change:
    """A detail with another value; without it for None."""
    kept = {} if value is None else {name: value}
    return _row(lambda row, _: {"details": {k: v for k, v in row["details"].items() if k != name} | kept})


def _said(**values: Any) -> Change:
    return _row(lambda *_: values)


_DETAILS: dict[str, dict[str, tuple[Any, ...]]] = {
    "own nf4": {"block_size": (0, -64, 32, 128, "64", 64.0, True, None, [64], 10**400), "offset": (0.1, "a")},
    "own nf4 nested": {
        "offset": ("a", True, float("nan"), float("inf"), None, 10**400, [1.0], 1e39, 0.25),
        "block_size": (0, None, 128),
    },
    "own fp8": {
        "packing": ("float8", "fourbit", 5, None, ["blockwise"]),
        "block_size": (0, -256, 64, 512, "256", None, True, 256.0),
    },
    "own float8": {"packing": ("blockwise", "", None, 5)},
    "own qint4": {"group_size": (0, 64, -1, "a", 7, True, [1])},
    "own qint3": {"group_size": (0, 64, -128, "128", None, True, 96, 128.0, [128])},
    "own int8": {"rotation": (16, 20, -4, 1 << 20, "16", True, [4])},
}
_SIBLINGS = {
    "own nf4": "fp4", "own nf4 nested": "fp4", "own bnb-int8": "nf4", "own fp8": "bnb-int8", "own float8": "nf4",
    "own qint8": "qfloat8", "own qint4": "qint2", "own qint3": "qint4", "own int8": "int8_sym",
    "own int8_sym": "int8", "own int4": "int4_sym", "own int4_sym": "int4", "own sdnq-uint3": "sdnq-uint4",
}  # fmt: skip
_ROWS: dict[str, Change] = {
    "its shape turned": _said(shape=[64, 256]),
    "its shape split": _said(shape=[256, 8, 8]),
    "a scheme of GGUF": _said(scheme="q8_0"),
    "no scheme": _said(scheme="none"),
    "no parts": _said(parts=[]),
    "a part left out": _row(lambda row, _: {"parts": row["parts"][:-1]}),
    "a part too many": _row(lambda row, _: {"parts": [*row["parts"], "more"]}),
    "a part twice": _row(lambda row, _: {"parts": [row["parts"][0]] * len(row["parts"])}),
    "its bias as an extra": _row(lambda row, _: {"extra": [*row["extra"], BIAS]}),
    "another's codes as an extra": _row(lambda row, model: {"extra": [*row["extra"], _codes(model)]}),
}


def _codes(model: Model) -> str:
    return next(key for key in model.tensors if key.startswith(OTHER))


def _renamed(model: Model) -> None:
    own = model.own
    own["weights"][f"{STEM}ghost.weight"] = own["weights"].pop(NAME)
    model.metadata["sdquant"] = json.dumps(own)


def _own_cases() -> Iterator[tuple[str, Case]]:
    for form, details in _DETAILS.items():
        for name, values in details.items():
            for value in values:
                yield f"metadata with {name} {value!r:.16}", Case(form, _detail(name, value))
    for form, sibling in _SIBLINGS.items():
        yield f"metadata with {sibling}", Case(form, _said(scheme=sibling))
        yield "metadata under another name", Case(form, _renamed)
        for name, change in _ROWS.items():
            yield f"metadata with {name}", Case(form, change, lone=name != "its bias as an extra")


# What the JSON files beside the weights say.


def _map(scheme: str) -> Change:
    def change(model: Model) -> None:
        row = {"weights": scheme, "activations": "none"}
        model.files["quantization_map.json"] = {NAME.removesuffix(".weight"): row}

    return change


def _quantization(**values: Any) -> Change:
    return lambda model: model.files["config.json"]["quantization_config"].update(values)


def _config(**values: Any) -> Change:
    return lambda model: model.files["config.json"].update(values)


def _file_cases() -> Iterator[tuple[str, Case]]:
    for form, others in (("qint8", ("qint4", "qfloat8")), ("qint4", ("qint8", "qint2")), ("qint2", ("qint4",))):
        for scheme in others:
            yield f"a map that says {scheme}", Case(form, _map(scheme), lone=False)
    for form, words in (
        ("sdnq-uint4", ("int4", "int8", "uint3", "uint5", "float8_e4m3fn", "", 4)),
        ("sdnq-int8", ("uint4", "int6", "float8_e4m3fn")),
    ):
        for word in words:
            yield f"a config that says {word!r}", Case(form, _quantization(weights_dtype=word), lone=False, says="")
    for form, word in (("diffusers qint8", "int4"), ("diffusers qint4", "int8"), ("diffusers qint4", "int2")):
        yield f"a config that says {word!r}", Case(form, _quantization(weights_dtype=word), lone=False, says="")
    for form in (
        "nf4",
        "bnb-int8",
        "fp8 weight_scale",
        "fp8 plain",
        "qint8",
        "qint4",
        "sdnq-uint4",
        "own int8",
        "own nf4",
    ):
        yield "a wider model's config", Case(form, _config(num_attention_heads=8), lone=False, says="")
        yield "a longer model's config", Case(form, _config(num_single_layers=2), lone=False, says="")


def _cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for cases in (_part_cases, _value_cases, _json_cases, _own_cases, _file_cases):
        for name, case in cases():
            assert f"{case.form}: {name}" not in found, (case.form, name)
            found[f"{case.form}: {name}"] = case
    return found


CASES = _cases()
