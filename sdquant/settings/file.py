"""The settings file: where it is, what it looks like, reading and writing it.

    {"format": "sdquant-settings", "version": 1, "settings": {"quant.model": "nf4", "offload": "balanced"}}

It contains only values that differ from the defaults. The import button reads files from anywhere, so size, nesting and
every value are checked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from ..errors import SdquantError, SettingsError
from ..planning import Settings, fields
from ..utils import strict_json
from ..utils.atomic_write import place_of, whole_file
from ..utils.settings_path import default_path as default_path

FORMAT, VERSION = "sdquant-settings", 1
LARGEST = 1 << 20  # bytes; all settings together take a thousandth of it
PRIVATE = 0o600

Values = dict[str, Any]

# A version of the format, and the function that converts its settings to the next version. A row is added whenever
# VERSION is raised: renamed fields, values that mean something else.
MIGRATIONS: Mapping[int, Callable[[Values], Values]] = {}

_AWAY = "set the file aside to start with the defaults"
_saving = Lock()


def dumps(settings: Settings) -> str:
    """Return the text of a settings file."""
    whole = {"format": FORMAT, "version": VERSION, "settings": settings.to_dict()}
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def loads(text: str) -> Settings:
    """Parse the text of a settings file.

    Raises:
        SettingsError: it is not a settings file or has a newer version, or a setting does not exist or has an invalid
            value.
    """
    return from_value(parse(text, "the text"), "the text")


def load(path: str | os.PathLike[str]) -> Settings:
    """Read a settings file; return the defaults if there is none.

    Raises:
        SettingsError: as `loads`, naming the file; or it cannot be read.
    """
    raw = _bytes(Path(path))
    if raw is None:
        return Settings()
    try:
        text = strict_json.text(raw)
    except ValueError as error:
        raise _refused(str(path), "it is not UTF-8 text", f"Choose another file, or {_AWAY}") from error
    return from_value(parse(text, str(path)), str(path))


def save(path: str | os.PathLike[str], settings: Settings) -> None:
    """Write the settings atomically. A new file is readable by its owner only; an existing one keeps its permissions.

    Raises:
        SettingsError: the existing file is damaged (see `set_aside`), or nothing can be written there.
        ConflictError: another process is writing it just now. DiskSpaceError: there is no room.
    """
    path = Path(path)
    raw = dumps(settings).encode()
    with _saving:
        load(path)  # what is damaged may hold something that its owner wants back
        with whole_file(path, len(raw), mode=PRIVATE) as file:
            file.write(raw)


def set_aside(path: str | os.PathLike[str]) -> Path:
    """Rename a damaged settings file to "<name>.broken-<n>", with the first free n, and return the new path.

    Raises:
        SettingsError: it cannot be renamed, or is not there.
    """
    place = place_of(Path(path))
    with _saving:
        number = 1
        while os.path.lexists(aside := place.with_name(f"{place.name}.broken-{number}")):
            number += 1
        try:
            os.rename(place, aside)
        except OSError as error:
            raise SettingsError(
                f"Cannot set aside {path}", error.strerror or str(error), "Rename or remove it yourself"
            ) from error
    return aside


def parse(text: str, where: str) -> Any:
    """Parse untrusted JSON text.

    Args:
        where: name of the text in errors: a path, or "the text".

    Raises:
        SettingsError: it is too large, or not JSON.
    """
    if len(text) > LARGEST:
        raise _refused(where, _too_large(len(text)), "Choose a settings file")
    try:
        return strict_json.parse(text, constants=False)
    except ValueError as error:
        raise _refused(where, f"it is not JSON: {short(error)}", f"Correct it, or {_AWAY}") from error


def from_value(value: Any, where: str) -> Settings:
    """Return the settings in the parsed JSON of a settings file.

    Raises:
        SettingsError: as `loads`.
    """
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise _refused(where, f'it has no "format": "{FORMAT}"', f"Choose a file that sdquant wrote, or {_AWAY}")
    version, values = value.get("version"), value.get("settings")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise _refused(where, f"its version is {short(repr(version))}", f'Write "version": {VERSION}, or {_AWAY}')
    if version > VERSION:
        why = f"a newer sdquant wrote it: it has format version {short(version)}, and this one reads up to {VERSION}"
        raise _refused(where, why, f"Update sdquant, or {_AWAY}")
    if not isinstance(values, dict):
        raise _refused(where, 'its "settings" are not a table of names and values', f"Correct it, or {_AWAY}")
    values = migrated(values, version)
    known = [row.name for row in fields()]
    for name in values:
        if name not in known:
            why = f"it sets {short(repr(name))}, which does not exist; the settings are {', '.join(known)}"
            raise _refused(where, why, f"Remove that line, or {_AWAY}")
    try:
        return Settings(values)
    except SdquantError as error:
        raise _refused(where, f"{short(error.what)} ({short(error.why)})", f"{error.fix}; or {_AWAY}") from error


def migrated(
    values: Values, version: int, rows: Mapping[int, Callable[[Values], Values]] = MIGRATIONS, last: int = VERSION
) -> Values:
    """Migrate the values of a file of format `version` to format `last`."""
    for number in range(version, last):
        values = rows[number](values)
    return values


def _bytes(path: Path) -> bytes | None:
    """Read the file; None if there is none."""
    try:
        place = Path(os.path.realpath(path))
        if not place.exists():
            return None
        if not place.is_file():
            what = "a folder" if place.is_dir() else "a device or a pipe"
            raise _refused(str(path), f"it is {what}", "Choose a file")
        with place.open("rb") as file:
            raw = file.read(LARGEST + 1)
            size = os.fstat(file.fileno()).st_size
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = (isinstance(error, OSError) and error.strerror) or str(error)
        raise _refused(str(path), why, "Check the path and its permissions") from error
    if len(raw) > LARGEST:
        raise _refused(str(path), _too_large(size), f"Choose a settings file, or {_AWAY}")
    return raw


def _too_large(size: int) -> str:
    return f"it has {size} bytes, more than the limit of {LARGEST}"


def _refused(where: str, why: str, fix: str) -> SettingsError:
    return SettingsError(f"Cannot read {where} as settings", why, fix)


def short(what: object) -> str:
    """Return a text, cut after 200 characters."""
    text = str(what)
    return text if len(text) <= 200 else f"{text[:200]}..."
