"""The settings of an image as the text that AUTOMATIC1111's web UI, Forge and SD.Next write into pictures, and back.

Prompt, "Negative prompt: ...", and a line of "Name: value" pairs; in PNG files under the key "parameters".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import SettingsError

KEY = "parameters"
MAX_TEXT = 20_000  # characters

_NEGATIVE = "Negative prompt:"
_PAIR = re.compile(r'(\w[\w /()-]{0,60}):\s*("(?:\\.|[^"\\])*"|[^,]*)(?:,|$)')
_LORA = re.compile(r"<lora:([^:<>]+)(?::([^:<>]*)(?::[^<>]*)?)?>")  # name, strength, and what other UIs add
_FEWEST = 3  # pairs that make a last line one of settings, and not of the prompt


def write(prompt: str, negative: str, values: Mapping[str, Any]) -> str:
    """Return the text. Values that contain a comma, colon or line break are quoted; None is left out."""
    lines = [prompt]
    if negative:
        lines.append(f"{_NEGATIVE} {negative}")
    lines.append(", ".join(f"{name}: {_quoted(str(value))}" for name, value in values.items() if value is not None))
    return "\n".join(lines)


def parse(text: str) -> dict[str, str]:
    """Return the values by name; the prompts are "Prompt" and "Negative prompt"."""
    *lines, last = text[:MAX_TEXT].strip().split("\n")
    pairs = _PAIR.findall(last)
    if len(pairs) < _FEWEST:
        lines, pairs = [*lines, last], []
    start = next((i for i, line in enumerate(lines) if line.startswith(_NEGATIVE)), len(lines))
    values = {name.strip(): _unquoted(value.strip()) for name, value in pairs}
    values["Prompt"] = "\n".join(lines[:start]).strip()
    values["Negative prompt"] = "\n".join(lines[start:]).removeprefix(_NEGATIVE).strip()
    return values


def with_loras(prompt: str, loras: Sequence[tuple[str, float]]) -> str:
    """Append names and strengths to a prompt: "a seven <lora:ink:0.8>"."""
    return " ".join((prompt, *(f"<lora:{name}:{strength:g}>" for name, strength in loras)))


def split_loras(prompt: str) -> tuple[str, list[tuple[str, float]]]:
    """Return a prompt without `<lora:name:strength>`, and the names and strengths. No strength is 1, as elsewhere."""
    loras = []
    for name, strength in _LORA.findall(prompt):
        try:
            loras.append((name.strip(), float(strength)))
        except ValueError:
            loras.append((name.strip(), 1.0))
    return (re.sub(r"[ \t]{2,}", " ", _LORA.sub("", prompt)).strip(), loras) if loras else (prompt, [])


def read(path: str | Path) -> dict[str, str]:
    """Return the values in a picture.

    Raises:
        SettingsError: it is no picture, or has no settings in it.
    """
    from PIL import Image

    what = "Cannot read the settings of the picture"
    try:
        with Image.open(path, formats=("PNG",)) as image:
            text = image.info.get(KEY)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise SettingsError(what, "it is not a PNG file", "Use one as it was generated") from error
    if not isinstance(text, str) or not text.strip():
        why = "it has none; editors and messengers remove them"
        raise SettingsError(what, why, "Use the file as it was generated")
    return parse(text)


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False) if re.search(r'[,:\n"]', value) else value


def _unquoted(value: str) -> str:
    if value.startswith('"'):
        try:
            return str(json.loads(value))
        except ValueError:
            return value.strip('"')
    return value
