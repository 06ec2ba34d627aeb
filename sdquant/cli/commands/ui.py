"""Open the web page: generate, settings, inspect, compare."""

from __future__ import annotations

import getpass
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

PASSWORD = "SDQUANT_UI_PASSWORD"
PATIENCE = 3.0  # seconds that a model in another thread gets to notice the end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the address to serve at, the model folders, and the sign-in settings."""
    parser.add_argument(
        "--models",
        action="append",
        default=[],
        metavar="FOLDER",
        help="a folder whose models the page may open, beside the shipped ones; may be given several times",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help=f"the address to listen at; one that other machines reach needs a password, from ${PASSWORD} or typed in",
    )
    parser.add_argument("--port", type=int, default=None, help="the port; default: the first free one from 7870 on")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a further name that the page is opened by, or https://NAME behind a proxy; may be given several times",
    )
    parser.add_argument("--user", default=None, help="the name that goes with the password; default: sdquant")
    parser.add_argument("--settings", type=Path, default=None, metavar="FILE", help="where the settings are kept")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from ...settings import settings_file
    from ...ui import Roots, background_task, gradio_is_there, serve, warm_up

    gradio_is_there()
    roots = Roots(args.models)
    settings = args.settings if args.settings is not None else settings_file.default_path()

    def build() -> object:
        return importlib.import_module("sdquant.ui.app").build(roots, settings)

    def look() -> dict[str, object]:
        return dict(importlib.import_module("sdquant.ui.app").look())

    serve(
        build,
        look=look,
        ready=lambda: warm_up(roots, settings),
        host=args.host,
        port=args.port,
        hosts=args.allow_host,
        user=args.user,
        password=_password(args.host),
        open_browser=not args.no_browser,
        stop=background_task.cancel_all,
        wait=background_task.wait_for_all,
        patience=PATIENCE,
    )
    return 0


def _password(host: str) -> str | None:
    """Return the password from the environment, or else ask for it if one is needed.

    It is not an argument, since other users of the machine can read those.
    """
    password = os.environ.get(PASSWORD) or None
    if password is None and host not in ("127.0.0.1", "localhost", "::1") and sys.stdin.isatty():
        password = getpass.getpass("Password for the page: ") or None
    return password
