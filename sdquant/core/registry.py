"""Registry of backends and schemes.

A backend registers itself by being a module of `sdquant.backends` with a `BACKEND`, as is every entry point of that
group. Modules whose name starts with an underscore are helpers.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..errors import SettingsError, UnknownQuantError
from ..utils.suggestions import did_you_mean, similar
from .backend import Backend, PackedSpec, QuantSpec, Scheme
from .options import EMBEDDINGS, HADAMARD, Option

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

__all__ = [
    "Backend", "QuantSpec", "Scheme", "backends", "get", "names", "namesakes", "near", "of_scheme", "packed_spec",
    "parse", "scheme", "schemes",
]  # fmt: skip

ENTRY_POINTS = HOME = "sdquant.backends"
# Backends that are not in that folder, by name.
ELSEWHERE: Mapping[str, str] = {"rules": "sdquant.rules.backend"}


# Common informal names, without punctuation: the schemes to suggest, the usual one first.
LOOSE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("4bit", "4bits", "4", "b4", "loadin4bit", "quant4", "lowvram"), ("nf4", "int4")),
    **dict.fromkeys(("bnb4bit", "bnb4", "bnbnf4", "bnb", "bitsandbytes", "qlora", "normalfloat4"), ("nf4",)),
    **dict.fromkeys(("bnb8bit", "bnb8", "llmint8", "linear8bitlt"), ("bnb-int8",)),
    **dict.fromkeys(("8bit", "8bits", "8", "b8", "loadin8bit", "quant8", "w8", "w8a16", "i8"), ("int8", "bnb-int8")),
    **dict.fromkeys(("int8wo", "int8weightonly", "nncf", "nncfint8", "int8asym"), ("int8",)),
    **dict.fromkeys(("int4wo", "int4weightonly", "w4", "w4a16", "i4", "nncfint4", "int4asym"), ("int4",)),
    **dict.fromkeys(("2bit", "2bits", "2", "int2"), ("qint2",)),
    **dict.fromkeys(("3bit", "3bits", "3", "int3"), ("qint3",)),
    **dict.fromkeys(("6bit", "6bits", "6", "int6"), ("sdnq-int6",)),
    **dict.fromkeys(("quanto", "quantoint8", "optimumquanto", "qint"), ("qint8",)),
    **dict.fromkeys(("float8", "f8", "fp8e4m3", "fp8e4m3fn", "float8e4m3fn", "e4m3", "fp8e5m2"), ("fp8", "qfloat8")),
    **dict.fromkeys(("float4", "f4", "bnbfp4"), ("fp4", "nf4")),
    **dict.fromkeys(("gguf", "ggml", "q4", "q4km"), ("q4_k", "nf4")),
    "q8": ("q8_0", "int8"),
    "sdnq": ("sdnq-int8", "sdnq-uint4"),
}  # fmt: skip
_MOST_NEAR = 3  # names to suggest
_DTYPES = {
    "fp16": "float16", "half": "float16", "float16": "float16", "16bit": "bfloat16", "bfloat16": "bfloat16",
    "fp32": "float32", "full": "float32", "float32": "float32", "float": "float32",
}  # fmt: skip


@lru_cache(maxsize=1)
def _registry() -> Mapping[str, Backend]:
    backends: dict[str, Backend] = {}

    def add(backend: Backend) -> None:
        if backend.name in backends:
            raise RuntimeError(f"two backends are called {backend.name!r}: {backends[backend.name]!r} and {backend!r}")
        backends[backend.name] = backend

    folder = importlib.import_module(HOME).__path__  # by name: this room is below that one
    modules = {info.name: f"{HOME}.{info.name}" for info in pkgutil.iter_modules(folder)}
    for name, module in sorted({**modules, **ELSEWHERE}.items()):
        if not name.startswith("_"):
            add(importlib.import_module(module).BACKEND)
    # Outside backends come through the same door, after the built-in ones.
    from importlib.metadata import entry_points

    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        add(point.load())
    return MappingProxyType(backends)


@lru_cache(maxsize=1)
def _schemes() -> Mapping[str, Scheme]:
    rows: dict[str, Scheme] = {}
    for backend in _registry().values():
        for row in backend.schemes:
            for name in (row.name, *row.aliases):
                if name in rows:
                    raise RuntimeError(f"two schemes are called {name!r}: {rows[name]!r} and {row!r}")
                rows[name] = row
    return MappingProxyType(rows)


def names() -> tuple[str, ...]:
    """Return the names of all backends."""
    return tuple(_registry())


def backends() -> tuple[Backend, ...]:
    """Return all backends, the built-in ones first."""
    return tuple(_registry().values())


def get(name: str) -> Backend:
    """Return the backend called `name`.

    Raises:
        UnknownQuantError: there is none.
    """
    try:
        return _registry()[name.lower()]
    except KeyError:
        raise UnknownQuantError(
            f"Unknown backend {name!r}",
            f"sdquant has {', '.join(names())}",
            _did_you_mean(name, names()),
        ) from None


def schemes() -> tuple[Scheme, ...]:
    """Return all schemes, one row each, by backend."""
    return tuple(row for backend in _registry().values() for row in backend.schemes)


def scheme(name: str) -> Scheme:
    """Return the scheme called `name`: case-insensitive, `backend:scheme` or just the scheme.

    Where two backends have a name, the scheme of the later one has its backend in its own name ("comfy:nvfp4"), and the
    bare name is that of the other.

    Raises:
        UnknownQuantError: there is none; its fix suggests similar ones.
    """
    whole = name.strip().lower()
    backend, _, short = whole.rpartition(":")
    row = _schemes().get(whole) or _schemes().get(short)
    if row is not None and backend in ("", row.backend):
        return row
    if row is not None:
        others = "".join(f", or {other.name!r}" for other in namesakes(row))
        raise UnknownQuantError(
            f"Unknown quantization {name!r}",
            f"{short!r} belongs to backend {row.backend!r}, not {backend!r}",
            f"Use {row.name!r} or '{row.backend}:{row.name}'{others}",
        )
    why = "no backend has such a scheme"
    usual = _informal(short)
    if usual:
        fix = f"Did you mean {' or '.join(map(repr, usual))}?"
    elif short.strip("_ ") in _DTYPES:
        why, fix = "it is a dtype", f"Use dtype={_DTYPES[short.strip('_ ')]!r}, and remove quant"
    else:
        fix = _did_you_mean(short, tuple(_schemes()))
    listing = "`sdquant matrix` lists all schemes"
    raise UnknownQuantError(
        f"Unknown quantization {name!r}", why, f"{fix} {listing}" if fix.endswith("?") else f"{fix}; {listing}"
    )


def near(name: str) -> tuple[str, ...]:
    """Return the names of schemes that were probably meant by a name that there is none of; the nearest first."""
    short = name.strip().lower().rpartition(":")[2]
    return _informal(short) or tuple(similar(short, tuple(_schemes()), most=_MOST_NEAR))


def _informal(short: str) -> tuple[str, ...]:
    usual = LOOSE.get(re.sub(r"[^a-z0-9]", "", short), ())
    return usual if usual and usual[0] in _schemes() else ()


def namesakes(row: Scheme) -> tuple[Scheme, ...]:
    """Return the schemes of other backends that have the same name but for a backend in front of it."""
    short = row.name.rpartition(":")[2]
    return tuple(other for other in schemes() if other != row and other.name.rpartition(":")[2] == short)


def of_scheme(name: str) -> Backend:
    """Return the backend of the scheme called `name`."""
    return scheme(name).codec


def packed_spec(values: Mapping[str, Any]) -> PackedSpec:
    """Return the description of a packed weight that `PackedSpec.to_dict` gave these JSON values.

    Raises:
        UnknownQuantError: no backend has its scheme. KeyError, TypeError: a field is missing or of the wrong kind.
    """
    return PackedSpec(
        scheme=scheme(values["scheme"]),
        shape=tuple(int(n) for n in values["shape"]),
        dtype=values["dtype"],
        details=dict(values["details"]),
    )


_EMBEDDINGS = Option(default=False, help="quantize tables of embeddings too")


def parse(text: str) -> QuantSpec:
    """Parse `scheme[,option[=value]]...`: "nf4", "bnb:nf4,double_quant", "int4,group_size=32,embeddings".

    Raises:
        UnknownQuantError: no such scheme.
        SettingsError: an unknown option, an invalid value, or an option without the one that it belongs to.
    """
    head, *words = [word.strip() for word in text.split(",")]
    row = scheme(head)
    options: dict[str, bool | int | str | None] = {}
    embeddings = False
    for word in words:
        name, _, value = word.partition("=")
        if name == EMBEDDINGS:
            embeddings = _value(row, name, _EMBEDDINGS, value) is True
            continue
        if name == HADAMARD and row.rotates:
            _refuse_unrotated(row, value)
            continue
        if name not in row.options:
            raise SettingsError(
                f"Unknown option {name!r} of {row.name}",
                f"its options are {', '.join((*row.options, EMBEDDINGS))}",
                _did_you_mean(name, (*row.options, EMBEDDINGS)),
            )
        options[name] = _value(row, name, row.options[name], value)
    for name in options:
        other = row.options[name].of
        if other and not options.get(other):
            raise SettingsError(
                f"Option {name} of {row.name} has no effect without {other}",
                f'it means "{row.options[name].help}"',
                f"Write {row.name},{other},{name}={options[name]}, or leave {name} out",
            )
    return QuantSpec(row, tuple(sorted(options.items())), embeddings)


def _refuse_unrotated(row: Scheme, value: str) -> None:
    """Raise SettingsError for `hadamard=false` of a scheme that always rotates, and so has no such option."""
    rotation = Option(default=True, help="rotate inputs before the weight is quantized, as this scheme always does")
    if not _value(row, HADAMARD, rotation, value):
        raise SettingsError(
            f"Cannot quantize to {row.name} without its rotation",
            "its format is that of rotated weights, and what reads it rotates the inputs",
            f"Leave {HADAMARD} out, or choose a scheme that does not rotate, such as int8_row or sdnq-uint4",
        )


def _value(row: Scheme, name: str, option: Option, text: str) -> bool | int | str | None:
    words: dict[str, bool | int | str | None] = {str(choice).lower(): choice for choice in option.choices}
    if isinstance(option.default, bool):
        words |= {"": True, "true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() in words:
        return words[text.lower()]
    if not option.choices and isinstance(option.default, int) and text.lstrip("-").isdigit():
        return int(text)
    raise SettingsError(
        f"Invalid option {name}={text!r} of {row.name}",
        f'the option means "{option.help}"',
        f"Use one of {', '.join(words)}" if words else "Use a whole number",
    )


def _did_you_mean(name: str, known: tuple[str, ...]) -> str:
    return did_you_mean(name, known, f"Known: {', '.join(known)}", most=_MOST_NEAR)
