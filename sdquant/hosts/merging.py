"""Merging: web UIs read the files again, whatever is loaded. Files with packed weights are refused, whose codes they
would average as if they were weights; so are plain float8 ones where the web UI cannot add them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import SdquantError, UnsupportedFileError
from . import display

if TYPE_CHECKING:
    from ..models import Detected
    from .monkeypatch import Patches

_KEYWORDS = ("primary_model_name", "secondary_model_name", "tertiary_model_name")
_TABLES = ("checkpoint_aliases", "checkpoints_list")  # by which the forks of AUTOMATIC1111 find a model; Forge's first


def hook_merging(patches: Patches) -> None:
    """Hook into the function behind the tab for merging."""
    if display.has("modules.extras"):
        patches.wrap(display.module("modules.extras"), "run_modelmerger", _merge)


def _merge(original: Any, id_task: Any, *args: Any, **kwargs: Any) -> Any:
    """Merge, or say in the tab's own line why not, in the way of the web UI's own messages."""
    names = [*args[: len(_KEYWORDS)], *(kwargs[name] for name in _KEYWORDS if name in kwargs)]
    try:
        for file in _files(names):
            _refuse_packed(file, casts=kwargs.get("precision") == "fp16")  # SD.Next's, to which it casts first
    except SdquantError as error:
        import gradio

        return [*(gradio.update() for _ in range(4)), str(error)]
    return original(id_task, *args, **kwargs)


def _files(names: list[Any]) -> Iterator[str]:
    """Return the files of the models that are chosen, by the names in the tab's lists."""
    models = display.module("modules.sd_models")
    tables = [getattr(models, table, {}) for table in _TABLES]
    closest = getattr(models, "get_closest_checkpoint_match", lambda name: None)  # SD.Next's
    for name in (name for name in names if isinstance(name, str) and name):
        model = next((table[name] for table in tables if name in table), None) or closest(name)
        if model is not None and os.path.isfile(model.filename):
            yield model.filename


def _is_plain_float8(contents: Detected) -> bool:
    """Return whether the weights are float8 without scales: the codes are the weights."""
    matches = [match for source in contents.sources.values() for match in source.prequantized.values()]
    return all(set(match.keys) == {"codes"} and match.details.get("packing") == "float8" for match in matches)


def _refuse_packed(file: str, *, casts: bool) -> None:
    """Raise UnsupportedFileError if a file has packed weights. One that sdquant cannot read is left to the web UI.

    Args:
        casts: whether the web UI makes other floats of float8 before it merges.
    """
    from ..models import detection

    try:
        contents = detection.read_headers(file, find_classes=False)
    except SdquantError:
        return
    if contents.prequantized and _is_plain_float8(contents):
        if not casts:
            raise UnsupportedFileError(
                f"Cannot merge {os.path.basename(file)}",
                "its weights are float8, and torch, by which this web UI merges, does not add or multiply float8",
                "Merge a float16 file of the model, which this makes of it: sdquant dequantize",
            )
    elif contents.prequantized:
        raise UnsupportedFileError(
            f"Cannot merge {os.path.basename(file)}",
            f"its weights are quantized ({contents.quant}), and merging takes their codes for weights",
            "Merge the original files, and choose a scheme for the result in Settings, or run: sdquant dequantize",
        )
