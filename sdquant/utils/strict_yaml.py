"""Strict YAML parsing of untrusted files to plain values. The only module that imports yaml.

One document of mappings, lists and scalars; no tags, no anchors, no key twice. The values are made here from the
loader's nodes, so nothing can be constructed that is not plain, and every error names its line.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import BackendUnavailableError, BadFileError, SettingsError
from .install import install_packages

LARGEST = 1 << 18  # bytes; all keys with a line of comment each take a fiftieth of it
DEEPEST = 20


@dataclass(frozen=True)
class Document:
    """A file's mapping.

    Attributes:
        lines: of each key of the mapping, the line that it is in, from 1.
    """

    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)


def read(path: str | os.PathLike[str]) -> Document:
    """Read the mapping in a file; an empty file has no keys.

    Raises:
        SettingsError: there is no such file, or it cannot be read. BadFileError: it is not such YAML.
        BackendUnavailableError: PyYAML is not installed.
    """
    what = f"Cannot read the config {os.fspath(path)}"
    return loads(text_of(path, what), what)


def text_of(path: str | os.PathLike[str], what: str) -> str:
    """Read the text of a file; `what` begins the errors, which are those of `read`."""
    try:
        place = Path(os.path.realpath(path))
        if not place.is_file():
            why = (
                "it is a folder"
                if place.is_dir()
                else "it is not a file"
                if place.exists()
                else "there is no such file"
            )
            raise SettingsError(what, why, "Pass the path of a .yml file")
        with place.open("rb") as file:
            raw = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = (isinstance(error, OSError) and error.strerror) or str(error)
        raise SettingsError(what, why, "Check the path and its permissions") from error
    if len(raw) > LARGEST:
        raise BadFileError(what, f"it has more than {LARGEST} bytes, too many for a config", "Pass a config file")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise BadFileError(f"{what}, line {line}", "it is not UTF-8 text", "Save it as UTF-8") from error
    return text


def loads(text: str, what: str = "Cannot read the config") -> Document:
    """Parse a text, as `read`; `what` begins the errors."""
    node = _composed(text, what)
    if node is None or (node.id == "scalar" and not node.value and node.style is None):
        return Document()  # without a document, or with one of "---" alone
    if node.id != "mapping":
        raise _refusal(what, node.start_mark, "it is not a mapping", "Write one `key: value` in each line")
    lines: dict[str, int] = {}
    return Document(_value_of(node, what, lines), lines)


def value(text: str, what: str) -> Any:
    """Return the value of a text that need not be a mapping, such as a config's value for a key. Errors: see `read`."""
    node = _composed(text, what)
    return None if node is None else _value_of(node, what, {})


def _composed(text: str, what: str) -> Any:
    """Return the node of the only document, None if there is none. Refuse anchors, aliases, tags and deep nesting."""
    try:
        import yaml
    except ImportError as error:
        raise BackendUnavailableError(what, "PyYAML is not installed", f"Run: {install_packages('pyyaml')}") from error

    class Loader(yaml.SafeLoader):
        depth = 0

        def compose_node(self: Any, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            at = event.start_mark
            self.depth += 1
            if self.depth > DEEPEST:
                raise _refusal(what, at, f"it is nested deeper than {DEEPEST} levels", "Pass a config file")
            if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
                why = "anchors (&) and aliases (*) are not supported"
                raise _refusal(what, at, why, "Write the value out, or put it in quotes")
            if event.tag is not None:
                why = f"tags such as {event.tag!r} are not supported"
                raise _refusal(what, at, why, "Write the value alone, or in quotes")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    try:
        loader: Any = Loader(text)
        node = loader.get_node() if loader.check_node() else None
        if loader.check_node():
            at = loader.peek_event().start_mark
            raise _refusal(what, at, "a second document begins there", "Give each its own file")
        return node
    except yaml.MarkedYAMLError as error:
        why = f"it is not valid YAML: {error.problem or error.context}"
        raise _refusal(what, error.problem_mark or error.context_mark, why, "Correct that line") from error
    except yaml.YAMLError as error:  # a character that YAML does not allow
        line = text[: getattr(error, "position", 0)].count("\n") + 1
        why = f"it has a character that YAML does not allow ({getattr(error, 'character', '?')!r})"
        raise BadFileError(f"{what}, line {line}", why, "Remove it") from error


def _value_of(node: Any, what: str, lines: dict[str, int]) -> Any:
    """Return the value of a node; put the lines of a mapping's keys into `lines`."""
    if node.id == "scalar":
        return resolved(node.value) if node.style is None else node.value
    if node.id == "sequence":
        return [_value_of(item, what, {}) for item in node.value]
    values: dict[str, Any] = {}
    for key, item in node.value:
        if key.id != "scalar":
            raise _refusal(what, key.start_mark, "a key there is not a plain name", "Write `key: value`")
        if (name := key.value) in values:
            why = f"{name!r:.80} appears twice, first in line {lines[name]}"
            raise _refusal(what, key.start_mark, why, "Keep one of them")
        lines[name] = key.start_mark.line + 1
        values[name] = _value_of(item, what, {})
    return values


def _refusal(what: str, mark: Any, why: str, fix: str) -> BadFileError:
    return BadFileError(what if mark is None else f"{what}, line {mark.line + 1}", why, fix)


_NULLS = ("", "~", "null", "Null", "NULL")
_TRUTH = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]{1,400}", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)


def resolved(text: str) -> bool | int | float | str | None:
    """Return the value of an unquoted scalar: YAML 1.2's core schema, decimal numbers only.

    PyYAML reads YAML 1.1, where `on` and `no` are truth values, 1e-5 is a text, 010 is eight and 1:30 is ninety.
    """
    if text in _NULLS:
        return None
    if text in _TRUTH:
        return _TRUTH[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text
