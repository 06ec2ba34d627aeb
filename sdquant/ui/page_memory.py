"""What the page itself remembers between starts, beside the settings file: not how a model loads, but where things are.

It is convenience alone: what cannot be read is forgotten, and what cannot be written lasts until the server ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from pathlib import Path

from ..errors import SdquantError
from ..utils import strict_json
from ..utils.atomic_write import whole_file

log = logging.getLogger(__name__)

LORA_FOLDER = "lora_folder"
_NAMES = (LORA_FOLDER,)
_LARGEST = 1 << 16  # bytes


class PageMemory:
    """Texts by name, kept in a JSON file beside the settings file."""

    def __init__(self, settings_path: Path) -> None:
        self._path = settings_path.with_name(f"{settings_path.stem}-page.json")
        self._lock = threading.Lock()
        self._values = _read(self._path)

    def get(self, name: str) -> str:
        """Return a text; "" if there is none."""
        return self._values.get(name, "")

    def keep(self, name: str, text: str) -> None:
        """Remember a text, also for the next start if its file can be written."""
        if self.get(name) == text:
            return
        with self._lock:
            self._values = {**self._values, name: text}
            raw = json.dumps(self._values, indent=2).encode()
            try:
                with whole_file(self._path, len(raw), mode=0o600) as file:
                    file.write(raw)
            except SdquantError as error:
                log.warning("what the page remembers cannot be written: %s", error.why)


def _read(path: Path) -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError):
        if path.is_file() and path.stat().st_size <= _LARGEST:
            values = strict_json.parse(strict_json.text(path.read_bytes()))
            known = values if isinstance(values, dict) else {}
            return {name: known[name] for name in _NAMES if isinstance(known.get(name), str)}
    return {}
