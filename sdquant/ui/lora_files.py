"""Puts a LoRA file that was dropped into the page where the page finds it again. No gradio here."""

from __future__ import annotations

import filecmp
import re
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SettingsError, UnsupportedFileError
from ..formats import refused_files
from ..utils.atomic_write import whole_file
from .conversion import MOST_NAME_BYTES, is_device_name

if TYPE_CHECKING:
    from .model_folders import Roots

SUFFIX = ".safetensors"
FOLDER = "loras"  # below the first folder of models, if no other was chosen
_one_at_a_time = threading.Lock()  # two pages may drop files of one name
_PLAIN = re.compile(r"\w[\w .+()-]*")


def take_lora(roots: Roots, folder: str, file: Path) -> str:
    """Copy a LoRA file into a folder, and return its name in the list.

    Args:
        folder: the name of one of `roots.lora_folders`; "" for one below the first folder of models.

    Raises:
        SdquantError: it is no LoRA file, has a name that no file can have, or there is another one of that name.
    """
    what = f"Cannot use {file.name[:80]} as a LoRA"
    if file.suffix.lower() != SUFFIX:
        why = "it is no .safetensors file, and other files can run code"
        raise UnsupportedFileError(what, why, "Drop a LoRA in a .safetensors file")
    if not refused_files.is_lora_file(file):
        raise UnsupportedFileError(what, "it holds no LoRA that is known here", "Drop the .safetensors file of a LoRA")
    name = f"{file.stem}{SUFFIX}"
    if not _PLAIN.fullmatch(file.stem) or len(name.encode()) > MOST_NAME_BYTES or is_device_name(file.stem):
        raise SettingsError(what, "not every system can have a file of this name", "Rename it to letters and digits")
    place = _place(roots, folder, what) / name
    with _one_at_a_time:
        if place.exists():
            if not filecmp.cmp(place, file, shallow=False):
                why = f"there is another {name} in its folder already"
                raise SettingsError(what, why, "Rename it, and drop it again")
            return roots.shown(place)
        size = file.stat().st_size
        with file.open("rb") as source, whole_file(place, size) as target:
            shutil.copyfileobj(source, target, 1 << 20)
    return roots.shown(place)


def _place(roots: Roots, folder: str, what: str) -> Path:
    if folder:
        return roots.resolve(folder)
    folders = roots.folders[1:]
    if not folders:
        raise SettingsError(what, "there is no folder to put it into", "Start: sdquant ui --models FOLDER")
    return folders[0] / FOLDER
