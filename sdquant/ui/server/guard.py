"""Refuses requests before any page code runs.

A web page that the user has open in another tab can send requests to servers on the user's own machine, and can point
its own host name at that machine's address. So a request is accepted only if it is addressed to a name of this server,
comes from this server's own page or from the address bar, is one that the page makes (routes.py), and has a body that
the page would send (request_body.py). If there is a password (basic_auth.py), it is checked first.

Starlette's middlewares do not do this: TrustedHostMiddleware lets every port of a host in, which is how another server
on this machine is told from this one, and CORSMiddleware answers requests from elsewhere, only without its headers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from . import request_body, routes
from .basic_auth import REALM, SignIn
from .request_body import Receive, Refusal
from .response_headers import HeaderSender, Send, refuse

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

METHODS = ("GET", "HEAD", "POST")
# Headers of proxies, which Gradio would trust; and compression of the page, which response_headers.py still modifies.
_DROPPED = (b"forwarded", b"x-forwarded-", b"x-real-ip", b"x-original-", b"x-direct-url", b"x-gradio-")
_PORTS = {"http": 80, "https": 443}


class Guard:
    """ASGI app that wraps another one.

    Args:
        app: the page.
        origins: the addresses of the page: scheme, host and port, such as "http://127.0.0.1:7870".
        uploads: the folder for the page's files.
        signin: the password, if there is one.
        own_address: also accept the IP address at which a connection came in. This is safe if the server listens on
            all addresses, since a host name that points to this machine is still refused.
    """

    def __init__(
        self,
        app: App,
        *,
        origins: Iterable[str],
        uploads: Path,
        signin: SignIn | None = None,
        own_address: bool = False,
    ) -> None:
        self._app, self._uploads, self._signin, self._own = app, str(uploads), signin, own_address
        self._schemes: dict[str, list[str]] = {}
        for origin in origins:
            scheme, host = _split(origin)
            self._schemes.setdefault(host, []).append(scheme)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        try:
            receive = await self._let_in(scope, receive)
        except Refusal as no:
            more = [(b"www-authenticate", REALM)] if no.status == 401 else []
            more += [(b"allow", ", ".join(METHODS).encode())] if no.status == 405 else []
            return await refuse(send, no.status, no.why, more=more)
        await self._app(scope, receive, HeaderSender(send, scope["path"]))

    async def _let_in(self, scope: Scope, receive: Receive) -> Receive:
        """Check everything, from the cheapest test to the body, which must be read."""
        schemes = self._host(scope)
        self._password(scope)
        if scope["method"] not in METHODS:
            raise Refusal(405, "this method is not used by the page")
        if _one(scope, b"upgrade") is not None:
            raise Refusal(403, "web sockets are not supported")
        self._origin(scope, schemes)
        _site(scope)
        row = routes.route(scope["method"], scope["path"], scope["query_string"])
        if row is None:
            raise Refusal(403, "the page makes no such request")
        file = routes.file_path(scope["path"])
        if file is not None and not routes.is_kept(file, self._uploads):
            raise Refusal(403, "only files that this server created or received are served")
        scope["scheme"] = schemes[0]
        scope["headers"] = [
            (name, value)
            for name, value in scope["headers"]
            if not name.startswith(_DROPPED) and not (name == b"accept-encoding" and scope["path"] == "/")
        ]
        if not _has_body(scope, row):
            return receive
        if row.media == routes.MULTIPART:
            request_body.require_space(self._uploads, int(_one(scope, b"content-length") or 0))
        return await request_body.read(receive, row.media, self._uploads)

    def _host(self, scope: Scope) -> list[str]:
        """Return the URL schemes of the name that a request is addressed to."""
        host = _one(scope, b"host")
        name = _named("http", host) if host is not None else None
        if name is not None and name in self._schemes:
            return self._schemes[name]
        if name is not None and self._own and scope.get("server") and name == _address(*scope["server"][:2]):
            return ["http"]
        raise Refusal(403, "the Host header is not a name of this server; `sdquant ui --allow-host NAME` adds one")

    def _password(self, scope: Scope) -> None:
        if self._signin is None:
            return
        client = str((scope.get("client") or ("", 0))[0])
        seconds = self._signin.wait(client)
        if seconds:
            raise Refusal(429, f"too many wrong passwords, try again in {int(seconds) + 1} s")
        if not self._signin.lets_in(client, _one(scope, b"authorization")):
            raise Refusal(401, "a user name and password are needed")

    def _origin(self, scope: Scope, schemes: list[str]) -> None:
        """Check that a request with an Origin header was sent by the page that is served under the same name."""
        origins = [value for name, value in scope["headers"] if name == b"origin"]
        if not origins:
            return
        host = _named("http", _one(scope, b"host") or "")
        scheme, name = _split(origins[0].decode("latin-1")) if len(origins) == 1 else ("", "")
        if scheme not in schemes or name != host:
            raise Refusal(403, "the request was sent by a page from elsewhere")


def _site(scope: Scope) -> None:
    """Check Sec-Fetch-Site, the sender's relation to this server: other sites may only link to the page."""
    site = _one(scope, b"sec-fetch-site")
    if site in (None, "same-origin", "none"):
        return
    opens = scope["method"] == "GET" and scope["path"] == "/"
    opens = opens and _one(scope, b"sec-fetch-mode") == "navigate" and _one(scope, b"sec-fetch-dest") == "document"
    if not opens or site not in ("cross-site", "same-site"):
        raise Refusal(403, "the request was sent by a page from elsewhere")


