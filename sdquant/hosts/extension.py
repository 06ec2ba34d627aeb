"""What the extension's script calls: everything is registered with the host, and taken back when it unloads scripts."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from ..errors import SdquantError
from . import display, folders, host, options, tab
from .monkeypatch import Patches
from .status import Status

log = logging.getLogger(__name__)

ROUTE = "/sdquant/status"

_session: Session | None = None


class Session:
    """The extension from when its script runs to when the host unloads it."""

    def __init__(self) -> None:
        self.host = host.running()
        self.status = Status(self.host, folders.clean)
        adapter = importlib.import_module(f"{__package__}.{self.host.name}")
        self.adapter = adapter.Adapter(self.host, self.status)
        self.patches = Patches(self._told)

    def register(self) -> None:
        """Take part in loads, and be asked for settings, a tab and a route. Arguments by position: SD.Next's functions
        have no others."""
        self.adapter.install(self.patches)
        callbacks = display.module("modules.script_callbacks")
        callbacks.on_ui_settings(self.settings)
        callbacks.on_ui_tabs(self.tabs)
        callbacks.on_model_loaded(self.model_loaded)
        callbacks.on_app_started(self.app_started)
        callbacks.on_script_unloaded(self.unload)

    def settings(self) -> None:
        """The host asks for settings."""
        for said in options.import_old(self.host):
            log.warning("%s", said)
        options.add(self.host, onchange=self.adapter.changed)

    def tabs(self) -> list[tuple[Any, str, str]]:
        """The host asks for tabs."""
        return tab.build(self.status)

    def model_loaded(self, model: Any) -> None:
        """The host has loaded a model."""
        self.adapter.model_loaded(model)

    def app_started(self, demo: Any, app: Any) -> None:
        """The host's web server is there. The route only reads, and says nothing of this machine's folders."""
        if all(getattr(route, "path", None) != ROUTE for route in app.routes):
            app.add_api_route(ROUTE, _answer, methods=["GET"])

    def unload(self) -> None:
        """The host is as it was."""
        self.patches.undo()

    def _told(self, error: SdquantError) -> None:
        self.status.failed(error)
        told = getattr(self.adapter, "told", None)
        if told is not None:
            told(error)


def register() -> None:
    """Register with the host that this process is. A second time (hosts reload their scripts) takes the first back.

    Raises:
        SettingsError: this process is no host that sdquant knows.
    """
    global _session
    if _session is not None:
        _session.unload()
        _session = None
    session = Session()
    try:
        session.register()
    except SdquantError:
        session.unload()
        raise
    _session = session


def _answer() -> dict[str, Any]:
    """The status, of the session that is there when it is asked for."""
    return _session.status.to_dict() if _session is not None else {}
