"""The password, where the page is served to other machines: HTTP Basic, asked for before anything else is answered.

Gradio's own sign-in guards some of its routes and not others, counts no attempts, and needs a form that posts what this
server refuses to take. Basic is one header, which every route needs and every browser knows.
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
    """Who may use the page.

    Args:
        user, password: what must be given.
        clock: seconds, from any start.
    """

    def __init__(self, user: str, password: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._wanted = f"{user}:{password}".encode()
        self._clock = clock
        self._tries: OrderedDict[str, _Tries] = OrderedDict()

    def wait(self, client: str) -> float:
        """Seconds for which an address is not heard, right password or not; otherwise trying many at once would pay."""
        tries = self._tries.get(client)
        return max(0.0, tries.until - self._clock()) if tries else 0.0

    def lets_in(self, client: str, header: str | None) -> bool:
        """Whether an `Authorization` header is right. Each wrong one of an address makes the next wait longer."""
        given = _decoded(header)
        if given is None:
            return False  # a browser asks without one first
        if hmac.compare_digest(given, self._wanted):
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
    """user:password out of a header, None if it has none."""
    kind, _, value = (header or "").partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        return base64.b64decode(value.strip(), validate=True)
    except (binascii.Error, ValueError):
        return None
