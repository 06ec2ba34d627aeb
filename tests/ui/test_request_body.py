"""Bodies that come too slowly: an upload is given up that would hold its place for ever."""

from __future__ import annotations

import asyncio

import pytest

from sdquant.ui.server import request_body
from sdquant.ui.server.routes import MULTIPART


@pytest.mark.parametrize(("part", "ends"), [(b"x", True), (b"x" * 4096, False)])
def test_a_trickle(monkeypatch: pytest.MonkeyPatch, part: bytes, ends: bool) -> None:
    """A byte now and then is given up after SECONDS in all; a slow line that goes on is not."""
    monkeypatch.setattr(request_body, "SECONDS", 0.5)

    async def sender() -> request_body.Message:
        await asyncio.sleep(0.05)
        return {"type": "http.request", "body": part, "more_body": True}

    async def upload() -> list[str]:
        receive = await request_body.read(sender, MULTIPART, "")
        return [str((await receive())["type"]) for _ in range(16)]

    assert ("http.disconnect" in asyncio.run(upload())) is ends
