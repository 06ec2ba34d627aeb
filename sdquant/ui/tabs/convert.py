"""Convert: the model at hand to a folder or file in another scheme, with its size beforehand, progress, and cancel."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from ...errors import SdquantError, SettingsError
from ...models import Stopped
from ...saving import next_steps
from ...utils.byte_sizes import size
from .. import conversion, conversion_time, header, html_components, mix_conversion, widgets
from ..app_state import waiter
from ..background_task import Done, follow
from ..events import QUIET, ask
from ..mix_conversion import MIX
from ..model_manager import Job, Progress
from . import current

if TYPE_CHECKING:
    from ..app_state import Desk
    from ..header import Head
    from ..plan_preview import Target
    from ..under_way import UnderWay

TITLE = "Convert"
_MIXED = (
    "Each weight gets the scheme that makes the image best for the bytes: the weights are read once to measure that."
)
_OFFER = """(kind, scheme) => {
    const offer = (OFFERS)[kind];
    return { __type__: "update", choices: offer.choices, value: offer.stays.includes(scheme) ? scheme : offer.usual };
}"""
_GOALS = 'scheme => ({ __type__: "update", visible: scheme === MIX })'
_NOTHING = "Nothing was written."
_LEAST = 2.0  # seconds of work before an estimate of what is left


def add(desk: Desk, head: Head, tab: gr.State, under_way: UnderWay) -> None:
    """Create the tab's widgets and connect their events. tab: the one that somebody sees."""
    kinds = [(row.label, row.name) for row in conversion.KINDS]
    with gr.Row():
        with gr.Column(scale=3):
            kind = gr.Radio(kinds, value="folder", label="Write", elem_id="convert-kind")
            scheme = gr.Dropdown(
                _choices("folder"),
                value="nf4",
                label="Scheme",
                filterable=True,
                elem_id="convert-scheme",
                allow_custom_value=True,  # what is no scheme is refused in a sentence, not by Gradio
            )
            with gr.Row(visible=False) as goals:
                size_box = gr.Textbox(
                    "", label="Size", info="Of the result, such as 6GB", max_lines=1, max_length=30, min_width=120,
                    elem_id="convert-size",
                )  # fmt: skip
                quality = gr.Textbox(
                    "", label="Or quality", info="In dB; 20 is close, 30 is closer", max_lines=1, max_length=30,
                    min_width=120, elem_id="convert-quality",
                )  # fmt: skip
            name = gr.Textbox("", label="Name of the result", max_lines=1, max_length=100, elem_id="convert-name")
            with gr.Row():
                run = gr.Button("Convert", variant="primary", scale=3, elem_id="convert-run")
                cancel = gr.Button("Cancel", variant="stop", interactive=False, min_width=90, elem_id="convert-cancel")
        with gr.Column(scale=4):
            preview = gr.HTML("", elem_id="convert-seen")
            status = gr.HTML("", elem_id="convert-status")

    def start(request: gr.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
        yield from _run(desk, waiter(request.session_hash, "convert"), values)

    def stop(request: gr.Request) -> None:
        desk.tasks.cancel(waiter(request.session_hash, "convert"))

    # In the page, at once: whoever is faster than the server's answers loses no choice. Not by `change`, which Gradio
    # sends whenever the page is drawn anew.
    offers = json.dumps({row.name: _offer(row.name) for row in conversion.KINDS})
    kind.input(None, [kind, scheme], scheme, js=_OFFER.replace("OFFERS", offers), **QUIET)
    scheme.change(None, scheme, goals, js=_GOALS.replace("MIX", json.dumps(MIX)), **QUIET)
    where, what = [head.model, head.base], [kind, scheme, size_box, quality]
    answer = current.add_answer("convert-answer")
    # The size and the name that were suggested, as this page shows them: a state of the server is ahead of the page.
    usual, suggested = current.add_answer("convert-usual"), current.add_answer("convert-suggested")

    def look(request: gr.Request, *values: Any) -> tuple[Any, ...]:
        return _seen(desk, waiter(request.session_hash, "convert"), *values)

    event = ask(
        [one.change for one in (tab, *where, *what)],
        look,
        [tab, *where, *what, usual],
        [answer, name, suggested, run, size_box, usual],
    )
    current.show([event], answer, [*where, kind, scheme], preview)
    outputs = [status, run, cancel, head.model, head.chip]
    run.click(start, [*where, *what, name, suggested], outputs, concurrency_limit=None, **QUIET)
    under_way.show("convert", outputs)
    cancel.click(stop, None, None, queue=False, **QUIET)


def _choices(kind: str) -> list[tuple[str, str]]:
    """Return the schemes, and the mix of them, as choices."""
    names = widgets.searchable(conversion.schemes(kind))
    return [("A mix: the best picture for a size", MIX), *((name, name) for name in names)]


def _offer(kind: str) -> dict[str, Any]:
    """Return the choices of a kind of target, the schemes that stay when it is chosen, and what the others become."""
    stays = [one for one in conversion.schemes(kind) if kind != "file" or next_steps.comfyui_reads(one)]
    return {"choices": _choices(kind), "stays": [MIX, *stays], "usual": conversion.usual(kind)}


def _seen(
    desk: Desk,
    page: str,
    tab: str,
    model: str,
    base: Any,
    kind: str,
    scheme: str,
    size_text: Any,
    quality: Any,
    usual: str,
) -> tuple[Any, ...]:
    """Return what would be written, if somebody sees this tab: to look at a model takes a second.

    Args:
        page: cannot convert anything while it waits for a job.
    """
    if tab != TITLE:
        return (gr.skip(),) * 6
    of = (model, base, kind, scheme)
    with desk.traces.aside():
        try:
            target, folder = desk.target(model, base), _folder(desk)
            before = size_text
            if scheme == MIX and not quality and size_text in ("", usual):
                size_text = usual = mix_conversion.usual_size(target, kind)
            card = _foreseen(desk, target, folder, kind, scheme, _mix(size_text, quality))
        except SdquantError as error:
            html = current.answer_of(of, html_components.refusal(error, desk.roots))
            return html, gr.skip(), gr.skip(), gr.update(interactive=False), gr.skip(), gr.skip()
    new_name = conversion.name_for(Path(target.path), scheme)
    shown = size_text if size_text != before else gr.skip()  # somebody may be typing another one
    run = gr.update(interactive=not desk.tasks.is_busy(page))
    return current.answer_of(of, card), new_name, new_name, run, shown, usual


def _mix(size_text: object, quality: object) -> mix_conversion.Mix:
    return mix_conversion.Mix(size=str(size_text or ""), quality=str(quality or ""))


def _foreseen(desk: Desk, target: Target, folder: Path, kind: str, scheme: str, mix: mix_conversion.Mix) -> str:
    """Return a box with what would be written, and how long that takes."""
    before, after = conversion.foreseen(target, scheme, kind, mix)
    share = f" ({after / before:.0%})" if before else ""
    has_size = bool(mix.size.strip())
    is_bound = scheme == MIX and (has_size or kind != "folder")
    how = ("at most" if has_size else "at least") if is_bound else "about"
    text = f"{size(before)} become {how} {size(after)}{share}, in {desk.roots.shown(folder)}."
    seconds = conversion_time.seconds_for(scheme, kind, before)
    how_long = [f"It takes about {_words(seconds)} here, if nothing else computes."] if seconds is not None else []
    name = "A mix" if scheme == MIX else html_components.escape(scheme)
    lines = (text, *how_long, *([_MIXED] if scheme == MIX else []), *conversion.notes(target))
    return html_components.card(
        "info",
        f"{name}: {how} {size(after)}" if is_bound else f"{name}: {size(after)}",
        *map(html_components.paragraph, lines),
    )


def _words(seconds: float) -> str:
    """Return a time as people say it."""
    minutes = round(seconds / 60)
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{minutes} minutes"


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
    model, base, kind, scheme, size_text, quality, name, suggested = values
    nothing = (gr.skip(), gr.skip())
    yield html_components.progress(Progress(stage="converting")), *_buttons(busy=True), *nothing
    try:
        target = desk.target(model, base)
        mix = _mix(size_text, quality)
        conversion.foreseen(target, scheme, kind, mix)  # which refuses what cannot be
        named = conversion.name_for(Path(target.path), scheme) if name == suggested else name
        out = conversion.target_path(_folder(desk), named, kind)
    except SdquantError as error:
        yield html_components.refusal(error, desk.roots), *_buttons(busy=False), *nothing
        return
    begin = time.perf_counter()

    def work(job: Job) -> float:
        with desk.engine.alone(job):
            conversion.target_path(out.parent, named, kind)  # a job that was before this one may have made it
            conversion.convert_model(
                target, scheme, kind, out, lambda done, total: job.at("converting", done, total), mix,
                lambda done, total: job.at("measuring the weights", done, total),
            )  # fmt: skip
        return time.perf_counter() - begin

    def show(event: Progress | Done) -> tuple[Any, ...]:
        if isinstance(event, Progress):
            note = html_components.note(desk.roots.shown(out) + _left(event, time.perf_counter() - begin))
            return html_components.progress(event) + note, *_buttons(busy=True), *nothing
        if isinstance(event.error, Stopped):
            card, models = html_components.card("info", "Cancelled", html_components.paragraph(_NOTHING)), gr.skip()
        elif event.error is not None:
            card, models = html_components.refusal(event.error, desk.roots), gr.skip()
        else:
            card, models = _converted(desk, out, scheme, event.value), gr.update(choices=desk.models())
        return card, *_buttons(busy=False), models, header.chip(desk)

    yield from follow(desk.tasks, page, work, show)


def _converted(desk: Desk, out: Path, scheme: str, seconds: float) -> str:
    """Return a box with what was written, and what opens it."""
    took = f"{seconds:.0f} s" if seconds >= 1 else "less than 1 s"
    text = f"{desk.roots.shown(out)}: {size(_written(out))}, in {took}. It is in the list of models now."
    opened = next_steps.opened_with(out, None if scheme == MIX else str(scheme))
    return html_components.card("ok", "✓ Converted", *map(html_components.paragraph, (text, opened.replace("`", ""))))


def _left(at: Progress, seconds: float) -> str:
    """Describe the time that is left, from that of what is done."""
    if not at.done or at.done >= at.total or seconds < _LEAST:
        return ""
    return f", about {seconds * (at.total - at.done) / at.done:.0f} s left"


def _written(out: Path) -> int:
    files = (path for path in out.rglob("*") if path.is_file()) if out.is_dir() else (out,)
    return sum(path.stat().st_size for path in files)


def _buttons(*, busy: bool) -> tuple[Any, Any]:
    return gr.update(interactive=not busy), gr.update(interactive=busy)
