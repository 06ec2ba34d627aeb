"""Convert: the model at hand to a folder or file in another scheme, with its size beforehand, progress, and cancel."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from ...errors import SdquantError, SettingsError
from ...models import Stopped
from ...saving import next_steps
from ...utils.byte_sizes import size
from .. import conversion, header, html_components
from ..background_task import follow
from ..model_manager import Job, Progress
from . import current

if TYPE_CHECKING:
    from ..app_state import Desk
    from ..header import Head

_QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
TITLE = "Convert"
_LEAST = 2.0  # seconds of work before an estimate of what is left


def add(desk: Desk, head: Head, seen: gr.State) -> None:
    """Create the tab's widgets and connect their events. seen: the tab that somebody sees."""
    kinds = [(row.label, row.name) for row in conversion.KINDS]
    with gr.Row():
        with gr.Column(scale=3):
            kind = gr.Radio(kinds, value="folder", label="Write", elem_id="convert-kind")
            scheme = gr.Dropdown(
                conversion.schemes("folder"), value="nf4", label="Scheme", filterable=True, elem_id="convert-scheme"
            )
            name = gr.Textbox("", label="Name of the result", max_lines=1, max_length=100, elem_id="convert-name")
            with gr.Row():
                run = gr.Button("Convert", variant="primary", scale=3, elem_id="convert-run")
                cancel = gr.Button("Cancel", variant="stop", interactive=False, min_width=90, elem_id="convert-cancel")
        with gr.Column(scale=4):
            preview = gr.HTML("", elem_id="convert-seen")
            status = gr.HTML("", elem_id="convert-status")

    def start(request: gr.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
        yield from _run(desk, str(request.session_hash), values)

    def stop(request: gr.Request) -> None:
        desk.cancel(str(request.session_hash))

    kind.change(_schemes, [kind, scheme], scheme, **_QUIET)
    where = [head.model, head.base]
    answer = current.add_answer("convert-answer")
    current.forget(where, [preview])
    event = gr.on(
        [one.change for one in (seen, *where, kind, scheme)],
        partial(_seen, desk),
        [seen, *where, kind, scheme],
        [answer, name, run],
        trigger_mode="always_last",
        **_QUIET,
    )
    current.show(event, answer, where, preview)
    run.click(
        start, [head.model, head.base, kind, scheme, name], [status, run, cancel, head.model, head.chip],
        concurrency_limit=None, **_QUIET,
    )  # fmt: skip
    cancel.click(stop, None, None, queue=False, **_QUIET)


def _schemes(kind: str, scheme: str) -> Any:
    names = conversion.schemes(kind)
    stays = scheme in names and (kind != "file" or next_steps.comfyui_reads(scheme))
    return gr.update(choices=names, value=scheme if stays else conversion.usual(kind))


def _seen(desk: Desk, tab: str, model: str, base: Any, kind: str, scheme: str) -> tuple[Any, Any, Any]:
    """Return what would be written, if somebody sees this tab: to look at a model takes a second."""
    if tab != TITLE:
        return gr.skip(), gr.skip(), gr.skip()
    with desk.traces.aside():
        html, name, button = _foreseen(desk, model, base, kind, scheme)
    return current.answer_of(model, base, html), name, button


def _foreseen(desk: Desk, model: str, base: str, kind: str, scheme: str) -> tuple[Any, Any, Any]:
    """Return what would be written, a name for it, and whether it can be."""
    try:
        target = desk.target(model, base)
        before, after = conversion.foreseen(target, scheme, kind)
        folder = _folder(desk)
    except SdquantError as error:
        return html_components.refusal(error, desk.roots), gr.skip(), gr.update(interactive=False)
    share = f" ({after / before:.0%})" if before else ""
    notes = conversion.notes(target)
    text = f"{size(before)} become about {size(after)}{share}, in {desk.roots.shown(folder)}."
    return (
        html_components.card(
            "info",
            f"{html_components.escape(scheme)}: {size(after)}",
            *map(html_components.paragraph, (text, *notes)),
        ),
        conversion.name_for(Path(target.path), scheme),
        gr.update(interactive=True),
    )


def _folder(desk: Desk) -> Path:
    """Return the folder for results: the first that was given on the command line."""
    folders = desk.roots.folders[1:]
    if not folders:
        raise SettingsError(
            "Cannot convert a model", "there is no folder for the result", "Start: sdquant ui --models FOLDER"
        )
    return folders[0]


def _run(desk: Desk, page: str, values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Convert, and yield status, the two buttons, the list of models, and the head's chip."""
    model, base, kind, scheme, name = values
    nothing = (gr.skip(), gr.skip())
    yield html_components.progress(Progress(stage="converting")), *_buttons(busy=True), *nothing
    try:
        target = desk.target(model, base)
        conversion.request_for(target, scheme, kind)
        out = conversion.target_path(_folder(desk), name, kind)
    except SdquantError as error:
        yield html_components.refusal(error, desk.roots), *_buttons(busy=False), *nothing
        return
    begin = time.perf_counter()

    def work(job: Job) -> float:
        with desk.engine.alone(job):
            conversion.target_path(out.parent, name, kind)  # a job that was before this one may have made it
            conversion.convert_model(target, scheme, kind, out, lambda done, total: job.at("converting", done, total))
        return time.perf_counter() - begin

    for event in follow(desk, page, work):
        if isinstance(event, Progress):
            bar = html_components.progress(event) + html_components.note(_left(event, time.perf_counter() - begin))
            yield bar, *_buttons(busy=True), *nothing
        elif isinstance(event.error, Stopped):
            card = html_components.card("info", "Cancelled", html_components.paragraph("Nothing was written."))
            yield card, *_buttons(busy=False), gr.skip(), header.chip(desk)
        elif event.error is not None:
            yield html_components.refusal(event.error, desk.roots), *_buttons(busy=False), gr.skip(), header.chip(desk)
        else:
            what = f"{desk.roots.shown(out)}: {size(_written(out))}, in {event.value:.0f} s"
            text = f"{what}. It is in the list of models now."
            lines = [text, next_steps.opened_with(out, str(scheme)).replace("`", "")]
            card = html_components.card("ok", "✓ Converted", *map(html_components.paragraph, lines))
            yield card, *_buttons(busy=False), gr.update(choices=desk.models()), header.chip(desk)


def _left(at: Progress, seconds: float) -> str:
    """Describe the time that is left, from that of what is done."""
    if not at.done or at.done >= at.total or seconds < _LEAST:
        return ""
    return f"about {seconds * (at.total - at.done) / at.done:.0f} s left"


def _written(out: Path) -> int:
    files = (path for path in out.rglob("*") if path.is_file()) if out.is_dir() else (out,)
    return sum(path.stat().st_size for path in files)


def _buttons(*, busy: bool) -> tuple[Any, Any]:
    return gr.update(interactive=not busy), gr.update(interactive=busy)
