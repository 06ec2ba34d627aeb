"""Hostile requests to a running server: each is refused, nothing outside is read, and the page goes on."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import urllib.parse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from sdquant.ui.server import routes
from sdquant.ui.server.basic_auth import FREE, SignIn
from sdquant.ui.server.guard import Guard
from sdquant.ui.server.request_body import MAX_BODY

from ..patience import PATIENCE
from .conftest import SECRET
from .hostile_requests import (
    CLICK,
    HOSTILE,
    JOIN,
    JSON,
    OWN,
    PARTS,
    Row,
    assert_refused,
    assert_tells_nothing,
    filled,
    given,
    part,
    site,
)
from .wire import click, exchange, request

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Served

pytestmark = pytest.mark.xdist_group("ui")


def test_the_table_has_no_name_twice() -> None:
    assert len({row[0] for row in HOSTILE}) == len(HOSTILE) >= 100


@pytest.mark.parametrize("row", HOSTILE, ids=[row[0] for row in HOSTILE])
def test_hostile_requests_are_refused(server: Served, row: Row) -> None:
    assert_refused(server, row)


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
    assert_tells_nothing(reply, server)


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
    reply = click(server.port, 0, filled(text, server), session="typed")
    assert reply.status == 200
    assert "is not the name of a file or folder below" in reply.raw.decode()
    assert b"<script>" not in reply.raw
    assert_tells_nothing(reply, server)


@pytest.mark.parametrize(
    "name", ["../../evil", "/tmp/evil", "..\\..\\evil", "%2e%2e%2fevil", "a" * 3000, "<b>.html", "x\u202egpj"]
)
def test_uploads_stay_in_their_folder(server: Served, name: str) -> None:
    there = {path for path in server.temporary.parent.rglob("*")}
    reply = request(server.port, "POST", "/gradio_api/upload", (PARTS, OWN), part(name))
    assert reply.status == 200
    (made,) = json.loads(reply.body)
    uploads = next(server.temporary.glob("sdquant-ui-*"))
    assert routes.is_kept(made, str(uploads))
    new = {path for path in server.temporary.parent.rglob("*")} - there
    assert all(path.is_relative_to(uploads) for path in new)
    shown = request(server.port, "GET", "/gradio_api/file=" + urllib.parse.quote(made))
    assert shown.body == b"evil"
    assert shown.headers["content-security-policy"].startswith("default-src 'none'")
    assert "text/html" not in shown.headers["content-type"]


def test_an_upload_is_of_files_alone_as_long_as_it_says_and_whole(server: Served) -> None:
    uploads = next(server.temporary.glob("sdquant-ui-*"))
    there = set(uploads.rglob("*"))
    field = part("x").replace(b'; filename="x"', b"")
    assert field != part("x")
    assert request(server.port, "POST", "/gradio_api/upload", (PARTS, OWN), field).status == 400
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(part("x")), part("x"))
    head = f"POST /gradio_api/upload HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n".encode()
    head += f"{PARTS[0]}: {PARTS[1]}\r\n".encode()
    for length in (b"Content-Length: 9\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: chunked"):
        assert exchange(server.port, head + length + b"\r\nConnection: close\r\n\r\n" + body).status == 411
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as sock:  # goes away on the way
        sock.sendall(head + b"Content-Length: 900000\r\n\r\n" + part("x")[:-9])
        _until(lambda: any(path.is_file() for path in set(uploads.rglob("*")) - there))
    _until(lambda: set(uploads.rglob("*")) == there)


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_page_still_works_after_all_of_this(server: Served) -> None:
    page = request(server.port, "GET", "/", (*site("none", "navigate", "document"),))
    assert page.status == 200
    assert b"gradio_config" in page.body
    assert b"<p>digits-sd</p>" in click(server.port, 0, "digits-sd", session="last").raw
    assert server.process.poll() is None


def test_what_belongs_into_the_queue_is_not_run_past_it(server: Served) -> None:
    made = json.loads(request(server.port, "POST", "/gradio_api/upload", (PARTS, OWN), part("x")).body)[0]
    direct = request(server.port, "POST", "/gradio_api/run/predict", (JSON, OWN), given(made))
    assert (direct.status, json.loads(direct.body)["data"]) == (200, ["4"])
    assert request(server.port, "POST", "/gradio_api/run/predict", (JSON, OWN), CLICK).status == 404


def test_nothing_outside_was_copied(server: Served) -> None:
    for path in server.temporary.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()


def test_another_page_may_link_to_this_one(server: Served) -> None:
    reply = request(server.port, "GET", "/", site("cross-site", "navigate", "document"))
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
    assert all(row.why for row in routes.ROUTES)
    assert len({row.path for row in routes.ROUTES}) == len(routes.ROUTES)
