"""Serves the page: a socket, the guard around Gradio, a folder for its files, and a clean shutdown."""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import logging
import os
import re
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import BackendUnavailableError, SettingsError
from ...utils.atomic_write import abandon
from ...utils.install import install_extra
from ...utils.signals import handled
from ...utils.temp_dirs import temporary_folder
from .basic_auth import SignIn
from .guard import Guard
from .request_body import MAX_UPLOAD
from .upload_parser import whole_uploads

if TYPE_CHECKING:
    from types import FrameType

PORT = 7870  # the first that is tried where none was named
TRIED = 20
USER = "sdquant"
SHORTEST = 8  # characters of a password
GRACE = 1  # seconds that open streams get at the end

_ALLOWED = re.compile(
    r"(?:(?P<scheme>https?)://)?(?P<name>[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9a-fA-F:]+\])(?::(?P<port>\d{1,5}))?"
)
_EVERY = ("0.0.0.0", "::")


def serve(
    build: Callable[[], Any],
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    hosts: Iterable[str] = (),
    user: str | None = None,
    password: str | None = None,
    open_browser: bool = True,
    look: Callable[[], Mapping[str, Any]] = dict,
    ready: Callable[[], None] | None = None,
    stop: Callable[[], None] | None = None,
    wait: Callable[[float], None] | None = None,
    patience: float | None = None,
) -> None:
    """Serve a page until Ctrl-C or SIGTERM, which is raised again after the cleanup.

    Args:
        build: creates the page, a `gradio.Blocks`; called when the port is open.
        host: the address to listen at. Any other than this machine's own needs a password.
        port: None for the first free one from PORT on, 0 for any.
        hosts: further names of the page: NAME, NAME:PORT, or https://NAME behind a proxy with TLS. Any other than this
            machine's own needs a password, too.
        user, password: the credentials that a browser must send; user is "sdquant" if None.
        look: returns what Gradio takes in addition to the page: theme, css, js, head.
        ready: called in a thread of its own when the page is there, for what it needs next.
        stop: called when the shutdown begins, to end jobs in other threads.
        wait: waits for these jobs, for so many seconds at the most.
        patience: seconds that other threads get to end by themselves after a signal, before the process exits; None to
            wait for them, as Python does.

    Raises:
        SettingsError: the address, port, name or password cannot be used. Nothing has been opened then.
        BackendUnavailableError: gradio is missing.
    """
    address, family = _address(host)
    if password is not None and len(password) < SHORTEST:
        raise SettingsError(
            "Cannot serve the page with this password",
            f"it has fewer than {SHORTEST} characters",
            "Choose a longer one",
        )
    local = ipaddress.ip_address(address).is_loopback
    names = [_name(text) for text in hosts]
    beyond = [host] if not local else [name for _, name in names if not _is_local(name)]
    if beyond and password is None:
        raise SettingsError(
            f"Cannot serve the page as {beyond[0]}",
            "other machines could then use it, and no password is set",
            "Set SDQUANT_UI_PASSWORD, or leave --host and --allow-host out to serve this machine only",
        )
    gradio_is_there()
    end = _End()
    if patience is not None:
        atexit.register(end)  # before all that other libraries register: the last is called first
    with (
        _bound(address, family, port) as sock,
        temporary_folder("sdquant-ui-") as uploads,
        _environment(uploads),
        whole_uploads(),
    ):
        at = int(sock.getsockname()[1])
        origins = [f"http://{name}:{at}" for name in ("127.0.0.1", "localhost", "[::1]") if local or address in _EVERY]
        origins += [] if address in _EVERY else [f"http://{_bracketed(name)}:{at}" for name in (address, host)]
        origins += [origin for scheme, name in names for origin in _origins(scheme, name, at)]
        guard = Guard(
            _mounted(build(), look()),
            origins=origins,
            uploads=uploads,
            signin=SignIn(user or USER, password) if password is not None else None,
            own_address=address in _EVERY,
        )
        server = _server(guard, stop, lambda: _announce(host, at, secret=not local, browser=open_browser, ready=ready))
        server.run(sockets=[sock])
    if server.ended_by is not None:
        if patience is not None:
            end.code = 128 + server.ended_by
            if wait is not None:
                wait(patience)
            _leave_after(patience, end.code)
        signal.raise_signal(server.ended_by)


def gradio_is_there() -> None:
    """Raise BackendUnavailableError if gradio is not installed. Imports nothing."""
    from importlib.util import find_spec

    if find_spec("gradio") is None:
        raise BackendUnavailableError(
            "Cannot serve the page", "it needs gradio, which is not installed", f"Run: {install_extra('ui')}"
        )


def _address(host: str) -> tuple[str, socket.AddressFamily]:
    """Resolve a host name to an address and its family."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SettingsError(
            f"Cannot serve the page at {host[:80]!r}",
            "it is not a known address or host name",
            "Use an address of this machine, such as 127.0.0.1",
        ) from error
    family, *_, place = min(addresses, key=lambda row: row[0] != socket.AF_INET)
    return str(place[0]).partition("%")[0], family


def _name(text: str) -> tuple[str | None, str]:
    """Parse a further name into scheme and name[:port]."""
    match = _ALLOWED.fullmatch(text)
    if match is None or int(match["port"] or 0) > 65535:
        raise SettingsError(
            f"Cannot use {text[:80]!r} as a name of the page",
            "it is not of the form NAME, NAME:PORT or https://NAME",
            "Use the name shown in the browser's address bar",
        )
    port = f":{match['port']}" if match["port"] else ""
    return match["scheme"], f"{match['name'].lower()}{port}"


def _is_local(name: str) -> bool:
    """Return whether name[:port] always means this machine itself."""
    bare = re.sub(r":\d+$", "", name).strip("[]")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(bare).is_loopback
    return bare == "localhost" or bare.endswith(".localhost")


def _origins(scheme: str | None, name: str, port: int) -> Iterator[str]:
    """Yield the origins of a further name; without scheme and port, also the one with this server's port."""
    yield f"{scheme or 'http'}://{name}"
    if scheme is None and not re.search(r":\d+$", name):
        yield f"http://{name}:{port}"


