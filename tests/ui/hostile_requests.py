"""Hostile requests, a row each, that every page of `sdquant ui` must refuse, whatever is on it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from .conftest import SECRET
from .wire import Reply, request

if TYPE_CHECKING:
    from .conftest import Served

JSON = ("Content-Type", "application/json")
FORM = ("Content-Type", "application/x-www-form-urlencoded")
PARTS = ("Content-Type", "multipart/form-data; boundary=b")
OWN = ("Origin", "http://127.0.0.1:{port}")
JOIN = "/gradio_api/queue/join"
CLICK = json.dumps({"data": ["x"], "fn_index": 0, "session_hash": "h"}).encode()


def site(site: str, mode: str = "cors", dest: str = "empty") -> tuple[tuple[str, str], ...]:
    return (("Sec-Fetch-Site", site), ("Sec-Fetch-Mode", mode), ("Sec-Fetch-Dest", dest))


def given(path: str, **more: object) -> bytes:
    """A click that gives a file to the page; `{secret}` is the file outside."""
    value = {"path": path, "meta": {"_type": "gradio.FileData"}, **more}
    return json.dumps({"data": [value], "fn_index": 2, "session_hash": "h"}).encode()


def part(name: str) -> bytes:
    head = f'--b\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'
    return head.encode() + b"evil\r\n--b--\r\n"


# name, method, target, headers, body, the Host header (None: without one), the status if it is another than 403
Row = tuple[str, str, str, tuple[tuple[str, str], ...], bytes, "str | None", int]
LOCAL = "127.0.0.1:{port}"


def _row(
    name: str,
    method: str,
    target: str,
    headers: tuple[tuple[str, str], ...] = (),
    body: bytes = b"",
    host: str | None = LOCAL,
    status: int = 403,
) -> Row:
    return name, method, target, headers, body, host, status


HOSTS = (
    _row("host of another name (rebinding)", "GET", "/", host="evil.example:{port}"),
    _row("host that begins like ours", "GET", "/", host="127.0.0.1.evil.example:{port}"),
    _row("host that ends like ours", "GET", "/", host="evil-localhost:{port}"),
    _row("host with another port", "GET", "/", host="127.0.0.1:1"),
    _row("host without a port", "GET", "/", host="127.0.0.1"),
    _row("host with a user", "GET", "/", host="evil@127.0.0.1:{port}"),
    _row("host with a dot behind it", "GET", "/", host="localhost.:{port}"),
    _row("host as a number", "GET", "/", host="2130706433:{port}"),
    _row("host of all addresses", "GET", "/", host="0.0.0.0:{port}"),
    _row("host with a path", "GET", "/", host="127.0.0.1:{port}/x"),
    _row("empty host", "GET", "/", host=""),
    _row("no host", "GET", "/", host=None, status=400),
    _row("two hosts", "GET", "/", (("Host", "evil.example"),), status=400),
    _row("click on a host of another name", "POST", JOIN, (JSON,), CLICK, host="evil.example"),
    _row("host of a proxy that is not there", "GET", "/", (("X-Forwarded-Host", "evil.example"),), status=200),
)

ORIGINS = (
    _row("click from elsewhere", "POST", JOIN, (JSON, ("Origin", "https://evil.example")), CLICK),
    _row("click from null", "POST", JOIN, (JSON, ("Origin", "null")), CLICK),
    _row("click from another port", "POST", JOIN, (JSON, ("Origin", "http://127.0.0.1:1")), CLICK),
    _row("click from another scheme", "POST", JOIN, (JSON, ("Origin", "https://127.0.0.1:{port}")), CLICK),
    _row(
        "click from a name like ours", "POST", JOIN, (JSON, ("Origin", "http://127.0.0.1.evil.example:{port}")), CLICK
    ),
    _row("click from our other name", "POST", JOIN, (JSON, ("Origin", "http://localhost:{port}")), CLICK),
    _row("click from two origins", "POST", JOIN, (JSON, OWN, ("Origin", "https://evil.example")), CLICK),
    _row("click from an empty origin", "POST", JOIN, (JSON, ("Origin", "")), CLICK),
    _row("click across sites", "POST", JOIN, (JSON, *site("cross-site")), CLICK),
    _row("click from another port of this machine", "POST", JOIN, (JSON, *site("same-site")), CLICK),
    _row("click from a site of an unknown kind", "POST", JOIN, (JSON, *site("x")), CLICK),
    _row("click by opening a page", "POST", JOIN, (JSON, *site("cross-site", "navigate", "document")), CLICK),
    _row("page read across sites", "GET", "/", site("cross-site")),
    _row("page in a frame", "GET", "/", site("cross-site", "navigate", "iframe")),
    _row("page opened as an unknown site", "GET", "/", site("x", "navigate", "document")),
    _row("page read with an origin", "GET", "/", (("Origin", "https://evil.example"),)),
    _row("answers read across sites", "GET", "/gradio_api/queue/data?session_hash=h", site("cross-site")),
    _row("file opened across sites", "GET", "/gradio_api/file=/etc/passwd", site("cross-site", "navigate", "document")),
    _row("preflight", "OPTIONS", JOIN, (("Origin", "https://evil.example"),), status=405),
)

CSRF = (
    _row("click as a form", "POST", JOIN, (FORM, OWN), CLICK),
    _row("click as plain text", "POST", JOIN, (("Content-Type", "text/plain"), OWN), CLICK),
    _row("click without a type", "POST", JOIN, (OWN,), CLICK),
    _row("click in parts", "POST", JOIN, (PARTS, OWN), part("x")),
    _row("upload as JSON", "POST", "/gradio_api/upload", (JSON, OWN), CLICK),
    _row("two types", "POST", JOIN, (JSON, ("Content-Type", "text/plain"), OWN), CLICK),
    _row("click that is no JSON", "POST", JOIN, (JSON, OWN), b"{", status=400),
    _row("click that is a list", "POST", JOIN, (JSON, OWN), b"[1]", status=400),
    _row("click that is deep", "POST", JOIN, (JSON, OWN), b"[" * 200_000, status=400),
    _row(
        "click for no function",
        "POST",
        JOIN,
        (JSON, OWN),
        b'{"data": [], "fn_index": 9999, "session_hash": "h"}',
        status=500,
    ),
)

PATHS = (
    _row("file by its path", "GET", "/gradio_api/file=/etc/passwd"),
    _row("file outside by its path", "GET", "/gradio_api/file={secret}"),
    _row("file relative", "GET", "/gradio_api/file=pyproject.toml"),
    _row("file with dots", "GET", "/gradio_api/file=../../../../etc/passwd"),
    _row("file with dots in code", "GET", "/gradio_api/file=%2e%2e/%2e%2e/etc/passwd"),
    _row("file with dots in code twice", "GET", "/gradio_api/file=%252e%252e/%252e%252e/etc/passwd"),
    _row("file with a zero", "GET", "/gradio_api/file=/etc/passwd%00.png"),
    _row("file of a share", "GET", "/gradio_api/file=%5c%5chost%5cshare%5cx"),
    _row("file of a URL", "GET", "/gradio_api/file=http://127.0.0.1:1/x"),
    _row("file as file://", "GET", "/gradio_api/file=file:///etc/passwd"),
    _row("file by the old path", "GET", "/gradio_api/file/etc/passwd"),
    _row("file without the prefix", "GET", "/file=/etc/passwd"),
    _row("file by HEAD", "HEAD", "/gradio_api/file=/etc/passwd"),
    _row("file out of the folder", "GET", "/gradio_api/file={uploads}/../../models-private/secret.safetensors"),
    _row("file out of a folder in it", "GET", "/gradio_api/file={uploads}/" + 64 * "0" + "/.."),
    _row("file beside the folder", "GET", "/gradio_api/file={uploads}-evil/" + 64 * "0" + "/x"),
    _row("assets with dots", "GET", "/assets/../../../../../etc/passwd"),
    _row("assets with dots in code", "GET", "/assets/%2e%2e/%2e%2e/%2e%2e/index.html"),
    _row("static by a path", "GET", "/static//etc/passwd"),
    _row("static with backslashes", "GET", "/static/img/..%5c..%5cindex.html"),
    _row("target of another server", "GET", "http://evil.example/"),
    _row("page with an old link", "GET", "/?deep_link=../../x"),
    _row("page with an unknown key", "GET", "/?view=api"),
    _row("page with a key twice", "GET", "/?__theme=dark&__theme=light"),
    _row("page with code in its key", "GET", "/?__theme=%3Cscript%3Ealert(1)%3C/script%3E"),
    _row("answers to a session that is code", "GET", "/gradio_api/queue/data?session_hash=%3Cscript%3E"),
)

_GRADIO = tuple(
    _row(
        f"{method} {target}",
        method,
        target,
        (JSON, OWN) if method == "POST" else (),
        b"{}" if method == "POST" else b"",
    )
    for method, target in (
        ("GET", "/gradio_api/proxy=http://127.0.0.1:1/"),
        ("GET", "/gradio_api/proxy=https://x.hf.space/"),
        ("GET", "/gradio_api/deep_link?session_hash=h"),
        ("GET", "/gradio_api/startup-events"),
        ("GET", "/gradio_api/dev/reload"),
        ("GET", "/logout"),
        ("GET", "/gradio_api/token"),
        ("GET", "/gradio_api/info"),
        ("GET", "/gradio_api/openapi.json"),
        ("GET", "/config"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/monitoring"),
        ("GET", "/monitoring/summary"),
        ("GET", "/gradio_api/queue/status"),
        ("GET", "/gradio_api/runs"),
        ("GET", "/gradio_api/run-history/buckets"),
        ("GET", "/gradio_api/call/look/abc"),
        ("GET", "/gradio_api/stream/a/b/c/playlist.m3u8"),
        ("GET", "/gradio_api/custom_component/a/client/b/c"),
        ("GET", "/gradio_api/vibe-code"),
        ("GET", JOIN),
        ("GET", "/gradio_api/mcp/"),
        ("POST", "/"),
        ("POST", "/login"),
        ("POST", "/gradio_api/run/look"),
        ("POST", "/gradio_api/api/look"),
        ("POST", "/gradio_api/call/look"),
        ("POST", "/gradio_api/call/v2/look"),
        ("POST", "/gradio_api/component_server"),
        ("POST", "/gradio_api/vibe-edit"),
        ("POST", "/gradio_api/process_recording"),
        ("POST", "/gradio_api/mcp/"),
    )
)

ROUTES = (
    *_GRADIO,
    _row("PUT", "PUT", "/", status=405),
    _row("DELETE", "DELETE", "/", status=405),
    _row("TRACE", "TRACE", "/", status=405),
    _row("CONNECT", "CONNECT", "/", status=405),
    _row("a method of its own", "FETCH", "/", status=405),
    _row("a web socket", "GET", "/", (("Upgrade", "websocket"), ("Sec-WebSocket-Key", "eA=="))),
    _row("a GET with a body", "GET", "/", (), b"x=1"),
)

FILES = (
    _row("value that is a file, past the queue", "POST", "/gradio_api/run/predict", (JSON, OWN), given("/etc/passwd")),
    _row("value that is a file", "POST", JOIN, (JSON, OWN), given("/etc/passwd")),
    _row("value that is the file outside", "POST", JOIN, (JSON, OWN), given("{secret}")),
    _row("value that is a file in the folder", "POST", JOIN, (JSON, OWN), given("{uploads}/../secret.safetensors")),
    _row("value that is relative", "POST", JOIN, (JSON, OWN), given("pyproject.toml")),
    _row("value that is a URL", "POST", JOIN, (JSON, OWN), given("http://127.0.0.1:1/x")),
    _row("value that is a URL in capitals", "POST", JOIN, (JSON, OWN), given("HTTP://127.0.0.1:1/x")),
    _row("value that is a share", "POST", JOIN, (JSON, OWN), given("\\\\host\\share\\x")),
    _row("value that is a file of a stream", "POST", JOIN, (JSON, OWN), given("/etc/passwd", is_stream=True)),
    _row("value with a URL beside it", "POST", JOIN, (JSON, OWN), given("x", url="http://127.0.0.1:1/x")),
    _row("value with a path that is no text", "POST", JOIN, (JSON, OWN), given("x").replace(b'"x"', b"[1]")),
)  # fmt: skip

HOSTILE = (*HOSTS, *ORIGINS, *CSRF, *PATHS, *ROUTES, *FILES)


def filled(text: str, server: Served) -> str:
    uploads = next(server.temporary.glob("sdquant-ui-*"))
    return text.replace("{secret}", str(server.outside / "secret.safetensors")).replace("{uploads}", str(uploads))


def leaks(raw: bytes, server: Served) -> list[str]:
    """What an answer holds that none may: the secret, where it is, where code is, what lies in files of the system."""
    words = (SECRET, str(server.outside), "site-packages", "Traceback", "root:x:")
    return [word for word in words if word.encode() in raw]


def assert_refused(server: Served, row: Row) -> None:
    """Send a row's request, and look at the answer."""
    _, method, target, headers, body, host, status = row
    body = filled(body.decode("latin-1"), server).encode("latin-1")
    reply = request(server.port, method, filled(target, server), headers, body, host=host)
    assert reply.status == status, reply.raw[:500]
    assert_tells_nothing(reply, server)
    assert b"evil.example" not in reply.raw
    if status in (403, 405, 413):
        assert reply.headers["content-type"] == "text/plain; charset=utf-8"
        assert method == "HEAD" or reply.body.startswith(b"Refused: ")
        assert len(reply.body) < 200
        assert "access-control-allow-origin" not in reply.headers


def assert_tells_nothing(reply: Reply, server: Served) -> None:
    """No answer leaks."""
    assert leaks(reply.raw, server) == []
