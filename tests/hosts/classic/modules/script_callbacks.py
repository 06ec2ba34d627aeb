"""A1111 82a973c0 and Forge dfdcbab6, modules/script_callbacks.py. Errors of callbacks are printed, and no more."""

import dataclasses
import typing

from modules import errors


@dataclasses.dataclass
class ScriptCallback:
    script: str
    callback: typing.Any
    name: str = "unnamed"


callback_map = {
    f"callbacks_{name}": [] for name in ("app_started", "model_loaded", "ui_settings", "ui_tabs", "script_unloaded")
}


def clear_callbacks():
    for each in callback_map.values():
        each.clear()


def _call(name, *args):
    made = []
    for row in callback_map[f"callbacks_{name}"]:
        try:
            made += row.callback(*args) or []
        except Exception:
            errors.report(f"Error executing callback {name} for {row.script}", exc_info=True)
    return made


def app_started_callback(demo, app):
    _call("app_started", demo, app)


def model_loaded_callback(sd_model):
    _call("model_loaded", sd_model)


def ui_settings_callback():
    _call("ui_settings")


def ui_tabs_callback():
    return _call("ui_tabs")


def script_unloaded_callback():
    _call("script_unloaded")


def on_app_started(callback, *, name=None):
    callback_map["callbacks_app_started"].append(ScriptCallback("script", callback, name))


def on_model_loaded(callback, *, name=None):
    callback_map["callbacks_model_loaded"].append(ScriptCallback("script", callback, name))


def on_ui_settings(callback, *, name=None):
    callback_map["callbacks_ui_settings"].append(ScriptCallback("script", callback, name))


def on_ui_tabs(callback, *, name=None):
    callback_map["callbacks_ui_tabs"].append(ScriptCallback("script", callback, name))


def on_script_unloaded(callback, *, name=None):
    callback_map["callbacks_script_unloaded"].append(ScriptCallback("script", callback, name))
