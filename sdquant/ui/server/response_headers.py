"""The headers of every answer: they restrict the page, and keep other sites from using it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Iterable

from .request_body import Message

Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

# Gradio compiles the small functions of its HTML components, hence 'unsafe-eval'; inline scripts need the nonce, so
# that text from a file that finds its way into the page stays text. No other host is ever asked for anything.
_PAGE = (
    "default-src 'none'; script-src 'self' 'nonce-{nonce}' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; media-src 'self' data: blob:; "
    "worker-src 'self' blob:; manifest-src 'self'; base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
)
_OTHER = "default-src 'none'; frame-ancestors 'none'; sandbox"

FIXED: Headers = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=(), payment=(), usb=()"),
]
# Gradio's own words on who else may read an answer, and on how long it may be kept.
_REPLACED = frozenset({b"server", b"cache-control", b"content-security-policy", *(name for name, _ in FIXED)})
_HASHED = re.compile(r"/assets/.*-[\w-]{8}\.(js|css|woff2?)")  # the name changes with the content


def headers(raw: Iterable[tuple[bytes, bytes]], path: str, policy: str = _OTHER) -> Headers:
    """Return an answer's headers, with ours in place of Gradio's."""
    rest = [(name, value) for name, value in raw if name not in _REPLACED and not name.startswith(b"access-control-")]
    keep = b"private, max-age=31536000, immutable" if _HASHED.fullmatch(path) else b"no-store"
    if path.startswith(("/static/", "/favicon")):
        keep = b"private, max-age=3600"
    return [*rest, *FIXED, (b"cache-control", keep), (b"content-security-policy", policy.encode())]


async def refuse(send: Send, status: int, why: str, *, more: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Answer with a status and a sentence, and close the connection."""
    body = f"Refused: {why}.\n".encode()
    start = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    start += [(b"connection", b"close"), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers(start, "")})
    await send({"type": "http.response.body", "body": body})


class HeaderSender:
    """A `send` that sets the headers of an answer, and inserts the nonce into the page."""

    def __init__(self, send: Send, path: str) -> None:
        self._send, self._path = send, path
        self._start: Message | None = None  # of a page that is held back until it is whole
        self._parts: list[bytes] = []

    async def __call__(self, message: Message) -> None:
        """Pass a part of the answer on."""
        if message["type"] == "http.response.start":
            kind = dict(message.get("headers", [])).get(b"content-type", b"")
            if kind.startswith(b"text/html"):
                self._start = message
                return
            message["headers"] = headers(message.get("headers", []), self._path)
        elif message["type"] == "http.response.body" and self._start is not None:
            self._parts.append(message.get("body", b""))
            if message.get("more_body"):
                return
            await self._page(self._start)
            return
        await self._send(message)

    async def _page(self, start: Message) -> None:
        nonce = secrets.token_urlsafe(16)
        # In Gradio's template only: in the values that it writes into the page, `<` is written \u003c.
        body = re.sub(rb"<script(?=[\s>])", f'<script nonce="{nonce}"'.encode(), b"".join(self._parts))
        rest = [(name, value) for name, value in start["headers"] if name != b"content-length"]
        rest.append((b"content-length", str(len(body)).encode()))
        start["headers"] = headers(rest, self._path, _PAGE.format(nonce=nonce))
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})
