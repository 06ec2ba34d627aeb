"""Serving: where, with what password, how it ends, and what is left behind."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from sdquant import cli
from sdquant.errors import SettingsError
from sdquant.ui.server import serve as module
from sdquant.ui.server.serve import serve as serve_page
from sdquant.utils.install import install_extra

from ..patience import PATIENCE
from .conftest import SECRET
from .wire import click, request

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Served, Start

pytestmark = pytest.mark.xdist_group("ui")
slow = pytest.mark.slow


def _never() -> Any:
    raise AssertionError("the page was built")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_other_machines_need_a_password(host: str) -> None:
    with pytest.raises(SettingsError, match="no password is set"):
        serve_page(_never, host=host, open_browser=False)


@pytest.mark.parametrize("name", ["gpu.example", "https://gpu.example", "10.0.0.5:80", "localhost.example"])
def test_a_proxy_for_other_machines_needs_one_too(name: str) -> None:
    with pytest.raises(SettingsError, match="no password is set"):
        serve_page(_never, hosts=[name], open_browser=False)


@pytest.mark.parametrize("name", ["localhost:9000", "http://127.0.0.1:9000", "[::1]:80", "a.localhost"])
def test_the_end_of_a_tunnel_does_not(name: str) -> None:
    with pytest.raises(AssertionError, match="the page was built"):
        serve_page(_never, hosts=[name], port=0, open_browser=False)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"host": "no.such.name.invalid"}, "not a known address or host name"),
        ({"host": "a" * 300}, "not a known address or host name"),
        ({"port": 70000}, "cannot be opened"),
        ({"password": "short"}, "fewer than 8"),
        ({"hosts": ["*"]}, "not of the form NAME"),
        ({"hosts": ["http://h/path"]}, "not of the form NAME"),
        ({"hosts": ["h:99999"]}, "not of the form NAME"),
        ({"hosts": ["ftp://h"]}, "not of the form NAME"),
        ({"host": "192.0.2.1", "password": "long enough"}, "cannot be opened"),  # an address of no machine
    ],
    ids=str,
)
def test_what_cannot_be_served_is_said_before_the_page_is_built(how: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        serve_page(_never, open_browser=False, **how)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SettingsError, match="cannot be opened"):
        serve_page(_never, port=taken.getsockname()[1], open_browser=False)


def test_the_next_free_port_where_none_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        monkeypatch.setattr(module, "PORT", first)
        sock = stack.enter_context(module._bound("127.0.0.1", socket.AF_INET, None))
        assert first < sock.getsockname()[1] < first + module.TRIED


def test_names_and_where_they_lead() -> None:
    origins = [list(module._origins(*module._name(name), 7870)) for name in ("GPU.example", "h:80", "https://h")]
    assert origins == [["http://gpu.example", "http://gpu.example:7870"], ["http://h:80"], ["https://h"]]


def test_gradio_sees_nothing_of_the_users_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_SHARE", "True")
    monkeypatch.setenv("GRADIO_TEMP_DIR", "/elsewhere")
    with module._environment(tmp_path):
        assert "GRADIO_SHARE" not in os.environ
        assert os.environ["GRADIO_TEMP_DIR"] == str(tmp_path)
        assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"
    assert os.environ["GRADIO_SHARE"] == "True"
    assert os.environ["GRADIO_TEMP_DIR"] == "/elsewhere"
    assert "GRADIO_ANALYTICS_ENABLED" not in os.environ


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SDQUANT_UI_PASSWORD", raising=False)
    assert cli.main(["ui", "--models", "nowhere"]) == 2
    assert "Cannot use nowhere as a folder of models" in capsys.readouterr().err
    assert cli.main(["ui", "--host", "0.0.0.0", "--no-browser"]) == 2
    assert "SDQUANT_UI_PASSWORD" in capsys.readouterr().err


def test_without_gradio_the_command_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = __import__("importlib.util").util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "gradio" else found(name, *rest)
    )
    assert cli.main(["ui"]) == 2
    assert install_extra("ui") in capsys.readouterr().err


def test_what_imports_nothing() -> None:
    code = (
        "import sys, sdquant.ui.model_folders, sdquant.ui.server.guard, sdquant.ui.server.serve\n"
        "import sdquant.ui.html_components, sdquant.cli.commands.ui\n"
        "print(sorted({'torch', 'gradio', 'diffusers', 'fastapi', 'uvicorn'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def _ends(served: Served, number: int, code: int, *headers: tuple[str, str]) -> None:
    """End a server by a signal while a page is open and a function of it is at work, which would sleep a minute."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    with socket.create_connection(("127.0.0.1", served.port)) as page:
        head = f"GET /gradio_api/heartbeat/h HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\n{lines}\r\n"
        page.sendall(head.encode())
        assert page.recv(1000).startswith(b"HTTP/1.1 200")
        body = b'{"data": [], "fn_index": 3, "session_hash": "h"}'
        kind = ("Content-Type", "application/json")
        assert request(served.port, "POST", "/gradio_api/queue/join", (kind, *headers), body).status == 200
        assert served.end(number) == code
    assert list(served.temporary.iterdir()) == []
    assert "Traceback" not in served.log.read_text()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", served.port))


