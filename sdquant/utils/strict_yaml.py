"""Strict YAML parsing of untrusted files to plain values. The only module that imports yaml.

One document of mappings, lists and scalars; no tags, no anchors, no key twice. The values are made here from the
parser's events, so nothing can be constructed that is not plain, and every error names its line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..errors import BackendUnavailableError, BadFileError, SettingsError
from .yaml_scalars import resolved

T = TypeVar("T")

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
    return _parsed(text, what, _Reader.document)


def value(text: str, what: str) -> Any:
    """Return the value of a text that need not be a mapping, such as a config's value for a key. Errors: see `read`."""
    return _parsed(text, what, _Reader.value)


def _parsed(text: str, what: str, read: Callable[[_Reader], T]) -> T:
    yaml = _yaml(what)
    try:
        return read(_Reader(yaml, iter(yaml.parse(text, Loader=yaml.SafeLoader)), what))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        why = f"it is not valid YAML: {error.problem or error.context}"
        raise BadFileError(_at(what, mark), why, "Correct that line") from error
    except yaml.YAMLError as error:  # a character that YAML does not allow
        line = text[: getattr(error, "position", 0)].count("\n") + 1
        why = f"it has a character that YAML does not allow ({getattr(error, 'character', '?')!r})"
        raise BadFileError(f"{what}, line {line}", why, "Remove it") from error


class _Reader:
    """Values from the events of a YAML parser."""

    def __init__(self, yaml: Any, events: Iterator[Any], what: str) -> None:
        self._yaml, self._events, self._what = yaml, events, what

    def document(self) -> Document:
        """Return the mapping that the stream consists of."""
        yaml = self._yaml
        event = self._first()
        if event is None:
            return Document()
        if isinstance(event, yaml.ScalarEvent) and not event.value and event.implicit[0]:
            return Document()  # "---" alone
        if not isinstance(event, yaml.MappingStartEvent):
            self._refuse(event, "it is not a mapping", "Write one `key: value` in each line")
        lines: dict[str, int] = {}
        values = self._mapping(event, 1, lines)
        self._end()
        return Document(values, lines)

    def value(self) -> Any:
        """Return the value that the stream consists of; None if it is empty."""
        event = self._first()
        if event is None:
            return None
        parsed = self._value(event, 1)
        self._end()
        return parsed

    def _first(self) -> Any:
        """Return the event that the document begins with; None if there is no document."""
        next(self._events)  # the start of the stream
        return None if isinstance(next(self._events), self._yaml.StreamEndEvent) else next(self._events)

    def _end(self) -> None:
        next(self._events)  # the end of the document
        event = next(self._events)
        if not isinstance(event, self._yaml.StreamEndEvent):
            self._refuse(event, "a second document begins there", "Give each its own file")

    def _value(self, event: Any, depth: int) -> Any:
        yaml = self._yaml
        if depth > DEEPEST:
            self._refuse(event, f"it is nested deeper than {DEEPEST} levels", "Pass a config file")
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            self._refuse(
                event, "anchors (&) and aliases (*) are not supported", "Write the value out, or put it in quotes"
            )
        if event.tag is not None:
            self._refuse(event, f"tags such as {event.tag!r} are not supported", "Write the value alone, or in quotes")
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(event, depth, {})
        if isinstance(event, yaml.SequenceStartEvent):
            return self._list(depth)
        return resolved(event.value) if event.implicit[0] else event.value

    def _list(self, depth: int) -> list[Any]:
        items = []
        while not isinstance(event := next(self._events), self._yaml.SequenceEndEvent):
            items.append(self._value(event, depth + 1))
        return items

    def _mapping(self, start: Any, depth: int, lines: dict[str, int]) -> dict[str, Any]:
        if start.anchor is not None or start.tag is not None:
            self._refuse(start, "anchors, aliases and tags are not supported", "Write the value alone")
        values: dict[str, Any] = {}
        while not isinstance(event := next(self._events), self._yaml.MappingEndEvent):
            if not isinstance(event, self._yaml.ScalarEvent):
                self._refuse(event, "a key there is not a plain name", "Write `key: value`")
            self._value(event, depth)  # which refuses tags and anchors
            name = event.value
            if name in values:
                self._refuse(event, f"{name!r:.80} appears twice, first in line {lines[name]}", "Keep one of them")
            lines[name] = event.start_mark.line + 1
            values[name] = self._value(next(self._events), depth + 1)
        return values

    def _refuse(self, event: Any, why: str, fix: str) -> None:
        raise BadFileError(_at(self._what, event.start_mark), why, fix)


def _at(what: str, mark: Any) -> str:
    return what if mark is None else f"{what}, line {mark.line + 1}"


def _yaml(what: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise BackendUnavailableError(what, "PyYAML is not installed", "pip install pyyaml") from error
    return yaml
