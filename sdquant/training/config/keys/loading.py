"""Keys of the model and its loading. Help, choices and default are those of `Request`'s fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ....planning import Request
from ....utils.byte_sizes import parse_budget, parse_size
from ..value_types import COMMANDS, MAXDIFFUSION, Key

_GENERATE = ("generate",)

# A field of Request, the kind of its values in a file, and the commands that use it. What is not here is no key of its
# own: quant and rules are made from the keys of quantization, and a token is nothing for a file that is kept and shown.
_FIELDS = (
    ("base", "str", COMMANDS),
    ("components", "names", COMMANDS),
    ("skip", "names", COMMANDS),
    ("mode", "str", _GENERATE),
    ("runtime", "str", COMMANDS),
    ("compute", "str", _GENERATE),
    ("size", "size", _GENERATE),
    ("quality", "float", _GENERATE),
    ("offload", "str", _GENERATE),
    ("budget", "size", _GENERATE),
    ("device", "str", COMMANDS),
    ("dtype", "str", COMMANDS),
    ("parts", "parts", COMMANDS),
    ("config", "str", COMMANDS),
    ("variant", "str", COMMANDS),
    ("revision", "str", COMMANDS),
    ("subfolder", "str", COMMANDS),
    ("cache", "switch", _GENERATE),
    ("cache_limit", "size", _GENERATE),
    ("allow_incompatible", "bool", COMMANDS),
    ("allow_pickle", "bool", COMMANDS),
)


_CHECKS: Mapping[str, Callable[[Any], object]] = {
    "budget": parse_budget, "cache_limit": partial(parse_size, what="A cache_limit"),
    "size": partial(parse_size, what="A size"),
}  # fmt: skip


def keys() -> tuple[Key, ...]:
    """The rows."""
    rows = {row.name: row for row in dataclasses.fields(Request)}
    model = Key(
        name="pretrained_model_name_or_path",
        kind="str",
        default="",
        help=f"the model: {rows['path'].metadata['help']}, or digits-sd / digits-flux",
        origin=MAXDIFFUSION,
        field="path",
    )
    field_keys = (
        Key(
            name=name,
            kind=kind,
            default=rows[name].default,
            help=rows[name].metadata["help"],
            commands=commands,
            field=name,
            choices=tuple(rows[name].metadata["choices"]),
            check=_CHECKS.get(name),
        )
        for name, kind, commands in _FIELDS
    )
    return (model, *field_keys)