def test_a_password_guards_everything_and_ctrl_c_ends_it_all(serve: Start) -> None:
    served = serve("--user", "me", env={"SDQUANT_UI_PASSWORD": "correct horse"})
    for target in ("/", "/theme.css", "/gradio_api/app_id", "/gradio_api/heartbeat/h", "/nothing", "/favicon.ico"):
        reply = request(served.port, "GET", target)
        assert (reply.status, reply.headers["www-authenticate"][:5]) == (401, "Basic")
    right = ("Authorization", "Basic " + base64.b64encode(b"me:correct horse").decode())
    assert request(served.port, "GET", "/", (right,)).status == 200
    _ends(served, signal.SIGINT, 130, right)


@slow
def test_sigterm_ends_it_too(serve: Start) -> None:
    _ends(serve(), signal.SIGTERM, 143)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=slow)])
def test_a_job_inside_torch_ends_with_the_server(serve: Start, number: int, code: int) -> None:
    """Python would end its thread there, which C++ takes for an error, and aborts."""
    served = serve(module=("tests.ui.stubborn_page",), env={"OMP_NUM_THREADS": "1"})
    body, kind = b'{"data": [], "fn_index": 0, "session_hash": "h"}', ("Content-Type", "application/json")
    before = set(served.models.iterdir())
    assert request(served.port, "POST", "/gradio_api/queue/join", (kind,), body).status == 200
    until = time.monotonic() + PATIENCE
    while not (new := set(served.models.iterdir()) - before) and time.monotonic() < until:
        time.sleep(0.05)
    assert new
    assert served.end(number) == code
    assert set(served.models.iterdir()) == before
    assert list(served.temporary.iterdir()) == []
    said = "interrupted" if number == signal.SIGINT else "terminated"
    assert served.log.read_text().splitlines()[1:] == [f"sdquant: {said}"]


def test_gradio_itself_checks_files_too(tmp_path: Path) -> None:
    """Behind the guard: a mounted page would copy any file of the machine, if it were not marked as launched."""
    (tmp_path / "secret").write_text(SECRET)
    code = f"""
import asyncio, json, sys
from pathlib import Path
from sdquant.utils.temp_dirs import temporary_folder
from sdquant.ui.server import serve
from tests.ui import small_page
with temporary_folder("sdquant-ui-") as folder, serve._environment(folder):
    from sdquant.ui.model_folders import Roots
    page = small_page.build(Roots(), Path("none"))
    app = serve._mounted(page, {{}})
    import httpx
    async def ask():
        value = {{"path": {str(tmp_path / "secret")!r}, "meta": {{"_type": "gradio.FileData"}}}}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://h") as client:
            for mark in (True, False):
                page.has_launched = mark
                answer = await client.post("/gradio_api/run/size", json={{"data": [value]}})
                print(answer.status_code, answer.text)
    asyncio.run(ask())
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    checked, unchecked = ran.stdout.splitlines()
    assert checked.startswith("500 ")
    assert f'"{len(SECRET)}"' in unchecked  # what it would do: its size shows that the file was read


def test_the_page_of_the_fixture_answers(server: Served) -> None:
    assert b"<p>digits-sd/unet</p>" in click(server.port, 0, "digits-sd/unet", session="answers").raw
