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
_SHOW = """(answer, model, base) => {
    const [ofModel, ofBase, html] = answer ? JSON.parse(answer) : [];
    if (ofModel === model && JSON.stringify(ofBase ?? []) === JSON.stringify(base ?? [])) return html;
    const note = document.createElement("p");
    note.className = "sq-note";
    note.textContent = LOOKING.replace("{}", model ?? "the model");
    return note.outerHTML;
}""".replace("LOOKING", json.dumps(LOOKING))


def add_answer(name: str) -> gr.Textbox:
    """Create the unseen widget that takes an answer."""
    return gr.Textbox("", label="Answer", max_lines=1, elem_id=name, elem_classes="sq-unseen")


def answer_of(model: object, base: object, html: str) -> str:
    """Return an answer for `add_answer`'s widget."""
    return json.dumps([model, base, html])


def show(events: Sequence[Any], answer: gr.Textbox, where: Sequence[Any], box: gr.HTML) -> None:
    """Show in `box` after each of these events the answer if it is of the model in `where`, else that it is looking.

    What the box has depends on these values alone, not on the order in which Gradio sends events.
    """
    values, changes = [answer, *where], [one.change for one in where]
    gr.on(changes, None, values, box, js=_SHOW, **QUIET)
    for event in events:
        event.then(None, values, box, js=_SHOW, **QUIET)