def _bracketed(name: str) -> str:
    return f"[{name}]" if ":" in name else name


@contextlib.contextmanager
def _bound(address: str, family: socket.AddressFamily, port: int | None) -> Iterator[socket.socket]:
    """Open a listening socket: browsers that connect before the page is built wait instead of being refused."""
    tried = range(PORT, PORT + TRIED) if port is None else (port,)
    for number in tried:
        sock = socket.socket(family, socket.SOCK_STREAM)
        # So that a port is free at once after the last server has ended; on Windows it would mean sharing it.
        option = socket.SO_REUSEADDR if os.name == "posix" else getattr(socket, "SO_EXCLUSIVEADDRUSE", 0)
        sock.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            sock.bind((address, number))
            sock.listen(128)
        except (OSError, OverflowError) as error:
            sock.close()
            why = getattr(error, "strerror", None) or str(error)
            last = error
            continue
        with contextlib.closing(sock):
            yield sock
        return
    where = f"port {port}" if port is not None else f"a port from {PORT} to {PORT + TRIED - 1}"
    raise SettingsError(
        f"Cannot serve the page at {address}, {where}",
        f"it cannot be opened: {why}",
        "Choose another with --port, or stop the program that uses it",
    ) from last


@contextlib.contextmanager
def _environment(uploads: Path) -> Iterator[None]:
    """Set Gradio's environment variables while it runs: no analytics, and its files in the folder.

    Those that the user set for other Gradio apps (a share link, readable paths, a root path) are removed meanwhile.
    """
    before = {name: value for name, value in os.environ.items() if name.startswith("GRADIO_")}
    for name in before:
        del os.environ[name]
    drawing = os.environ.get("MPLBACKEND")
    os.environ.setdefault("MPLBACKEND", "agg")  # else Gradio has matplotlib find one at each click: 0.7 s for the first
    os.environ.update(
        GRADIO_ANALYTICS_ENABLED="False",
        GRADIO_TEMP_DIR=str(uploads),
        GRADIO_EXAMPLES_CACHE=str(uploads / "examples"),
    )
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("GRADIO_")]:
            del os.environ[name]
        os.environ.update(before)
        if drawing is None:
            os.environ.pop("MPLBACKEND", None)


def _mounted(blocks: Any, look: Mapping[str, Any]) -> Any:
    """Create the ASGI app of a page, with all features off that it does not need."""
    import fastapi
    import gradio

    app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    gradio.mount_gradio_app(
        app,
        blocks,
        path="/",
        footer_links=[],
        run_history=False,
        show_error=False,  # what is meant for the user is raised as gradio.Error, which is shown all the same
        max_file_size=f"{MAX_UPLOAD >> 20}mb",
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        **look,
    )
    # Gradio looks at where a file lies only in pages that it launched itself; in a mounted one a request could have any
    # file of the machine copied to where it can be downloaded.
    blocks.has_launched = True
    blocks.api_open = False  # what belongs into the queue cannot be run past it
    return app


def _server(app: Guard, stop: Callable[[], None] | None, announce: Callable[[], None]) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        """Server that ends on a signal without raising it again, so that there is time for the cleanup."""

        ended_by: int | None = None

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            announce()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            if stop is not None:
                stop()
            await super().shutdown(sockets=sockets)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            with handled(self.handle_exit):
                yield

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            self.ended_by = sig
            super().handle_exit(sig, frame)

    return Server(
        uvicorn.Config(
            app,
            lifespan="on",
            ws="none",
            proxy_headers=False,  # who sent a request is what the connection says
            server_header=False,
            access_log=False,
            log_level="critical",
            limit_concurrency=256,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=GRACE,
        )
    )


class _End:
    """Called at the end of Python, exits at once if a thread is still at work.

    Python ends a daemon thread as soon as it asks for the interpreter, and if that is inside of torch, C++ aborts.
    """

    code: int | None = None  # of the process that a signal ended

    def __call__(self) -> None:
        if self.code is not None and threading.active_count() > 1:
            _leave(self.code)


def _leave_after(seconds: float, code: int) -> None:
    """Exit after a while: Python waits for threads at its end, and a job that draws stops only at its next step."""
    timer = threading.Timer(seconds, _leave, (code,))
    timer.daemon = True
    timer.start()


def _leave(code: int) -> None:
    """Exit at once. What other threads are writing goes, and what they say of that is no news."""
    logging.disable()
    abandon()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _announce(host: str, port: int, *, secret: bool, browser: bool, ready: Callable[[], None] | None) -> None:
    shown = "127.0.0.1" if host in _EVERY else _bracketed(host)
    url = f"http://{shown}:{port}"
    print(f"sdquant ui: {url}  (Ctrl-C ends it)", flush=True)
    if secret:
        print(
            "sdquant ui: warning: the password travels as plain text; put a proxy with TLS in front of it, or use a "
            "network that you trust",
            file=sys.stderr,
            flush=True,
        )
    if browser:
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    if ready is not None:
        threading.Thread(target=ready, name="sdquant-ready").start()
