"""Reads the body of a POST within limits, and checks it before any page code sees it."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

from .routes import JSON, MULTIPART, is_kept

MAX_BODY = 4 << 20  # bytes; settings are a few kB
MAX_UPLOAD = 900 << 20  # bytes; a LoRA
SECONDS = 30  # for a whole body to arrive; of an upload, for each part of it
LEAST_RATE = 8 << 10  # bytes a second of an upload on the whole, beyond the first SECONDS

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


class Refusal(Exception):
    """A request that is refused: the status and the sentence of the answer."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


def most(media: str) -> int:
    """Return the largest body of a type, in bytes."""
    return MAX_UPLOAD if media == MULTIPART else MAX_BODY


def require_space(uploads: str, length: int) -> None:
    """Raise Refusal if an upload would fill more than half of what is free on the disk, which may be memory."""
    if 2 * length > shutil.disk_usage(uploads).free:
        raise Refusal(507, "there is too little room for it on the disk of temporary files")


async def read(receive: Receive, media: str, uploads: str) -> Receive:
    """Read a body, check it, and return a `receive` that returns it again; an upload is passed on as it comes.

    Raises:
        Refusal: it is too large, too slow, no JSON, or names a file that was not uploaded.
    """
    if media == MULTIPART:  # which Gradio writes to disk; its length was checked, and no more is let through
        return _patient(receive)
    try:
        body = await asyncio.wait_for(_whole(receive, most(media)), SECONDS)
    except asyncio.TimeoutError:
        raise Refusal(408, f"the body did not arrive within {SECONDS} seconds") from None
    if media == JSON:
        _check(body, uploads)
    delivered = False

    async def again() -> Message:
        nonlocal delivered
        if delivered:
            return await receive()  # the end of the connection
        delivered = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _patient(receive: Receive) -> Receive:
    """Return a `receive` that gives a sender up if nothing comes, or so little that it would never end."""
    begin, received = time.monotonic(), 0

    async def part() -> Message:
        nonlocal received
        late = time.monotonic() - begin - received / LEAST_RATE
        try:
            message = await asyncio.wait_for(receive(), max(0.0, SECONDS - max(0.0, late)))
        except asyncio.TimeoutError:
            return {"type": "http.disconnect"}
        received += len(message.get("body", b""))
        return message

    return part


async def _whole(receive: Receive, limit: int) -> bytes:
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise Refusal(400, "the body ended early")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
        if size > limit:
            raise Refusal(413, f"the body is larger than {limit >> 20} MiB")
    return b"".join(parts)


def _check(body: bytes, uploads: str) -> None:
    """Refuse JSON that contains a file which this server does not keep for the page.

    Gradio copies the file that a value names to where it can be downloaded, and fetches it if the name is a URL.
    """
    try:
        value = json.loads(body)
        if not isinstance(value, dict):
            raise Refusal(400, "the body is not a JSON object")
        for path in _files(value):
            if not isinstance(path, str) or not is_kept(path, uploads):
                raise Refusal(403, "a value names a file that was not uploaded here")
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is not JSON") from None


def _files(value: Any) -> Iterator[Any]:
    """Yield the paths of all values that Gradio treats as files."""
    if isinstance(value, dict):
        if "path" in value and (isinstance(value.get("meta"), dict) or "orig_name" in value or "url" in value):
            yield value["path"]
        if isinstance(value.get("path"), str) and _far(value["path"]):
            yield value["path"]
        for part in value.values():
            yield from _files(part)
    elif isinstance(value, list):
        for part in value:
            yield from _files(part)


def _far(path: str) -> bool:
    """Return whether a path is outside the folder that the server runs in."""
    parts = path.replace("\\", "/").split("/")
    return parts[0] == "" or ":" in path or ".." in parts
