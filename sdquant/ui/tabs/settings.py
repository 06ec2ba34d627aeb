"""Settings: a scheme for each component of the model, offload, and all other options of a load.

Each change is evaluated immediately: the verdict of the matrix, the plan and its size in bytes, and fixes if it is not
supported. Nothing is loaded before "Apply".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from ...errors import SdquantError, SettingsError
from ...models import Stopped
from ...planning import fields, mix_presets, presets
from ...settings import Fix, Settings, field_named, settings_file
from .. import header, html_components, readings, support_view, widgets
from ..app_state import waiter
from ..background_task import Done, follow
from ..events import QUIET, ask
from ..html_components import escape
from ..model_manager import Job, LoadedModel, Progress
from ..plan_preview import Review, review
from . import current, scheme_picker

if TYPE_CHECKING:
    from ..app_state import Desk
    from ..header import Head
    from ..under_way import UnderWay

# Fields that stand in the open; every other one, new ones too, is under "More".
_OPEN = ("size", "quality", "offload", "budget", "mode", "skip", "cache")

_FIXES = 3  # buttons
# A fix is what its button said when it was pressed, whatever the server has found since.
_FIX = """(text, changes, others, ...shown) => {
    const change = (changes ? JSON.parse(changes) : {})[text] ?? {};
    const more = change.config ? [...(others ?? []).filter(one => !one.startsWith("{")), change.config] : others;
    return [more, ...shown.map((one, n) => change[n] ?? one)];
}"""
# The name of a preset, and how many there were: another text each time, so that Gradio sees a change.
_NAME = "now => [NAME, Number((now ?? '').split(' ')[1] ?? 0) + 1].join(' ')"
_MAX_IMPORT = 1 << 20  # bytes
# Of the values in force and those that the widgets show: the former where a widget is as at the start.
_FOLLOW = """(now, ...shown) => {
    const start = START, fresh = now ? JSON.parse(now) : shown;
    return shown.map((value, n) => value === start[n] ? fresh[n] : value);
}"""


def add(desk: Desk, head: Head, page: gr.Blocks, under_way: UnderWay) -> None:
    """Create the tab's widgets and connect their events."""
    gr.HTML('<p class="sq-lead">Choose; what would happen is shown as you do. Nothing is loaded before you apply.</p>')
    with gr.Row(elem_classes="sq-presets"):
        ready = {row.name: _ready(row) for row in (*presets.PRESETS, *mix_presets.MIXES)}
    reason = gr.HTML("", elem_id="preset-said", padding=False)
    picker = scheme_picker.add()
    with gr.Row():
        with gr.Column(scale=3):
            named = _widgets(desk.settings)
        with gr.Column(scale=4, elem_classes="sq-beside"):
            judged = gr.HTML("", elem_id="verdict")
            with gr.Row():
                ways = [gr.Button("", visible=False, size="sm", elem_id=f"fix-{n}") for n in range(_FIXES)]
            with gr.Row():
                apply = gr.Button("Apply and load", variant="primary", scale=3, elem_id="apply")
                cancel = gr.Button("Cancel", variant="stop", interactive=False, min_width=90, elem_id="cancel-load")
            outcome = gr.HTML(html_components.note(desk.notes), elem_id="applied")
            with gr.Row():
                export = gr.DownloadButton("Export", size="sm", interactive=False, elem_id="export", min_width=90)
                take = gr.UploadButton(
                    "Import", size="sm", file_types=[".json"], type="filepath", elem_id="import", min_width=90
                )
                reset = gr.Button("Undo changes", size="sm", elem_id="reset", min_width=90)
    verdict = current.add_answer("verdict-answer")
    now = gr.Textbox("", label="In force", elem_id="settings-now", elem_classes="sq-unseen")
    changes = gr.Textbox("", label="Changes", elem_id="fixes-now", elem_classes="sq-unseen")
    preset = gr.Textbox("", label="Preset", elem_id="preset", elem_classes="sq-unseen", max_length=100)
    marked = gr.State({row.name: widgets.choices(row, {}) for row in fields() if row.choices})
    every = list(named.values())
    where = [head.model, head.base]

    # What is shown follows what is chosen. One event for all: of several, the answer to an older one could come last.
    looked = [verdict, changes, marked, apply, *ways, *every]

    def look(request: gr.Request, *values: Any) -> tuple[Any, ...]:
        with desk.traces.aside():
            return _look(desk, waiter(request.session_hash, "settings"), *values)

    events = [page.load, *(one.change for one in (*every, head.model, head.base))]
    verdict_events = [ask(events, look, [marked, *where, *every], looked)]

    def restore(*shown: Any) -> list[Any]:
        return _put(desk.settings.values, shown)

    # The page begins with the values of the server's start. What was applied since comes with its first answer, in
    # which time a person may have chosen something: only what still has the value of the start follows.
    page.load(lambda: _contents(desk.settings), None, now, **QUIET).then(
        None, [now, *every], every, js=_FOLLOW.replace("START", _contents(desk.settings)), **QUIET
    )
    scheme_picker.wire(desk, picker, page, where, named, head.compared, _read)

    # What fills the widgets. Presets go by one event, which begins again with what the one before has chosen.
    for name, button in ready.items():
        button.click(None, preset, preset, js=_NAME.replace("NAME", json.dumps(name)), **QUIET)
    preset.change(partial(_preset, desk), [preset, *where, *every], [reason, *every], **QUIET)
    for button in ways:
        button.click(None, [button, changes, head.base, *every], [head.base, *every], js=_FIX, **QUIET)
    reset.click(restore, every, every, **QUIET)
    take.upload(partial(_import, desk), [take, *every], [outcome, *every], **QUIET)

    # What acts.
    def start(request: gr.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
        yield from _load(desk, waiter(request.session_hash, "settings"), values)

    def stop(request: gr.Request) -> None:
        desk.tasks.cancel(waiter(request.session_hash, "settings"))

    outputs = [outcome, apply, cancel, head.chip]
    under_way.show("settings", outputs)
    applied = apply.click(start, [*where, *every], outputs, concurrency_limit=None, **QUIET).then(
        partial(_export, desk), None, export, **QUIET
    )
    verdict_events.append(applied.then(look, [marked, *where, *every], looked, **QUIET))
    current.show(verdict_events, verdict, where, judged)
    page.load(partial(_export, desk), None, export, **QUIET)
    cancel.click(stop, None, None, queue=False, **QUIET)


def _ready(row: presets.Preset | mix_presets.MixPreset) -> gr.Button:
    return gr.Button(row.label, size="sm", min_width=120, elem_id=f"preset-{row.name}")


def _widgets(settings: Settings) -> dict[str, Any]:
    """Create a widget for each field, in the order of the fields."""
    groups = (
        [row for row in fields() if row.kind == "scheme"],
        [field_named(name) for name in _OPEN],
        [row for row in fields() if row.kind != "scheme" and row.name not in _OPEN],
    )
    by_name: dict[str, Any] = {}
    for rows in groups[:2]:
        with gr.Group():
            by_name |= {row.name: widgets.widget(row, settings[row.name]) for row in rows}
    with gr.Accordion("More", open=False, elem_id="more"):
        by_name |= {row.name: widgets.widget(row, settings[row.name]) for row in groups[2]}
    return {row.name: by_name[row.name] for row in fields()}


def _read(shown: Sequence[Any]) -> dict[str, Any]:
    """Return the values in the widgets; they may contradict each other."""
    return {row.name: row.parse(one) for row, one in zip(fields(), shown, strict=True)}


def _put(values: Mapping[str, Any], shown: Sequence[Any]) -> list[Any]:
    """Return the updates that make the widgets show `values`.

    Args:
        shown: what the widgets had when the event began. One that has its value already is left alone: a person may
            have chosen another since, above all on a page that has just been opened.
    """
    return [
        gr.skip() if widgets.has(row, values[row.name], one) else widgets.update(row, values[row.name], None)
        for row, one in zip(fields(), shown, strict=True)
    ]


def _contents(settings: Settings) -> str:
    """Return what the widgets show of the settings, as JSON."""
    return json.dumps([widgets.content(row, settings[row.name]) for row in fields()])


def _as_they_are() -> list[Any]:
    return [gr.skip() for _ in fields()]


def _look(desk: Desk, waiting: str, before: Mapping[str, Any], model: str, base: str, *shown: Any) -> tuple[Any, ...]:
    """Return the verdict and the plan, the fixes, whether to apply, the buttons of fixes, and marks on all choices.

    Args:
        waiting: the page, which cannot apply anything while it waits for a job.
        before: field to choices, as the page has them. Only changed ones are sent: new choices would interrupt a user
            who is typing to search the list.
    """
    values, result = _seen(desk, model, base, shown)
    by_text = {fix.text: _of_fix(fix) for fix in result.fixes}
    if isinstance(result.error, SdquantError):
        by_text |= {text: {"config": config} for text, config in readings.readings(result.error).items()}
    ways = list(by_text)[:_FIXES]
    ways += [""] * (_FIXES - len(ways))
    marked = {row.name: widgets.choices(row, result.marks[row.name]) for row in fields() if row.name in result.marks}
    marked = {**before, **marked}
    return (
        current.answer_of((model, base), support_view.shown(result, values, desk.roots)),
        json.dumps(by_text),
        marked,
        gr.update(interactive=result.error is None and not desk.tasks.is_busy(waiting)),
        *(gr.update(value=text, visible=bool(text)) for text in ways),
        *(
            gr.update(choices=marked[row.name]) if marked.get(row.name) != before.get(row.name) else gr.skip()
            for row in fields()
        ),
    )


def _seen(desk: Desk, model: str, base: str, shown: Sequence[Any]) -> tuple[dict[str, Any], Review]:
    """Return the values of the widgets, and their evaluation."""
    try:
        values = _read(shown)
    except SdquantError as error:
        return {}, Review(marks={}, error=error)
    try:
        _refuse_places(desk, values)
    except SdquantError as error:
        return values, Review(marks={}, error=error, fixes=(Fix(text="Use no cache folder", changes={"cache": None}),))
    try:
        return values, review(desk.target(model, base), values)
    except SdquantError as error:
        return values, Review(marks={}, error=error)


def _refuse_places(desk: Desk, values: Mapping[str, Any]) -> None:
    """Raise if the cache is outside the model folders: the page opens no other folders."""
    place = values["cache"]
    if place is None or place.lower() in ("on", "off"):
        return
    try:
        desk.roots.resolve(place)
    except SettingsError as error:
        what = f"Cannot use {error.what.removeprefix('Cannot open ')} for the cache"
        fix = "Write on, off, or a folder below the folders of models; `sdquant ui --models FOLDER` adds one"
        raise SettingsError(what, "it is not a folder below the folders of models", fix) from error


def _preset(desk: Desk, command: object, model: str, base: str, *shown: Any) -> tuple[Any, ...]:
    """Choose a preset's settings for this model; return the reason, and the updates of the widgets."""
    with desk.traces.aside():
        return _chosen(desk, str(command).partition(" ")[0], model, base, shown)


def _chosen(desk: Desk, name: str, model: str, base: str, shown: Sequence[Any]) -> tuple[Any, ...]:
    title = next((row.label for row in (*presets.PRESETS, *mix_presets.MIXES) if row.name == name), "")
    try:
        target = desk.target(model, base)
        if not title:
            raise SettingsError("Cannot choose settings", "there is no such preset", "Press one of the buttons")
        keep = _keepable(_read(shown))
        _refuse_places(desk, keep.values)
        if name in {row.name for row in mix_presets.MIXES}:
            settings, why = mix_presets.choose_mix_settings(name, target.path, settings=keep, **target.companions)
        else:
            current = desk.engine.held
            taken = current.bytes if current is not None else 0
            read = partial(desk.schemes.open, target, stamp=desk.stamp(target))
            choice = presets.choose(name, target.path, settings=keep, held=taken, opened_with=read)
            settings, why = choice.settings, choice.why
    except SdquantError as error:
        return html_components.refusal(error, desk.roots), *_as_they_are()
    return html_components.card("info", escape(title), html_components.paragraph(why + ".")), *_put(
        settings.values, shown
    )


def _keepable(values: Mapping[str, Any]) -> Settings:
    """Return the settings that a preset starts from: the page's, or the defaults if these contradict each other."""
    try:
        return Settings(values)
    except SdquantError:
        return Settings()


def _of_fix(fix: Fix) -> dict[str | int, Any]:
    """Return what widgets show after a fix, by their numbers among the fields."""
    rows = enumerate(fields())
    return {n: widgets.content(row, fix.changes[row.name]) for n, row in rows if row.name in fix.changes}


def _import(desk: Desk, file: str | None, *shown: Any) -> tuple[Any, ...]:
    """Import settings from a file of ours, or from SD.Next's config.json."""
    from ...settings import sdnext

    try:
        if file is None or not 0 < Path(file).stat().st_size <= _MAX_IMPORT:
            raise SettingsError("Cannot import the file", "it is empty or far too large", "Choose a settings file")
        read = sdnext.read_any(Path(file).read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        error = SettingsError("Cannot import the file", "it is not text", "Choose a settings file")
        return html_components.refusal(error, desk.roots), *_as_they_are()
    except SdquantError as error:
        return html_components.refusal(error, desk.roots), *_as_they_are()
    lines = [html_components.paragraph(f"Taken: {', '.join(read.taken)}.")] if read.taken else []
    lines += [html_components.paragraph(f"Not taken: {name}. {why}") for name, why in read.left]
    return html_components.card("info", "Imported. Apply to use it.", *lines), *_put(read.settings.values, shown)


def _export(desk: Desk) -> Any:
    """Write the settings in force to a file for the download button, which needs it before it is pressed."""
    path = desk.download_folder() / "sdquant-settings.json"
    path.write_text(settings_file.dumps(desk.settings), encoding="utf-8")
    return gr.update(value=str(path), interactive=True)


def _load(desk: Desk, page: str, values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Load with the new settings, and save them if that succeeds. Yield outcome, two buttons, the head's chip."""
    model, base, *shown = values
    yield html_components.progress(Progress(stage="loading")), *_buttons(busy=True), gr.skip()
    try:
        settings = Settings(_read(shown))
        _refuse_places(desk, settings.values)
        target = desk.target(model, base)
    except SdquantError as error:
        yield _refused(desk, error), *_buttons(busy=False), gr.skip()
        return

    def work(job: Job) -> str:
        lost: list[SdquantError | None] = []
        loaded_model = desk.engine.load(target.request(settings), job, then=lambda: lost.append(desk.keep(settings)))
        return _applied(desk, loaded_model, lost[0])

    def show(event: Progress | Done) -> tuple[Any, ...]:
        if isinstance(event, Progress):
            return html_components.progress(event), *_buttons(busy=True), gr.skip()
        outcome = event.value if event.error is None else _refused(desk, event.error)
        return outcome, *_buttons(busy=False), header.chip(desk)

    yield from follow(desk.tasks, page, work, show)


def _buttons(*, busy: bool) -> tuple[Any, Any]:
    return gr.update(interactive=not busy), gr.update(interactive=busy)


def _applied(desk: Desk, model: LoadedModel, lost: SdquantError | None) -> str:
    where, words = desk.roots.shown(model.plan.path), html_components.scheme_words(model.plan)
    how = f"{where}: {words}, loaded in {model.seconds:.1f} s."
    if lost is None:
        return html_components.card("ok", "✓ Applied and kept for the next start", html_components.paragraph(how))
    why = f"{lost.why}. {lost.fix}."
    return html_components.card(
        "slow",
        "✓ Applied, but not kept: the settings file cannot be written",
        html_components.paragraph(desk.roots.clean(why)),
        html_components.paragraph(how),
    )


def _refused(desk: Desk, error: BaseException) -> str:
    model = desk.engine.held
    still = "No model is loaded."
    if model is not None:
        still = f"{desk.roots.shown(model.plan.path)} is loaded as before: {html_components.scheme_words(model.plan)}."
    if isinstance(error, Stopped):
        return html_components.card("info", "Cancelled", html_components.paragraph(still))
    return html_components.refusal(error, desk.roots) + html_components.note(still)
