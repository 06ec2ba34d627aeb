"""The requests that the page makes, one row each. Everything else that Gradio would answer is refused.

Gradio's settings do not replace the list: without it, 16 of the 121 requests in tests/ui/hostile_requests.py are
answered, and a list of what to refuse would be as long and let in whatever a new Gradio adds.

Left out on purpose, of Gradio 6.31's routes:

    /gradio_api/deep_link                     GET, writes a file
    /gradio_api/startup-events, /dev/reload   GET, run or wait for code
    /logout, /login, /token, /user            GET that ends sessions; the password is checked in basic_auth.py
    /gradio_api/proxy=..., file=http...       fetch other hosts
    /gradio_api/stream/..., custom_component  read files by parts of the path
    /gradio_api/run/<name>, /api, /call, /info, /openapi.json, /config, /mcp    an API besides the page's own queue
    /gradio_api/component_server              calls methods of components by name
    /gradio_api/queue/status, /monitoring, /profiling, /runs, /run-history    what others have done
    /gradio_api/vibe-edit, process_recording  write code, run programs
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl

MAX_QUERY = 512  # bytes
MAX_ID = 64  # characters of an id that a page makes up

_NAME = r"\w[\w.-]*"  # begins with a letter, so that no part is "." or ".."
_ID = rf"[\w-]{{1,{MAX_ID}}}"

JSON, MULTIPART = "application/json", "multipart/form-data"


@dataclass(frozen=True)
class Route:
    """Requests that are let through.

    Attributes:
        path: a pattern of the whole decoded path. why: what the page needs it for.
        query: the keys that may be in the query, and patterns of their values.
        media: the type of the body of a POST; "" for routes that are read with GET and HEAD.
    """

    path: str
    why: str
    query: Mapping[str, str]
    media: str = ""

    @property
    def methods(self) -> tuple[str, ...]:
        """Return the HTTP methods of the route."""
        return ("POST",) if self.media else ("GET", "HEAD")


_LOOK = {"__theme": "dark|light|system"}  # the page's own query, which Gradio's client repeats with every POST
_SESSION = {"session_hash": _ID}

ROUTES = (
    Route("/", "the page itself", _LOOK),
    Route(rf"/assets(/{_NAME})+", "its code and styles", {}),
    Route(rf"/static/(fonts|img|js)(/{_NAME})+", "its fonts and icons", {}),
    Route(r"/(favicon\.ico|manifest\.json)", "its icon", {}),
    Route(r"/(gradio_api/)?theme\.css", "its colours", {"v": r"\w+"}),
    Route("/gradio_api/app_id", "whether the server was started again", {}),
    Route(f"/gradio_api/heartbeat/{_ID}", "open as long as the page is", {}),
    Route("/gradio_api/queue/data", "the answers to what was clicked", _SESSION),
    Route("/gradio_api/file=.+", "images that were drawn, and exported files", {}),
    Route("/gradio_api/upload_progress", "the bar of an upload", {"upload_id": _ID}),
    Route("/gradio_api/queue/join", "a click", _LOOK, JSON),
    Route("/gradio_api/run/predict", "a click that waits for no other", _LOOK, JSON),
    Route("/gradio_api/(cancel|reset)", "a click on cancel", _LOOK, JSON),
    Route(
        "/gradio_api/upload",
        "a settings file to import, a picture, a start image, a LoRA",
        {**_LOOK, "upload_id": _ID},
        MULTIPART,
    ),
)

# What is kept for the page in the folder for temporary files: <hash>/<name>.
_KEPT = re.compile(r"[0-9a-f]{16,128}/[^/\\\x00-\x1f]+")


def route(method: str, path: str, query: bytes) -> Route | None:
    """Return the route of a request; None if there is none."""
    for row in ROUTES:
        if method in row.methods and re.fullmatch(row.path, path, re.ASCII):
            return row if _asked(row, query) else None
    return None


def file_path(path: str) -> str | None:
    """Return the path in `/gradio_api/file=<path>`; None for other requests."""
    return path.partition("/gradio_api/file=")[2] or None if path.startswith("/gradio_api/file=") else None


def is_kept(path: str, uploads: str) -> bool:
    """Return whether a path is that of a file in the folder for temporary files, by its text alone."""
    rest = path[len(uploads) + 1 :].replace("\\", "/") if path.startswith((uploads + "/", uploads + "\\")) else ""
    return _KEPT.fullmatch(rest) is not None and not rest.endswith(("/.", "/.."))


def _asked(row: Route, query: bytes) -> bool:
    """Return whether a query has only keys of the route, each once, with valid values."""
    if len(query) > MAX_QUERY:
        return False
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, strict_parsing=True, errors="strict")
    except ValueError:
        return not query
    fits = all(key in row.query and re.fullmatch(row.query[key], value, re.ASCII) for key, value in pairs)
    return fits and len({key for key, _ in pairs}) == len(pairs)
