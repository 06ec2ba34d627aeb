"""Keys, and kinds of values: what a YAML value of each must be, and how the text of a key=value override is read.

The rules are MaxDiffusion's: the type is the default's, a list is a Python literal, a dict is JSON. Two are wider: a
list may be JSON too, and a key whose default is null has a declared type and can be overridden.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...utils import strict_json
from ...utils.strict_yaml import resolved


@dataclass(frozen=True, kw_only=True)
class ValueType:
    """A kind of values.

    Attributes:
        said: what a value is, in an error.
        example: a value, as one writes it after `key=`.
        read: the value of a YAML value. Raises ValueError, whose text says what is wrong with it.
        parse: the YAML value of a text. Raises ValueError.
    """

    name: str
    said: str
    example: str
    read: Callable[[Any], Any]
    parse: Callable[[str], Any]


def _str(value: Any) -> str:
    if isinstance(value, str):
        return value
    hint = "; quote it to make it text" if isinstance(value, (bool, int, float)) else ""
    raise ValueError(f"it is {told(value)}{hint}")


def _int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():  # MaxDiffusion's LTX configs have per_device_batch_size: 1.0
        return int(value)
    raise ValueError(f"it is {told(value)}")


def _float(value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(number := float(value)):
        return number
    raise ValueError(f"it is {told(value)}")


def _number(value: Any) -> int | float:
    return _int(value) if isinstance(value, int) else _float(value)


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"it is {told(value)}")


def _switch(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else _str(value)


def _size(value: Any) -> int | str:
    return value if isinstance(value, str) else _int(value)


def _names(value: Any) -> tuple[str, ...]:
    return _entries(value, str)


def _parts(value: Any) -> tuple[str, ...] | dict[str, str]:
    if not isinstance(value, Mapping):
        return _names(value)
    return dict(zip(value, _names([*value.values()]), strict=True))


def _mappings(value: Any) -> tuple[dict[str, Any], ...]:
    return tuple(dict(entry) for entry in _entries(value, Mapping))


def _entries(value: Any, kind: type) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"it is {told(value)}")
    for entry in value:
        if not isinstance(entry, kind):
            raise ValueError(f"it contains {told(entry)}")
    return tuple(value)


def _dict(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise ValueError(f"it is {told(value)}")


def _truth(text: str) -> Any:
    return {"true": True, "false": False}.get(text.strip().lower(), text)


def _scalar(text: str) -> Any:
    return resolved(text.strip())


def _literal(text: str) -> Any:
    """JSON, or a Python literal."""
    with contextlib.suppress(ValueError):  # the other spelling is tried next
        return _json(text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # "\d" in a pattern
            return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("it is neither a Python literal nor JSON") from error


def _json(text: str) -> Any:
    try:
        return strict_json.parse(text, constants=False)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error


KINDS: Mapping[str, ValueType] = {
    row.name: row
    for row in (
        ValueType(name="str", said="text", example="text", read=_str, parse=str),
        ValueType(name="int", said="a whole number", example="4", read=_int, parse=_scalar),
        ValueType(name="float", said="a number", example="0.5", read=_float, parse=_scalar),
        ValueType(name="number", said="a number, whole or not", example="128", read=_number, parse=_scalar),
        ValueType(name="bool", said="true or false", example="true", read=_bool, parse=_truth),
        ValueType(name="switch", said="on, off or text", example="on", read=_switch, parse=_truth),
        ValueType(
            name="size", said="a number of bytes, or a size such as 6GB", example="6GB", read=_size, parse=_scalar
        ),
        ValueType(name="names", said="a list of strings", example="\"['name']\"", read=_names, parse=_literal),
        ValueType(
            name="parts", said="a list of strings, or a mapping from components to strings",
            example="'{\"transformer_2\": \"low.gguf\"}'", read=_parts, parse=_literal,
        ),
        ValueType(
            name="mappings", said="a list of mappings", example="'[{\"weight_qtype\": \"int8\"}]'",
            read=_mappings, parse=_literal,
        ),
        ValueType(name="dict", said="a mapping", example="'{\"name\": 1}'", read=_dict, parse=_json),
    )
}  # fmt: skip


def told(value: Any) -> str:
    """A value in words, for an error."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, (int, float)):
        return f"the number {value:.40}" if isinstance(value, float) else _short(f"the number {value}")
    if isinstance(value, str):
        return _short(f"the text {value!r}")
    return f"a {'mapping' if isinstance(value, Mapping) else 'list'}"


def format_value(value: Any) -> str:
    """A value as a file has it: JSON, nearly, which is YAML too. Floats have a point, without which
    YAML 1.1 has no exponent."""
    if isinstance(value, str):
        # What is not printable YAML takes for a line break, or does not allow.
        letters = json.dumps(value, ensure_ascii=False)
        return "".join(one if one.isprintable() else _escaped(ord(one)) for one in letters)
    if isinstance(value, (bool, int)) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{format_value(str(name))}: {format_value(one)}" for name, one in value.items()) + "}"
    return "[" + ", ".join(format_value(one) for one in value) + "]"


def _escaped(code: int) -> str:
    return f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:120]}..."


COMMANDS = ("generate", "train")

# Whose name it is.
MAXDIFFUSION, OURS = "MaxDiffusion", "sdquant"


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a config file, from which reading, checking, listing and the commented file are derived.

    Attributes:
        kind: name of a row of `KINDS`, which defines its values. If the default is None, null is allowed too.
        help: a part of a sentence.
        commands: those that use it.
        origin: MAXDIFFUSION if the name and meaning are MaxDiffusion's, else OURS.
        field: name of the field of `Request` that it becomes; "" if none.
        choices: all its values; () if there are too many.
        least, most: inclusive bounds of a number.
        check: raises SettingsError for a value that the kind allows but the key does not.
    """

    name: str
    kind: str
    default: Any
    help: str
    commands: tuple[str, ...] = COMMANDS
    origin: str = OURS
    field: str = ""
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    check: Callable[[Any], object] | None = None
