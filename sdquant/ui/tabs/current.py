"""Shows what was found out about the chosen model, and nothing of another one.

To look at a model takes seconds. An answer names the model that it is of, and the page shows it only while that one is
chosen; until then it says that it is looking.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import gradio as gr

from ..events import QUIET

LOOKING = "Looking at {} …"
_SHOW = """(answer, ...now) => {
    const [of, html] = answer ? JSON.parse(answer) : [];
    if (of && JSON.stringify(of.map(one => one ?? [])) === JSON.stringify(now.map(one => one ?? []))) return html;
    const note = document.createElement("p");
    note.className = "sq-note";
    note.textContent = LOOKING.replace("{}", now[0] ?? "the model");
    return note.outerHTML;
}""".replace("LOOKING", json.dumps(LOOKING))


def add_answer(name: str) -> gr.Textbox:
    """Create the unseen widget that takes an answer."""
    return gr.Textbox("", label="Answer", max_lines=1, elem_id=name, elem_classes="sq-unseen")


def answer_of(where: Sequence[object], html: str) -> str:
    """Return an answer for `add_answer`'s widget. where: the values of the widgets that `show` is given."""
    return json.dumps([where, html])


def show(events: Sequence[Any], answer: gr.Textbox, where: Sequence[Any], box: gr.HTML) -> None:
    """Show in `box` after each of these events the answer if it is of what is in `where`, else that it is looking.

    Args:
        where: model, base, and what else the answer depends on that is quickly chosen.

    What the box has depends on these values alone, not on the order in which Gradio sends events.
    """
    values, changes = [answer, *where], [one.change for one in where]
    gr.on(changes, None, values, box, js=_SHOW, **QUIET)
    for event in events:
        event.then(None, values, box, js=_SHOW, **QUIET)
