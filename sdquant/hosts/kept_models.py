"""Models that AUTOMATIC1111 and its forks keep, and use again for the same file: loaded anew when the settings changed.

Before each image they request the selected checkpoint, by `sd_models.reload_model_weights`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import display, load_hooks, options

if TYPE_CHECKING:
    from ..settings import Settings
    from .host import Host
    from .status import ComponentStatus, Status

_MADE = "sdquant_made_with"  # the attribute of a model that says what it was quantized with; None is: not


def mark(model: Any, settings: Settings) -> None:
    """Note in a model what it was quantized with."""
    setattr(model, _MADE, _wanted(settings))


def request(original: Any, args: Any, kwargs: Any, host: Host, refuse: Callable[[Settings, Any], None]) -> Any:
    """Call the host's `reload_model_weights`; a kept model that other settings made is loaded anew.

    Args:
        refuse: called with the settings and that model, before the host moves it.
    """
    known = inspect.signature(original)
    bound = known.bind_partial(*args, **kwargs)
    if "forced_reload" in known.parameters:  # since 1.8
        models = display.module("modules.sd_models")
        settings = options.read(host)
        filename = (bound.arguments.get("info") or models.select_checkpoint()).filename
        for model in (bound.arguments.get("sd_model"), models.model_data.sd_model, *kept(models)):
            if model is None or model.sd_checkpoint_info.filename != filename:
                continue
            if getattr(model, _MADE, None) != _wanted(settings):
                refuse(settings, model)
                bound.arguments["forced_reload"] = True
    return original(*bound.args, **bound.kwargs)


def tell(status: Status, model: Any, parts: Callable[[], list[ComponentStatus]]) -> None:
    """Update the status for a reused model: it may still show another model, or a failed load."""
    last_load, filename = status.seen, model.sd_checkpoint_info.filename
    if last_load.parts and last_load.model == os.path.basename(filename):
        return
    load_hooks.begin(status, filename)
    for part in parts():
        status.loaded(part)


def reused_part(name: str, module: Any) -> ComponentStatus:
    """Return the status of a part of a reused model."""
    how = "after loading" if load_hooks.schemes_in(module) else load_hooks.AS_FOUND
    return load_hooks.part_of(name, module, how)


def drop(model: Any) -> None:
    """Remove a model from the host's cache: quantizing it failed, so that its weights are still floats."""
    models = display.module("modules.sd_models")
    models.model_data.sd_model = None
    if any(row is model for row in kept(models)):
        models.model_data.loaded_sd_models.remove(model)


def kept(models: Any) -> list[Any]:
    """Return the models that the host caches for reuse, including the one in use."""
    return list(getattr(models.model_data, "loaded_sd_models", []))


def _wanted(settings: Settings) -> tuple[Any, ...] | None:
    schemes = load_hooks.asked(settings)
    return (schemes, settings["skip"], settings["compute"]) if schemes else None
