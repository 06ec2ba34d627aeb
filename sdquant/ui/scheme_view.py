"""The table of schemes as HTML: grouped, each with size, fit, quality, speed and what it is, or why it is refused.

A radio button in a row, and the buttons in the head, have in `data-do` what the page's script sends when used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..planning import GROUPS, NOT_QUANTIZED, SORTS, SchemeRow, SchemeTable
from ..utils.byte_sizes import size
from .html_components import escape
from .page_words import in_page_words
from .thumbnails import ComparedImages, pictures_note, thumbnail

ORIGINAL = "Original (unquantized)"

_FITS = {
    "whole": ("ok", "fits"),
    "parts": ("slow", "in turns"),
    "no": ("breaks", "too large"),
    "": ("info", "unknown"),
}
_MARKS = {"slow": "slow with these settings", "untested": "nobody has tried this"}
_HEAD = (("name", "Scheme"), ("size", "Size"), ("", "Fits"), ("quality", "Quality"), ("speed", "Speed"))
_NEAR = 0.04  # of the original's time: no difference that anybody notices


@dataclass(frozen=True, kw_only=True)
class TableView:
    """How a table is shown.

    Attributes:
        scheme: the one in use; None if several are. search: words. sort: the order in groups.
        compared: the last comparison of the model. unfinished: the speeds are still being computed.
    """

    scheme: str | None = None
    search: str = ""
    sort: str = ""
    compared: ComparedImages | None = None
    unfinished: bool = False


def format_table(table: SchemeTable, choice: TableView) -> str:
    """Format the table."""
    words = choice.search.lower().split()
    rows = [row for row in table.rows if all(word in _text(row) for word in words)]
    if choice.sort in SORTS:
        rows.sort(key=SORTS[choice.sort][1])
    groups = [("recommended", "Recommended", [row for row in rows if row.praise])]
    groups += [(one.name, one.title, [row for row in rows if row.group == one.name]) for one in GROUPS]
    first = True
    body = []
    for name, title, members in groups:
        if members:
            scheme = next((row.scheme for row in members if row.scheme == choice.scheme), None) if first else None
            first = first and scheme is None
            body.append(_group(name, title, members, table, choice, checked=scheme))
    if not rows:
        body.append('<tbody><tr><td colspan="5">No scheme has these words.</td></tr></tbody>')
    head = "".join(_column(key, title, choice.sort) for key, title in _HEAD)
    return (
        f'<div class="sq-schemes" role="region" aria-label="Schemes" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"{''.join(body)}</table></div>{_room(table, choice.compared)}"
    )


def stars(row: SchemeRow) -> str:
    """Format the quality of a scheme: stars, and for screen readers and as a hint what they mean."""
    if row.scheme == NOT_QUANTIZED:
        return '<span class="sq-stars" role="img" aria-label="the original">★★★★★</span>'
    if row.grade is None:
        return '<span class="sq-what">not measured</span>'
    text = f"{row.grade.stars} of 5: {row.grade.text} ({row.measured.snr:.0f} dB)"
    full = "★" * row.grade.stars + "☆" * (5 - row.grade.stars)
    return f'<span class="sq-stars" role="img" title="{escape(text)}">{full}</span>'


def speed(row: SchemeRow, *, unfinished: bool = False) -> str:
    """Describe the time of a step relative to the original."""
    if row.scheme == NOT_QUANTIZED:
        return "1x"
    if row.speed is None and unfinished and not row.refused:
        return "computing …"
    if row.speed is None:
        return "not measured" if not row.refused else ""
    if abs(row.speed - 1) <= _NEAR:
        return "as the original"
    return f"{1 / row.speed:.2g}x as fast" if row.speed < 1 else f"{row.speed:.2g}x the time"


def _text(row: SchemeRow) -> str:
    title = next(one.title for one in GROUPS if one.name == row.group)
    name = ORIGINAL if row.scheme == NOT_QUANTIZED else row.scheme
    return " ".join((name, row.summary, title, f"{row.bits:g}-bit", *row.praise)).lower()


def _column(key: str, title: str, sort: str) -> str:
    if not key:
        return f'<th scope="col">{title}</th>'
    order = "ascending" if key == sort else "none"
    mark = " ▾" if key == sort else ""
    button = f'<button type="button" data-do="sort {key}" title="Sort by {title.lower()}">{title}{mark}</button>'
    return f'<th scope="col" aria-sort="{order}">{button}</th>'


def _group(
    name: str, title: str, rows: list[SchemeRow], table: SchemeTable, choice: TableView, *, checked: str | None
) -> str:
    shared = _shared(rows)
    reasons = "".join(map(_reason, shared))
    head = f'<tr class="sq-group"><th colspan="5" scope="rowgroup">{escape(title)}{reasons}</th></tr>'
    lines = [_row(name, row, table, choice, checked=row.scheme == checked, told=_why(row) in shared) for row in rows]
    return f'<tbody data-group="{name}">{head}{"".join(lines)}</tbody>'


def _shared(rows: Iterable[SchemeRow]) -> list[tuple[str, str]]:
    """Return the reasons that more than two rows have, which the head of their group gives once."""
    reasons = [_why(row) for row in rows if row.refused]
    return [why for why in dict.fromkeys(reasons) if reasons.count(why) > 2]


def _why(row: SchemeRow) -> tuple[str, str]:
    return row.why, row.fix


def _reason(why: tuple[str, str]) -> str:
    texts = "".join(f"<p>{escape(in_page_words(text).rstrip('.'))}.</p>" for text in why if text)
    return f'<details class="sq-why"><summary>Why not</summary>{texts}</details>'


def _row(group: str, row: SchemeRow, table: SchemeTable, choice: TableView, *, checked: bool, told: bool) -> str:
    name = ORIGINAL if row.scheme == NOT_QUANTIZED else row.scheme
    badges = "".join(f' <span class="sq-badge">{escape(text)}</span>' for text in row.praise if group == "recommended")
    state = ("checked " if checked else "") + ("disabled " if row.refused else "")
    radio = (
        f'<input type="radio" name="sq-scheme" data-do="use {escape(row.scheme)} {group}" {state}'
        f'aria-label="Use {escape(name)}">'
    )
    what = escape(row.summary) + (f" · {_MARKS[row.verdict]}" if row.verdict in _MARKS else "")
    why = "" if not row.refused or told else _reason(_why(row))
    kind, words = _FITS[row.fit]
    if row.fit == "no" and row.offload:
        words += f"; {row.offload} offload fits"
    share = f" ({row.bytes / table.bytes:.0%})" if row.bytes is not None and table.bytes else ""
    cells = (
        ("Size", f"{size(row.bytes)}{share}" if row.bytes is not None else ""),
        ("Fits", f'<span class="sq-fit sq-{kind}">{words}</span>' if row.bytes is not None else ""),
        ("Quality", stars(row)),
        ("Speed", escape(speed(row, unfinished=choice.unfinished))),
    )
    shown = thumbnail(row.scheme, name, choice.compared)
    classes = " ".join(
        text for text, on in (("sq-chosen", row.scheme == choice.scheme), ("sq-refused", row.refused)) if on
    )
    return (
        f'<tr class="{classes}" data-scheme="{escape(row.scheme)}"><th scope="row" aria-label="{escape(name)}"><label>'
        f"{shown}{radio} <b>{escape(name)}</b>"
        f'{badges}<span class="sq-what">{what}</span></label>{why}</th>'
        + "".join(f'<td data-label="{label}">{cell}</td>' for label, cell in cells)
        + "</tr>"
    )


def _room(table: SchemeTable, compared: ComparedImages | None) -> str:
    offload = "no offload" if table.offload == "none" else f"{table.offload} offload"
    room = f"Fits: {size(table.room)} for weights on {table.device}, with {offload}. " if table.room is not None else ""
    text = f"{room}Stars: measured on the small models. {pictures_note(compared)}"
    return f'<p class="sq-note">{escape(text)}</p>'
