"""Inspect: the contents of a file or folder, from its headers: container, family, quantization, the evidence, and the
schemes and offload modes that it works with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import gradio as gr

from ... import compat
from ...compat import OFFLOADS, hardware
from ...core import NO_OFFLOAD, registry
from ...errors import SdquantError
from ...models import Stopped, detect
from ...utils.byte_sizes import size
from .. import html_components, readings
from ..app_state import waiter
from ..background_task import Done, follow
from ..events import QUIET, ask
from ..html_components import escape
from ..model_manager import Progress

if TYPE_CHECKING:
    from ...formats import TypeRow
    from ...models import Detected
    from ..app_state import Desk
    from ..model_manager import Job
    from ..under_way import UnderWay

_IDLE = html_components.card(
    "info", "Pick a file or folder", html_components.paragraph("Only headers are read, however large it is.")
)
_MOST = 40  # lines of evidence


def add(desk: Desk, page: gr.Blocks, under_way: UnderWay) -> None:
    """Create the tab's widgets and connect their events."""
    names = [entry.name for entry in desk.roots.files()]
    with gr.Row(elem_classes="sq-head"):
        picked = gr.Dropdown(
            names, value=None, label="File or folder", info="Below the model folders", scale=4, elem_id="file"
        )
        config = gr.Dropdown(
            [], value=None, label="Config", info="Of a file that does not say it", interactive=False, scale=2,
            elem_id="file-config",
        )  # fmt: skip
        again = gr.Button("↻ Refresh", size="sm", scale=0, min_width=120, elem_id="files-again")
        verify = gr.Button("Read the contents too", size="sm", scale=0, min_width=160, elem_id="verify")
        cancel = gr.Button(
            "Cancel", variant="stop", size="sm", scale=0, min_width=90, interactive=False, elem_id="verify-cancel"
        )
    checked = gr.HTML("", elem_id="checked", padding=False)
    output = gr.HTML(_IDLE, elem_id="found")

    def look(request: gr.Request, name: str | None, config: str | None) -> tuple[Any, ...]:
        """Show what is in a file, and nothing more of another one, unless that is being read still."""
        is_busy = desk.tasks.is_busy(waiter(request.session_hash, "inspect"))
        html, choices = _look(desk, name, config)
        known = config if config in {one for _, one in choices} else None
        box = gr.update(choices=choices, value=known, interactive=bool(choices))
        return html, gr.skip() if is_busy else "", box

    ask([picked.change, config.input], look, [picked, config], [output, checked, config])

    def list_files() -> Any:
        return gr.update(choices=[entry.name for entry in desk.roots.files()])

    again.click(list_files, None, picked, **QUIET)
    page.load(list_files, None, picked, **QUIET)

    def start(request: gr.Request, name: str | None, config: str | None) -> Iterator[tuple[Any, ...]]:
        yield from _verify(desk, waiter(request.session_hash, "inspect"), name, config)

    def stop(request: gr.Request) -> None:
        desk.tasks.cancel(waiter(request.session_hash, "inspect"))

    outputs = [checked, verify, cancel]
    verify.click(start, [picked, config], outputs, concurrency_limit=None, **QUIET)
    under_way.show("inspect", outputs)
    cancel.click(stop, None, None, queue=False, **QUIET)


def _look(desk: Desk, name: str | None, config: str | None) -> tuple[str, list[tuple[str, str]]]:
    """Return what is in a file, and the configs that may be said of it, each as the page shows it and its name or JSON.

    Args:
        config: the one that was chosen, which may have been for another file.
    """
    if not name:
        return _IDLE, []
    choices: list[tuple[str, str]] = []
    try:
        path = desk.roots.resolve(name)
        try:
            return shown(detect(path), desk), choices
        except SdquantError as error:
            files = ((entry.name, entry.name) for entry in desk.roots.configs())
            choices = [*readings.readings(error).items(), *files]
            if config not in {one for _, one in choices}:
                raise
        return shown(detect(path, config=desk.config_of(str(config))), desk), choices
    except SdquantError as error:
        return html_components.refusal(error, desk.roots, at="Config"), choices


