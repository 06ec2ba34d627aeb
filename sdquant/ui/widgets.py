"""A widget for each field of the settings, by its kind: nothing here knows a field by its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import gradio as gr

from ..planning import AS_FOUND, NOT_QUANTIZED
from . import scheme_view

if TYPE_CHECKING:
    from ..planning import Verdict
    from ..settings import Field

# What stands behind a choice, by the verdict on it.
_MARKS = {"works": "", "slow": "  ◔ slow", "untested": "  ? untested", "breaks": "  ✕ not with the other choices"}

_LABELS = {AS_FOUND: "As in the file", NOT_QUANTIZED: scheme_view.ORIGINAL}


def widget(row: Field, value: Any) -> Any:
    """Create the widget of a field, showing `value`."""
    common: dict[str, Any] = {"label": row.label, "info": row.help, "elem_id": elem_id(row.name)}
    if row.kind == "switch":
        return gr.Checkbox(value, **common)
    if row.kind in ("scheme", "choice"):
        return gr.Dropdown(
            choices(row, {}), value=row.shown(value), allow_custom_value=row.kind == "scheme", filterable=True, **common
        )
    return gr.Textbox(str(row.shown(value)), max_lines=1, max_length=1000, **common)


def elem_id(name: str) -> str:
    """Return the id of a field's element in the page."""
    return "set-" + name.replace(".", "-").replace("_", "-")


def choices(row: Field, marks: Mapping[str, Verdict]) -> list[tuple[str, str]]:
    """Return the choices of a field, each marked with the verdict of the matrix.

    If all have the same bad verdict, the problem is not in this field, and none is marked.
    """
    verdicts = {shown: marks[shown].verdict for shown in row.choices if shown in marks}
    if len(set(verdicts.values())) == 1:
        verdicts = {}
    labels = _LABELS if row.kind == "scheme" else {}
    names = searchable(row.choices) if row.kind == "scheme" else row.choices
    return [(labels.get(shown, shown) + _MARKS[verdicts.get(shown, "works")], shown) for shown in names]


def searchable(names: Iterable[str]) -> list[str]:
    """Return names with each before those that contain it: Enter takes the first one that has what was typed."""
    left, ordered = list(names), []
    while left:
        first = min((one for one in left if one in left[0]), key=len)
        left.remove(first)
        ordered.append(first)
    return ordered


def update(row: Field, value: Any, marks: Mapping[str, Verdict] | None) -> Any:
    """Return the update of a field's widget to `value`, with the marks of its choices if these are known."""
    if row.kind in ("scheme", "choice") and marks is not None:
        return gr.update(value=row.shown(value), choices=choices(row, marks))
    return gr.update(value=content(row, value))


def has(row: Field, value: Any, shown: Any) -> bool:
    """Return whether a widget that shows `shown` need not be updated to `value`."""
    return type(shown) is type(content(row, value)) and bool(shown == content(row, value))


def content(row: Field, value: Any) -> Any:
    """Return what a widget shows of a value."""
    return value if row.kind == "switch" else str(row.shown(value))
