"""Folders with quantized components that SD.Next would load by other means, or not at all.

* All of them it takes for SDNQ's (`load_sdnq_module`).
* Flux's T5 and other large text encoders it loads from a repository of its own in place of the folder's, or, with
  "Use shared instance of text encoder" off, from the subfolder `text_encoder`, which in Flux is CLIP's
  (`load_text_encoder` of `pipelines/generic_text_encoder.py`, 058a7f0cf).
* Those in bitsandbytes' formats diffusers refuses on a machine without a GPU.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from . import display

if TYPE_CHECKING:
    from .monkeypatch import Patches

_WEIGHTS = ".safetensors"


def hook_folders(patches: Patches) -> None:
    """Hook into SD.Next's loaders of folders."""
    models = display.module("modules.sd_models")
    if hasattr(models, "load_sdnq_module"):  # not in every version
        patches.wrap(models, "load_sdnq_module", _sdnq_module)
    if display.has("pipelines.generic"):
        patches.wrap(display.module("pipelines.generic"), "load_text_encoder", _text_encoder)
    try:
        from ..integrations import serve_bitsandbytes
    except ImportError:  # diffusers before its quantizers
        return
    patches.later(serve_bitsandbytes())


def _sdnq_module(original: Any, fn: str, module_name: str, *args: Any, **kwargs: Any) -> Any:
    """Load folders quantized by SDNQ as SD.Next does, and let it load others normally: it takes all for SDNQ's."""
    if _method(os.path.join(fn, module_name)) not in (None, "sdnq"):
        return None, module_name, 0
    return original(fn, module_name, *args, **kwargs)


def _text_encoder(original: Any, repo_id: Any, cls_name: type, *args: Any, **kwargs: Any) -> Any:
    """Load the folder's own text encoder if that is quantized, as it is. One that is chosen by name goes before."""
    choice = display.module("modules.shared").opts.data.get("sd_text_encoder")
    own = _quantized_encoder(repo_id, cls_name.__name__, kwargs.get("subfolder"))
    if own is None or args or choice not in (None, "", "Default"):
        return original(repo_id, cls_name, *args, **kwargs)
    return original(repo_id, cls_name, **{**kwargs, "subfolder": own, "allow_shared": False, "allow_quant": False})


def _quantized_encoder(folder: Any, class_name: str, subfolder: str | None) -> str | None:
    """Return the name of the folder's component of this class, if it is there, quantized, and the only one or asked
    for."""
    if not isinstance(folder, str) or not os.path.isdir(folder):
        return None
    rows = _json(os.path.join(folder, "model_index.json")).items()
    names = [name for name, row in rows if isinstance(row, list) and row[1:] == [class_name]]
    names = [name for name in names if name == subfolder] or names
    if len(names) != 1 or _method(os.path.join(folder, names[0])) is None:
        return None
    files = os.listdir(os.path.join(folder, names[0]))
    return names[0] if any(file.endswith(_WEIGHTS) for file in files) else None


def _method(folder: str) -> str | None:
    """Return the quant_method in a component's config.json."""
    config = _json(os.path.join(folder, "config.json")).get("quantization_config")
    method = config.get("quant_method") if isinstance(config, dict) else None
    return str(method) if method else None


def _json(file: str) -> dict[str, Any]:
    """Return an object of a file; {} where there is none: SD.Next says what is wrong with it."""
    try:
        with open(file, encoding="utf-8") as text:
            value = json.load(text)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
