"""The password of a page that is served to other machines: HTTP Basic, required before anything else is answered.

Gradio's own sign-in protects only some of its routes, counts no attempts, and needs a form that posts a type of body
that this server refuses. Basic is one header, which works for every route and in every browser.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

REALM = b'Basic realm="sdquant", charset="UTF-8"'
FREE = 5  # wrong passwords before one has to wait
LONGEST = 60.0  # seconds of waiting
REMEMBERED = 4096  # addresses


@dataclass
class _Tries:
    wrong: int = 0
    until: float = 0.0


class SignIn:
    """Checks the credentials of requests.

    Args:
        user, password: the credentials to require.
        clock: returns seconds, from any start.
    """

    def __init__(self, user: str, password: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._credentials = f"{user}:{password}".encode()
        self._clock = clock
        self._tries: OrderedDict[str, _Tries] = OrderedDict()

    def wait(self, client: str) -> float:
        """Return for how many seconds an address is refused, even with the right password, to stop parallel guesses."""
        tries = self._tries.get(client)
        return max(0.0, tries.until - self._clock()) if tries else 0.0

    def lets_in(self, client: str, header: str | None) -> bool:
        """Return whether an `Authorization` header is correct. Each wrong one makes the address wait longer."""
        credentials = _decoded(header)
        if credentials is None:
            return False  # a browser asks without one first
        if hmac.compare_digest(credentials, self._credentials):
            self._tries.pop(client, None)
            return True
        tries = self._tries.setdefault(client, _Tries())
        self._tries.move_to_end(client)
        tries.wrong += 1
        if tries.wrong >= FREE:
            tries.until = self._clock() + min(LONGEST, 2.0 ** (tries.wrong - FREE))
        while len(self._tries) > REMEMBERED:
            self._tries.popitem(last=False)
        return False


def _decoded(header: str | None) -> bytes | None:
    """Decode user:password from a header; None if it has none."""
    kind, _, value = (header or "").partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        return base64.b64decode(value.strip(), validate=True)
    except (binascii.Error, ValueError):
        return None
