"""Shows what was found out about the chosen model, and nothing of another one.

To look at a model takes seconds. An answer names the model that it is of, and the page shows it only while that one is
chosen; until then it says that it is looking.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import gradio as gr

LOOKING = "Looking at {} …"
_QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
_NOTE = """
    const note = document.createElement("p");
    note.className = "sq-note";
    note.textContent = LOOKING.replace("{}", model ?? "the model");
""".replace("LOOKING", json.dumps(LOOKING))
_SHOW = f"""(answer, model, base) => {{
    const [ofModel, ofBase, html] = answer ? JSON.parse(answer) : [];
    if (ofModel === model && JSON.stringify(ofBase) === JSON.stringify(base)) return html;
    {_NOTE}
    return note.outerHTML;
}}"""


def add_answer(name: str) -> gr.Textbox:
    """Create the unseen widget that takes an answer."""
    return gr.Textbox("", label="Answer", max_lines=1, elem_id=name, elem_classes="sq-unseen")


def answer_of(model: object, base: object, html: str) -> str:
    """Return an answer for `add_answer`'s widget."""
    return json.dumps([model, base, html])


def show(event: Any, answer: gr.Textbox, where: Sequence[Any], box: gr.HTML) -> None:
    """Show in `box` what an event has answered, if it is of the model in `where` then."""
    event.then(None, [answer, *where], box, js=_SHOW, **_QUIET)


def say_looking(where: Sequence[Any], boxes: Sequence[gr.HTML]) -> None:
    """Say in the boxes that it is looking, as soon as another model is chosen."""
    notes = ", ".join("note.outerHTML" for _ in boxes)
    gr.on(
        [one.change for one in where], None, list(where), list(boxes),
        js=f"(model, base) => {{ {_NOTE} return [{notes}]; }}" if len(boxes) > 1 else
        f"(model, base) => {{ {_NOTE} return note.outerHTML; }}",
        **_QUIET,
    )  # fmt: skip
