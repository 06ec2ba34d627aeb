"""Hostile requests to a running server: each is refused, nothing outside is read, and the page goes on."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from typing import TYPE_CHECKING, Any

import pytest

from sdquant.ui import allowed
from sdquant.ui.bodies import MAX_BODY
from sdquant.ui.guard import Guard
from sdquant.ui.signin import FREE, SignIn

from .conftest import SECRET
from .wire import Reply, click, exchange, request

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Served

pytestmark = pytest.mark.xdist_group("ui")

JSON = ("Content-Type", "application/json")
FORM = ("Content-Type", "application/x-www-form-urlencoded")
PARTS = ("Content-Type", "multipart/form-data; boundary=b")
OWN = ("Origin", "http://127.0.0.1:{port}")
JOIN = "/gradio_api/queue/join"
CLICK = json.dumps({"data": ["x"], "fn_index": 0, "session_hash": "h"}).encode()


def _site(site: str, mode: str = "cors", dest: str = "empty") -> tuple[tuple[str, str], ...]:
    return (("Sec-Fetch-Site", site), ("Sec-Fetch-Mode", mode), ("Sec-Fetch-Dest", dest))


def _file(path: str, **more: object) -> bytes:
    """A click that gives a file to the page; `{secret}` is the file outside."""
    value = {"path": path, "meta": {"_type": "gradio.FileData"}, **more}
    return json.dumps({"data": [value], "fn_index": 2, "session_hash": "h"}).encode()


def _part(name: str) -> bytes:
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
    _row("click across sites", "POST", JOIN, (JSON, *_site("cross-site")), CLICK),
    _row("click from another port of this machine", "POST", JOIN, (JSON, *_site("same-site")), CLICK),
    _row("click from a site of an unknown kind", "POST", JOIN, (JSON, *_site("x")), CLICK),
    _row("click by opening a page", "POST", JOIN, (JSON, *_site("cross-site", "navigate", "document")), CLICK),
    _row("page read across sites", "GET", "/", _site("cross-site")),
    _row("page in a frame", "GET", "/", _site("cross-site", "navigate", "iframe")),
    _row("page opened as an unknown site", "GET", "/", _site("x", "navigate", "document")),
    _row("page read with an origin", "GET", "/", (("Origin", "https://evil.example"),)),
    _row("answers read across sites", "GET", "/gradio_api/queue/data?session_hash=h", _site("cross-site")),
    _row(
        "file opened across sites", "GET", "/gradio_api/file=/etc/passwd", _site("cross-site", "navigate", "document")
    ),
    _row("preflight", "OPTIONS", JOIN, (("Origin", "https://evil.example"),), status=405),
)

CSRF = (
    _row("click as a form", "POST", JOIN, (FORM, OWN), CLICK),
    _row("click as plain text", "POST", JOIN, (("Content-Type", "text/plain"), OWN), CLICK),
    _row("click without a type", "POST", JOIN, (OWN,), CLICK),
    _row("click in parts", "POST", JOIN, (PARTS, OWN), _part("x")),
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
        b'{"data": [], "fn_index": 99, "session_hash": "h"}',
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
    _row("value that is a file, past the queue", "POST", "/gradio_api/run/predict", (JSON, OWN), _file("/etc/passwd")),
    _row("value that is a file", "POST", JOIN, (JSON, OWN), _file("/etc/passwd")),
    _row("value that is the file outside", "POST", JOIN, (JSON, OWN), _file("{secret}")),
    _row("value that is a file in the folder", "POST", JOIN, (JSON, OWN), _file("{uploads}/../secret.safetensors")),
    _row("value that is relative", "POST", JOIN, (JSON, OWN), _file("pyproject.toml")),
    _row("value that is a URL", "POST", JOIN, (JSON, OWN), _file("http://127.0.0.1:1/x")),
    _row("value that is a URL in capitals", "POST", JOIN, (JSON, OWN), _file("HTTP://127.0.0.1:1/x")),
    _row("value that is a share", "POST", JOIN, (JSON, OWN), _file("\\\\host\\share\\x")),
    _row("value that is a file of a stream", "POST", JOIN, (JSON, OWN), _file("/etc/passwd", is_stream=True)),
    _row("value with a URL beside it", "POST", JOIN, (JSON, OWN), _file("x", url="http://127.0.0.1:1/x")),
    _row("value with a path that is no text", "POST", JOIN, (JSON, OWN), _file("x").replace(b'"x"', b"[1]")),
)  # fmt: skip

HOSTILE = (*HOSTS, *ORIGINS, *CSRF, *PATHS, *ROUTES, *FILES)


def _filled(text: str, server: Served) -> str:
    uploads = next(server.temporary.glob("sdquant-ui-*"))
    return text.replace("{secret}", str(server.outside / "secret.safetensors")).replace("{uploads}", str(uploads))


def _assert_tells_nothing(reply: Reply, server: Served) -> None:
    """No answer holds the secret, or where it is, or where code is."""
    for word in (SECRET, str(server.outside), "site-packages", "Traceback", "root:x:"):
        assert word.encode() not in reply.raw


def test_the_table_has_no_name_twice() -> None:
    assert len({row[0] for row in HOSTILE}) == len(HOSTILE) >= 100


@pytest.mark.parametrize("row", HOSTILE, ids=[row[0] for row in HOSTILE])
def test_hostile_requests_are_refused(server: Served, row: Row) -> None:
    _, method, target, headers, body, host, status = row
    body = _filled(body.decode("latin-1"), server).encode("latin-1")
    reply = request(server.port, method, _filled(target, server), headers, body, host=host)
    assert reply.status == status, reply.raw[:500]
    _assert_tells_nothing(reply, server)
    assert b"evil.example" not in reply.raw
    if status in (403, 405, 413):
        assert reply.headers["content-type"] == "text/plain; charset=utf-8"
        assert method == "HEAD" or reply.body.startswith(b"Refused: ")
        assert len(reply.body) < 200
        assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"GET /\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1:1\r\n Host: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
    ],
    ids=["no host", "TLS", "HTTP/0.9", "folded", "long", "two lengths", "negative length", "length of 5000 digits"],
)
def test_what_is_no_proper_request_is_refused(server: Served, raw: bytes) -> None:
    reply = exchange(server.port, raw)
    assert reply.status in (0, 400, 403, 413), reply.raw[:300]
    _assert_tells_nothing(reply, server)


def test_a_long_body_is_cut_off(server: Served) -> None:
    head = f"POST {JOIN} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n".encode()
    told = exchange(server.port, head + f"Content-Length: {MAX_BODY + 1}\r\n\r\n".encode())
    assert told.status == 413
    # Not a byte more than is needed: one that is not read would make the system drop the answer.
    whole = f"{MAX_BODY:x}\r\n".encode() + b" " * MAX_BODY + b"\r\n1\r\n \r\n"
    assert exchange(server.port, head + b"Transfer-Encoding: chunked\r\n\r\n" + whole).status == 413


@pytest.mark.parametrize(
    "text",
    [
        "/etc/passwd", "{secret}", "../models-private/secret.safetensors", 
        "models/../models-private/secret.safetensors",
        "models/link.safetensors", "models/out/secret.safetensors", "file:///etc/passwd", "http://127.0.0.1:1/x",
        "\\\\host\\share", "//host/share", "C:\\Windows\\win.ini", "NUL", "models/%2e%2e/x", "models/x\x00.gguf",
        "x" * 5000,
        "Models/link.safetensors", "<script>alert(1)</script>", "~/.bashrc", "models/.", "$HOME",
    ],
)  # fmt: skip
def test_a_name_typed_into_the_page_opens_nothing_outside(server: Served, text: str) -> None:
    reply = click(server.port, 0, _filled(text, server), session="typed")
    assert reply.status == 200
    assert "is not the name of a file or folder below" in reply.raw.decode()
    assert b"<script>" not in reply.raw
    _assert_tells_nothing(reply, server)


@pytest.mark.parametrize(
    "name", ["../../evil", "/tmp/evil", "..\\..\\evil", "%2e%2e%2fevil", "a" * 3000, "<b>.html", "x\u202egpj"]
)
def test_uploads_stay_in_their_folder(server: Served, name: str) -> None:
    there = {path for path in server.temporary.parent.rglob("*")}
    reply = request(server.port, "POST", "/gradio_api/upload", (PARTS, OWN), _part(name))
    assert reply.status == 200
    (made,) = json.loads(reply.body)
    uploads = next(server.temporary.glob("sdquant-ui-*"))
    assert allowed.is_kept(made, str(uploads))
    new = {path for path in server.temporary.parent.rglob("*")} - there
    assert all(path.is_relative_to(uploads) for path in new)
    shown = request(server.port, "GET", "/gradio_api/file=" + urllib.parse.quote(made))
    assert shown.body == b"evil"
    assert shown.headers["content-security-policy"].startswith("default-src 'none'")
    assert "text/html" not in shown.headers["content-type"]


def test_the_page_still_works_after_all_of_this(server: Served) -> None:
    page = request(server.port, "GET", "/", (*_site("none", "navigate", "document"),))
    assert page.status == 200
    assert b"gradio_config" in page.body
    assert b"<p>digits-sd</p>" in click(server.port, 0, "digits-sd", session="last").raw
    assert server.process.poll() is None


def test_what_belongs_into_the_queue_is_not_run_past_it(server: Served) -> None:
    made = json.loads(request(server.port, "POST", "/gradio_api/upload", (PARTS, OWN), _part("x")).body)[0]
    direct = request(server.port, "POST", "/gradio_api/run/predict", (JSON, OWN), _file(made))
    assert (direct.status, json.loads(direct.body)["data"]) == (200, ["4"])
    assert request(server.port, "POST", "/gradio_api/run/predict", (JSON, OWN), CLICK).status == 404


def test_nothing_outside_was_copied(server: Served) -> None:
    for path in server.temporary.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()


def test_another_page_may_link_to_this_one(server: Served) -> None:
    reply = request(server.port, "GET", "/", _site("cross-site", "navigate", "document"))
    assert reply.status == 200


def test_the_page_asks_no_other_host_and_runs_no_text(server: Served) -> None:
    reply = request(server.port, "GET", "/")
    policy = reply.headers["content-security-policy"]
    nonce = policy.partition("'nonce-")[2].partition("'")[0]
    assert "http" not in policy
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]
    assert reply.body.count(b"<script") == reply.body.count(f'<script nonce="{nonce}"'.encode()) > 3
    assert nonce not in request(server.port, "GET", "/").headers["content-security-policy"]
    assert reply.headers["x-frame-options"] == "DENY"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert "server" not in reply.headers


# The guard alone, around an app that answers "in".


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"server", b"x")]})
    await send({"type": "http.response.body", "body": f"in, {scope['scheme']}".encode()})


def _ask(guard: Guard, headers: dict[str, str], server: tuple[str, int] = ("10.0.0.5", 80)) -> tuple[int, bytes]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    found = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": found, "scheme": "http"}
    asyncio.run(guard(scope | {"client": ("10.0.0.9", 5), "server": server}, receive, send))
    return sent[0]["status"], sent[1]["body"]


def test_a_proxy_with_tls_is_named_and_not_believed(tmp_path: Path) -> None:
    guard = Guard(_app, origins=["https://gpu.example", "http://127.0.0.1:7870"], uploads=tmp_path)
    assert _ask(guard, {"host": "gpu.example", "origin": "https://gpu.example"}) == (200, b"in, https")
    assert _ask(guard, {"host": "gpu.example", "origin": "http://gpu.example"})[0] == 403
    assert _ask(guard, {"host": "127.0.0.1:7870", "x-forwarded-proto": "https"}) == (200, b"in, http")


def test_the_address_of_the_connection_counts_only_where_it_listens_on_all(tmp_path: Path) -> None:
    here = {"host": "10.0.0.5:7870"}
    every = Guard(_app, origins=["http://127.0.0.1:7870"], uploads=tmp_path, own_address=True)
    assert _ask(every, here, ("10.0.0.5", 7870))[0] == 200
    assert _ask(every, here, ("::ffff:10.0.0.5", 7870))[0] == 200
    assert _ask(every, {"host": "[fe80::1]:7870"}, ("fe80::1", 7870))[0] == 200
    assert _ask(every, here, ("10.0.0.6", 7870))[0] == 403
    one = Guard(_app, origins=["http://127.0.0.1:7870"], uploads=tmp_path)
    assert _ask(one, here, ("10.0.0.5", 7870))[0] == 403


def test_a_password_is_asked_for_first(tmp_path: Path) -> None:
    now = [0.0]
    signin = SignIn("me", "päss:word", clock=lambda: now[0])
    guard = Guard(_app, origins=["http://h:1"], uploads=tmp_path, signin=signin)
    right = "Basic bWU6cMOkc3M6d29yZA=="  # me:päss:word
    assert _ask(guard, {"host": "h:1"})[0] == 401
    assert _ask(guard, {"host": "h:1", "authorization": right})[0] == 200
    for wrong in ("Basic bWU6eA==", "Basic !", "Bearer x", "Basic", right + "A"):
        assert _ask(guard, {"host": "h:1", "authorization": wrong})[0] == 401
    assert _ask(guard, {"host": "evil:1", "authorization": right})[0] == 403


def test_wrong_passwords_are_heard_ever_more_slowly(tmp_path: Path) -> None:
    now = [0.0]
    signin = SignIn("me", "password", clock=lambda: now[0])
    guard = Guard(_app, origins=["http://h:1"], uploads=tmp_path, signin=signin)
    right = {"host": "h:1", "authorization": "Basic bWU6cGFzc3dvcmQ="}
    for _ in range(FREE):
        assert _ask(guard, {"host": "h:1", "authorization": "Basic bWU6eA=="})[0] == 401
    assert _ask(guard, right)[0] == 429
    now[0] += 1.5
    assert _ask(guard, {"host": "h:1", "authorization": "Basic bWU6eA=="})[0] == 401
    now[0] += 1.5
    assert _ask(guard, right)[0] == 429
    now[0] += 1.0
    assert _ask(guard, right)[0] == 200
    assert signin.wait("10.0.0.9") == 0


def test_every_route_says_why() -> None:
    assert all(row.why for row in allowed.ROUTES)
    assert len({row.path for row in allowed.ROUTES}) == len(allowed.ROUTES)
