"""The table of schemes at the top of the settings, with search, sorting, and a radio button for each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import gradio as gr

from ...errors import SdquantError
from ...planning import AS_FOUND, NOT_QUANTIZED, ROLES
from .. import html_components, scheme_view
from ..events import QUIET, ask
from . import current

if TYPE_CHECKING:
    from ..app_state import Desk

_MAX_SEARCH = 100
_AGAIN = 1.5  # seconds
_CHOSEN = tuple(row for row in ROLES if row.by_default)
_ALL = "All"

# What a part of the table sends: "use <scheme> <group>" or "sort <column>". Done in the page: whoever is faster than
# the server's answers loses no choice.
_ACT = """(command, role, sort, ...shown) => {
    const [what, name] = command.split(" "), labels = LABELS;
    if (what === "sort") return [name === sort ? "" : name, ...shown];
    const value = name === NOT_QUANTIZED ? AS_FOUND : name;
    const isFor = n => !labels.includes(role) || labels[n] === role;
    return [sort, ...shown.map((one, n) => what === "use" && isFor(n) ? value : one)];
}"""
_WORDS = {
    "LABELS": [row.label for row in _CHOSEN], "NOT_QUANTIZED": NOT_QUANTIZED, "AS_FOUND": AS_FOUND,
}  # fmt: skip
for _name, _value in _WORDS.items():
    _ACT = _ACT.replace(_name, json.dumps(_value))

Read = Callable[[Sequence[Any]], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Picker:
    """The widgets: for which components, what is searched for, the table, what its script sends, and its order.

    `answer`, `shown`: what the server says, and a hash of it. `again`: asks until the table is finished.
    """

    roles: gr.Radio
    search: gr.Textbox
    table: gr.HTML
    command: gr.Textbox
    sort: gr.Textbox
    answer: gr.Textbox
    shown: gr.State
    again: gr.Timer


def add() -> Picker:
    """Create the widgets at the current position in the page."""
    with gr.Row(elem_classes="sq-picker"):
        roles = gr.Radio(
            [_ALL, *(row.label for row in _CHOSEN)], value=_ALL, label="A choice in the table is for", scale=2,
            elem_id="scheme-for",
        )  # fmt: skip
        search = gr.Textbox(
            "", label="Search", placeholder="name, bits or words", max_lines=1, max_length=_MAX_SEARCH, scale=1,
            elem_id="scheme-search",
        )  # fmt: skip
    table = gr.HTML(html_components.note("Looking at the model …"), elem_id="schemes")
    command = gr.Textbox("", label="Command", elem_id="scheme-do", elem_classes="sq-unseen", max_length=200)
    sort = gr.Textbox("", label="Sort", elem_id="scheme-sort", elem_classes="sq-unseen", max_length=20)
    return Picker(
        roles=roles, search=search, table=table, command=command, sort=sort, answer=current.add_answer("scheme-answer"),
        shown=gr.State(None), again=gr.Timer(_AGAIN, active=False),
    )  # fmt: skip


def wire(
    desk: Desk,
    picker: Picker,
    page: gr.Blocks,
    where: Sequence[Any],
    named: Mapping[str, Any],
    compared: gr.State,
    read: Read,
) -> None:
    """Connect the events.

    Args:
        where: the widgets of model and base. named: those of all fields. compared: the pictures of a comparison.
        read: from their values to those of the fields.
    """
    every = list(named.values())
    inputs = [picker.roles, picker.search, picker.sort, *where, *every]
    looked = (picker.search, picker.sort, compared)
    changes = [one.change for one in (*looked, picker.roles, *where, *every)]
    event = ask(
        [page.load, picker.again.tick, *changes],
        partial(_answer, desk, read),
        [picker.shown, compared, *inputs],
        [picker.answer, picker.shown, picker.again],
    )
    current.show([event], picker.answer, where, picker.table)
    targets = [picker.sort, *(named[f"quant.{row.name}"] for row in _CHOSEN)]
    picker.command.change(None, [picker.command, picker.roles, *targets], targets, js=_ACT, **QUIET)


def _answer(
    desk: Desk,
    read: Read,
    before: object,
    compared: Any,
    role: str,
    search: str,
    sort: str,
    model: str,
    base: Any,
    *shown: Any,
) -> tuple[Any, Any, Any]:
    """Return the table unless it is what the page has, a hash of it, and whether to ask again."""
    with desk.traces.aside():
        html, unfinished = _table(desk, read, compared, role, search, sort, model, base, shown)
    text = current.answer_of((model, base), html)
    mark = hash(text)
    return gr.skip() if mark == before else text, mark, gr.Timer(active=unfinished)


def _table(
    desk: Desk,
    read: Read,
    compared: Any,
    role: str,
    search: str,
    sort: str,
    model: str,
    base: Any,
    shown: Sequence[Any],
) -> tuple[str, bool]:
    """Return the table, or why there is none; and whether its speeds are still being computed."""
    try:
        values = read(shown)
        target = desk.target(model, base)
        held = desk.engine.held
        roles = _roles(role)
        so_far = desk.schemes.table(
            target, values, roles, held=held.bytes if held is not None else 0, stamp=desk.stamp(target)
        )
    except SdquantError as error:
        return html_components.refusal(error, desk.roots), False
    present = {one.name for name in so_far.table.components for one in _CHOSEN if one.plays(name)}
    used = {_used(values[f"quant.{name}"]) for name in roles if name in present or not present}
    choice = scheme_view.TableView(
        scheme=used.pop() if len(used) == 1 else None,
        search=str(search or "")[:_MAX_SEARCH],
        sort=str(sort or ""),
        compared=compared if compared is not None and compared.model == target.path else None,
        unfinished=so_far.unfinished,
    )
    return scheme_view.format_table(so_far.table, choice), so_far.unfinished


def _roles(label: object) -> tuple[str, ...]:
    """Return the names of the roles that a label of the radio buttons stands for."""
    return tuple(row.name for row in _CHOSEN if row.label == label) or tuple(row.name for row in _CHOSEN)


def _used(value: str | None) -> str:
    """Return the name of the scheme in a field's value."""
    return NOT_QUANTIZED if value is None else value.lower().partition(",")[0].strip()
