"""The events of a running page as its script would send them, with any values: no browser, no checks on this side."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

from .wire import Reply, request

_CONFIG = re.compile(rb"gradio_config\s*=\s*(\{.*?\});?\s*</script>", re.DOTALL)
_POST = (("Content-Type", "application/json"), ("Origin", "http://127.0.0.1:{port}"))
_SESSIONS = count()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of an event.

    Attributes:
        status: of the request that sent it. raw: all bytes that came back, of the request and of the stream.
        done: the last message of the stream, empty where the event was not taken.
        values: of the outputs by the ids of their elements, where the event came to its end.
    """

    status: int
    raw: bytes
    done: dict[str, Any]
    values: dict[str, Any]

    @property
    def success(self) -> bool:
        """Whether the event came to its end."""
        return bool(self.done.get("success"))

    @property
    def shown(self) -> str:
        """All texts that the page would show, in one."""
        return json.dumps(self.done, ensure_ascii=False)


class Events:
    """The events of the page at a port, and the values that its widgets have when it is opened."""

    def __init__(self, port: int) -> None:
        self.port = port

    @cached_property
    def config(self) -> dict[str, Any]:
        """What Gradio writes into the page: its components and events."""
        found = _CONFIG.search(request(self.port, "GET", "/").body)
        assert found is not None
        config: dict[str, Any] = json.loads(found[1])
        return config

    @cached_property
    def _components(self) -> dict[int, dict[str, Any]]:
        return {row["id"]: row for row in self.config["components"]}

    def number(self, element: str, event: str = "click", *others: str) -> int:
        """The number of an event of an element, by ids in the page: the first that others are read or changed by."""
        for row in self.config["dependencies"]:
            touched = set(map(self._element, row["inputs"] + row["outputs"]))
            if row["backend_fn"] and set(others) <= touched and (element, event) in self._origins(row):
                return int(row["id"])
        raise LookupError((element, event, *others))

    def _origins(self, row: dict[str, Any]) -> set[tuple[str, str]]:
        """Which events of elements begin one of the page's, or the one that it comes after."""
        while row["trigger_after"] is not None:
            row = self.config["dependencies"][row["trigger_after"]]
        return {(self._element(target), name) for target, name in row["targets"]}

    def values(self, number: int, changed: dict[str, Any] | None = None) -> list[Any]:
        """The values of an event's inputs, with those of some elements changed."""
        inputs = [self._components[one] for one in self.config["dependencies"][number]["inputs"]]
        changed = dict(changed or {})
        given = [changed.pop(self._element(row["id"]), row["props"].get("value")) for row in inputs]
        assert not changed, changed
        return given

    def send(self, number: object, data: object, **more: object) -> Answer:
        """Send an event, and read what comes of it to the end of the stream."""
        session = f"events{next(_SESSIONS)}"
        body = {"data": data, "fn_index": number, "session_hash": session, **more}
        joined = request(self.port, "POST", "/gradio_api/queue/join", _POST, json.dumps(body).encode())
        if joined.status != 200:
            return Answer(status=joined.status, raw=joined.raw, done={}, values={})
        stream = request(self.port, "GET", f"/gradio_api/queue/data?session_hash={session}")
        return self._read(joined, stream, number)

    def fire(self, element: str, event: str = "click", /, **changed: Any) -> Answer:
        """Send the event of an element with the page's own values, but for some; `_` for `-` in the ids."""
        number = self.number(element, event)
        return self.send(number, self.values(number, {key.replace("_", "-"): one for key, one in changed.items()}))

    def _read(self, joined: Reply, stream: Reply, number: object) -> Answer:
        lines = [line[6:] for line in stream.body.splitlines() if line.startswith(b"data: ")]
        ended = [one for one in map(json.loads, lines) if one["msg"] == "process_completed"]
        done = ended[-1] if ended else {}
        values = {}
        if done.get("success") and isinstance(number, int):
            outputs = self.config["dependencies"][number]["outputs"]
            values = {
                self._element(one): value for one, value in zip(outputs, done["output"].get("data", []), strict=False)
            }
        return Answer(status=joined.status, raw=joined.raw + stream.raw, done=done, values=values)

    def _element(self, number: int) -> str:
        return str(self._components.get(number, {"props": {}})["props"].get("elem_id") or number)
