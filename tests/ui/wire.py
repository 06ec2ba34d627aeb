"""Requests written byte by byte, since libraries tidy up what is sent."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass

from ..patience import PATIENCE


@dataclass(frozen=True)
class Reply:
    """An answer. `status` is 0 where the connection was closed without one."""

    status: int
    headers: dict[str, str]
    body: bytes
    raw: bytes


def exchange(port: int, request: bytes) -> Reply:
    """Send bytes, and read until the other side closes."""
    raw = b""
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as sock:
        try:
            sock.sendall(request)
            while part := sock.recv(65536):
                raw += part
        except ConnectionError:
            pass  # refused while still sending; what was read counts
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    status = int(lines[0].split()[1]) if lines[0].startswith("HTTP/1.1 ") else 0
    pairs = (line.partition(": ") for line in lines[1:])
    return Reply(status, {name.lower(): value for name, _, value in pairs}, body, raw)


def request(
    port: int,
    method: str,
    target: str,
    headers: tuple[tuple[str, str], ...] = (),
    body: bytes = b"",
    *,
    host: str | None = "127.0.0.1:{port}",
) -> Reply:
    """Send a request; `{port}` in the host and in headers is the server's."""
    lines = [f"{method} {target} HTTP/1.1"]
    lines += [f"Host: {host}"] if host is not None else []
    lines += [f"{name}: {value}" for name, value in headers]
    lines += [f"Content-Length: {len(body)}"] if body else []
    head = "\r\n".join([*lines, "Connection: close", "", ""]).replace("{port}", str(port))
    return exchange(port, head.encode("latin-1") + body)


def click(port: int, number: int, *data: object, session: str = "tests") -> Reply:
    """What the page sends for a click, and what comes of it: the answers up to the end of the stream."""
    value = {"data": list(data), "fn_index": number, "session_hash": session}
    kind = (("Content-Type", "application/json"), ("Origin", "http://127.0.0.1:{port}"))
    joined = request(port, "POST", "/gradio_api/queue/join", kind, json.dumps(value).encode())
    if joined.status != 200:
        return joined
    return request(port, "GET", f"/gradio_api/queue/data?session_hash={session}")