def _has_body(scope: Scope, row: routes.Route) -> bool:
    """Return whether there is a body to read; it must be of the route's type and of a sensible length."""
    length = _one(scope, b"content-length")
    if not row.media:
        if length not in (None, "0") or _one(scope, b"transfer-encoding") is not None:
            raise Refusal(403, "a read request must have no body")
        return False
    if length is not None and (len(length) > 9 or int(length) > request_body.most(row.media)):
        raise Refusal(413, f"the body is larger than {request_body.most(row.media) >> 20} MiB")
    if row.media == routes.MULTIPART and (length is None or _one(scope, b"transfer-encoding") is not None):
        raise Refusal(411, "an upload must say how long it is")  # in chunks it is as long as it likes, whatever it says
    if (_one(scope, b"content-type") or "").partition(";")[0].strip().lower() != row.media:
        raise Refusal(403, f"the body must be {row.media}, which pages from other sites cannot send unasked")
    return True


def _one(scope: Scope, name: bytes) -> str | None:
    """Return the value of a header; None if it is missing. A header that occurs twice is refused."""
    values = [value for key, value in scope["headers"] if key == name]
    if len(values) > 1:
        raise Refusal(403, "a header occurs twice")
    return values[0].decode("latin-1") if values else None


def _split(origin: str) -> tuple[str, str]:
    """Split an origin into scheme and host:port; ("", "") if it is not valid."""
    scheme, mark, rest = origin.partition("://")
    name = _named(scheme, rest) if mark and scheme in _PORTS else None
    return (scheme, name) if name is not None else ("", "")


def _named(scheme: str, host: str) -> str | None:
    """Return host:port in lower case, without the scheme's default port; None if it is not valid."""
    try:
        parts = urlsplit(f"{scheme}://{host}")
        name, port = parts.hostname, parts.port
    except ValueError:
        return None
    if name is None or parts.netloc != host or "@" in host:
        return None
    whole = f"[{name}]" if ":" in name else name
    return whole if port is None or port == _PORTS[scheme] else f"{whole}:{port}"


def _address(host: str, port: int) -> str | None:
    """Return host:port of an address. A socket that listens on all has IPv4 addresses in IPv6 notation."""
    host = host.removeprefix("::ffff:") if "." in host else host
    return _named("http", f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
