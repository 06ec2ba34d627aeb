"""Tasks that are under way on each tab; a page that was reloaded or opened again takes them up, with their Cancel."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import gradio as gr

from .app_state import waiter
from .background_task import Visitor, follow_again
from .events import QUIET

if TYPE_CHECKING:
    from .app_state import Desk

TABS = ("generate", "settings", "inspect", "compare", "convert")  # by the ids of the page's tabs
_WHO = re.compile(r"([0-9a-f]{32}) ([0-9a-f]{32})")

# Who looks: names that nobody can guess, of the browser and of its window or tab. A reload changes neither.
_NAMES = """() => {
    const bytes = () => [...crypto.getRandomValues(new Uint8Array(16))];
    const fresh = () => bytes().map(byte => byte.toString(16).padStart(2, "0")).join("");
    const kept = place => {
        try {
            const name = window[place].getItem("sdquant") ?? fresh();
            window[place].setItem("sdquant", name);
            return name;
        } catch {  // a browser that keeps nothing
            return fresh();
        }
    };
    return `${kept("localStorage")} ${kept("sessionStorage")}`;
}"""


class UnderWay:
    """A mark for each tab, which changes on a page that finds something under way there."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._marks = {tab: gr.State(0) for tab in TABS}
        self._who = gr.Textbox("", label="Visitor", elem_id="visitor", elem_classes="sq-unseen", max_length=100)

    def show(self, tab: str, outputs: Sequence[Any]) -> None:
        """Show in `outputs` of a tab what its task shows."""

        def again(request: gr.Request) -> Iterator[tuple[Any, ...]]:
            page = waiter(request.session_hash, tab)
            task = self._desk.tasks.followed(page)
            if task is None:
                yield tuple(gr.skip() for _ in outputs)
            else:
                yield from follow_again(self._desk.tasks, page, task)

        self._marks[tab].change(again, None, list(outputs), concurrency_limit=None, **QUIET)

    def wire(self, page: gr.Blocks, tabs: gr.Tabs, current: gr.State) -> None:
        """Look for what is under way when the page is opened, and open its tab. current: its name, which Gradio says of
        clicks only."""

        def arrived(who: object, request: gr.Request) -> tuple[Any, ...]:
            names = _WHO.fullmatch(who) if isinstance(who, str) else None
            if names is None:
                return tuple(gr.skip() for _ in (tabs, current, *TABS))
            visitor = Visitor(browser=names[1], window=names[2])
            tasks = self._desk.tasks.arrive(str(request.session_hash), visitor, TABS)
            running = next((tab for tab, task in tasks.items() if task.done is None), None)
            shown = (gr.Tabs(selected=running), running.capitalize()) if running is not None else (gr.skip(), gr.skip())
            return *shown, *(1 if name in tasks else gr.skip() for name in TABS)

        def left(request: gr.Request) -> None:
            self._desk.tasks.forget(str(request.session_hash))

        page.load(arrived, self._who, [tabs, current, *self._marks.values()], js=_NAMES, **QUIET)
        page.unload(left)
