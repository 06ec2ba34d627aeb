"""Entry point of the extension's script: registers everything with the host, and removes it when scripts unload."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import SdquantError
from ..utils import install
from . import display, folders, host, merging, options, preflight, tab
from .monkeypatch import Patches
from .status import Status

ROUTE = "/sdquant/status"

_session: Session | None = None


class Session:
    """The extension's lifetime, from the run of its script until the host unloads it."""

    def __init__(self) -> None:
        self.host = host.running()
        self.status = Status(self.host, folders.clean)
        adapter = importlib.import_module(f"{__package__}.{self.host.name}")
        self.adapter = adapter.Adapter(self.host, self.status)
        self.patches = Patches(self._told)

    def register(self) -> None:
        """Hook into loads, and register the callbacks for settings, tab and route.

        Arguments are passed by position, the only way that SD.Next's functions accept.
        """
        self.adapter.install(self.patches)
        merging.hook_merging(self.patches)
        callbacks = display.module("modules.script_callbacks")
        callbacks.on_ui_settings(self.settings)
        callbacks.on_ui_tabs(lambda: tab.build(self.status))
        callbacks.on_model_loaded(self.adapter.model_loaded)
        callbacks.on_app_started(self.app_started)
        callbacks.on_script_unloaded(self.unload)

    def settings(self) -> None:
        """Add the settings when the host asks for them."""
        for message in options.import_old(self.host):
            display.tell(message)
        options.add(self.host, onchange=self.adapter.changed)

    def app_started(self, demo: Any, app: Any) -> None:
        """Add the route when the host's web server starts. It is read-only, and reveals no folders of this machine."""
        if all(getattr(route, "path", None) != ROUTE for route in app.routes):
            app.add_api_route(ROUTE, _answer, methods=["GET"])

    def unload(self) -> None:
        """Restore the host."""
        self.patches.undo()
        install.set_inside(False)

    def _told(self, error: SdquantError) -> None:
        self.status.failed(error)
        callback = getattr(self.adapter, "told", None)
        if callback is not None:
            callback(error)


def start() -> None:
    """Register with the running host; if that cannot be, say why in its console and in the tab, and leave it alone."""
    try:
        register()
    except SdquantError as error:
        text = str(error)  # the name `error` ends with this block
        display.tell(text)
        display.module("modules.script_callbacks").on_ui_tabs(lambda: tab.build_refusal(text))


def register() -> None:
    """Register with the running host. A second call (hosts reload their scripts) unregisters the first session.

    Raises:
        SettingsError: this process is not a host that sdquant knows.
        BackendUnavailableError: its packages are too old, or some are missing.
    """
    global _session
    if _session is not None:
        _session.unload()
        _session = None
    install.set_inside(True)
    try:
        preflight.require_packages()
        session = Session()
    except SdquantError:
        install.set_inside(False)
        raise
    try:
        session.register()
    except SdquantError:
        session.unload()
        raise
    _session = session


def _answer() -> dict[str, Any]:
    """Return the status of the current session."""
    return _session.status.to_dict() if _session is not None else {}