def _verify(desk: Desk, page: str, name: str | None, config: str | None) -> Iterator[tuple[Any, ...]]:
    """Read every tensor, and check scales, packed sizes and non-finite numbers. Yield the outcome and two buttons."""
    from ...loading import verify

    if not name:
        yield html_components.note("Pick a file or folder first."), *_buttons(busy=False)
        return
    yield html_components.progress(Progress(stage="reading")), *_buttons(busy=True)
    try:
        path, what = desk.roots.resolve(name), desk.config_of(config) if config else None
    except SdquantError as error:
        yield html_components.refusal(error, desk.roots), *_buttons(busy=False)
        return

    def show(event: Progress | Done) -> tuple[Any, ...]:
        if isinstance(event, Progress):
            return html_components.progress(event) + html_components.note(name), *_buttons(busy=True)
        return _outcome(event, name, desk), *_buttons(busy=False)

    def work(job: Job) -> Detected:
        return verify(path, on_tensor=partial(job.at, "reading"), config=what)

    yield from follow(desk.tasks, page, work, show)


def _outcome(done: Done, name: str, desk: Desk) -> str:
    if isinstance(done.error, Stopped):
        return html_components.card("info", "Cancelled", html_components.paragraph(f"{name} was not read to its end."))
    if done.error is not None:
        return html_components.refusal(done.error, desk.roots)
    lines = [desk.roots.clean(line) for line in done.value.warnings]
    title = f"✓ {escape(name)}: every tensor was read and is sound"
    return html_components.card("ok", title, *map(html_components.paragraph, lines))


def _buttons(*, busy: bool) -> tuple[Any, Any]:
    return gr.update(interactive=not busy), gr.update(interactive=busy)


def shown(detected: Detected, desk: Desk) -> str:
    """Format the detected contents as HTML."""
    kind = "works" if not detected.warnings else "untested"
    title = f"<b>{escape(desk.roots.shown(detected.path))}</b>"
    rows = [
        ("Container", detected.container),
        ("Family", detected.family or "unknown"),
        ("Component", detected.component or "unknown"),
        ("Quantization", f"{detected.quant} ({detected.backend})" if detected.quant else "none"),
        ("Its name says", detected.suffix_hint or "nothing of a quantization"),
        ("Weights", f"{size(detected.bytes)} in {detected.tensors} tensors"),
    ]
    warnings = [html_components.paragraph(desk.roots.clean(line)) for line in detected.warnings]
    return "".join(
        (
            html_components.card(kind, title, *warnings, html_components.facts(rows)),
            _parts(detected),
            _section("Types of its weights", _types(detected.histogram)),
            _section("What shows it", _evidence(detected, desk)),
            _section("What it goes with, on this machine", _goes_with(detected)),
        )
    )


def _section(title: str, body: str) -> str:
    return f'<h3 aria-level="2">{escape(title)}</h3>{body}' if body else ""


def _parts(detected: Detected) -> str:
    rows = [
        (name, part.family or "unknown", part.quant or "none", size(part.bytes), str(part.tensors))
        for name, part in detected.parts.items()
    ]
    return (
        _section(
            "Components", html_components.html_table(("name", "family", "quantization", "weights", "tensors"), rows)
        )
        if rows
        else ""
    )


def _types(rows: tuple[TypeRow, ...]) -> str:
    """Format a bar for each type, by its bytes."""
    most = max((row.bytes for row in rows), default=0)
    return "".join(
        html_components.bar(row.type, f"{row.tensors} tensors, {row.bits_per_weight:.2f} bits each", row.bytes, 0, most)
        for row in rows
    )


def _evidence(detected: Detected, desk: Desk) -> str:
    lines = [
        f"{name + ': ' if name else ''}{line}"
        for name, part in (detected.parts or {"": detected}).items()
        for line in part.evidence
    ]
    more = [f"and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
    return "<ul>" + "".join(f"<li>{escape(desk.roots.clean(line))}</li>" for line in (*lines[:_MOST], *more)) + "</ul>"


def _goes_with(detected: Detected) -> str:
    """Format a table of schemes by offload modes: the file's own, or all that a float file can be quantized to."""
    mode = "found" if detected.prequantized else "pre"
    schemes = {part.quant for part in (detected.parts or {"": detected}).values() if part.quant}
    names = sorted(schemes) if detected.prequantized else [row.name for row in registry.schemes() if row.on_the_fly]
    here = hardware.probe()
    cells = [
        cell
        for cell in compat.matrix(here.best.kind, schemes=names, machine=here)
        if cell.mode == mode and cell.runtime == "default"
    ]
    rows = []
    for name in names:
        by_offload = {cell.offload: cell for cell in cells if cell.scheme == name}
        rows.append(
            (name, *(f"{html_components.SIGNS[by_offload[one].verdict]} {by_offload[one].verdict}" for one in OFFLOADS))
        )
    head = (f"{'no' if one == NO_OFFLOAD else one} offload" for one in OFFLOADS)
    return html_components.html_table(("scheme", *head), rows)
