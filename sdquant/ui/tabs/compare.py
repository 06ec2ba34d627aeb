"""Compare: the same prompt and seed through several schemes, side by side, with what each costs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import gradio as gr

from ...errors import SdquantError, SettingsError
from ...evaluation import compare
from ...models import Stopped
from ...planning import AUTO, fields
from ...utils import figure
from ...utils.byte_sizes import size
from .. import header, html_components, quality_curve, widgets
from ..app_state import waiter
from ..background_task import Done, follow
from ..events import QUIET, ask
from ..model_manager import Job, Progress
from ..thumbnails import compared_images
from ..validation import MAX_PROMPT, MAX_SEED, prompt_of, whole_number
from . import compare_curve

if TYPE_CHECKING:
    from ...evaluation import Comparison
    from ..app_state import Desk
    from ..header import Head
    from ..under_way import UnderWay

MOST = 12  # schemes at once
MAX_STEPS = 100
_IDLE = html_components.card(
    "info",
    "Choose schemes",
    html_components.paragraph("The first column is the model as it is on disk; the others are held to it."),
)


def add(desk: Desk, head: Head, under_way: UnderWay) -> None:
    """Create the tab's widgets and connect their events."""
    schemes = [one for one in next(row for row in fields() if row.kind == "scheme").choices[2:]]
    with gr.Row():
        with gr.Column(scale=3):
            prompt = gr.Textbox("a handwritten seven", label="Prompt", max_length=MAX_PROMPT, elem_id="compare-prompt")
            selection = gr.Dropdown(
                widgets.searchable([*schemes, AUTO]), value=list(compare.DEFAULT), multiselect=True, max_choices=MOST,
                label="Schemes",
                info="With the offload mode in force; auto,size=6GB is a mix, auto that of the settings",
                allow_custom_value=True, elem_id="compare-schemes",
            )  # fmt: skip
            with gr.Row():
                steps = gr.Slider(1, MAX_STEPS, value=20, step=1, label="Steps", elem_id="compare-steps", min_width=240)
                seed = gr.Number(0, label="Seed", elem_id="compare-seed")
            with gr.Row():
                run = gr.Button("Compare", variant="primary", scale=3, elem_id="compare-run")
                cancel = gr.Button("Cancel", variant="stop", interactive=False, min_width=90, elem_id="compare-cancel")
            predict = gr.Button(compare_curve.LABEL, size="sm", elem_id="compare-predict")
            with gr.Row():
                picture = gr.DownloadButton("Picture", size="sm", interactive=False, elem_id="compare-png")
                data = gr.DownloadButton("JSON", size="sm", interactive=False, elem_id="compare-json")
        with gr.Column(scale=5):
            status = gr.HTML(_IDLE, elem_id="compare-status")
            sheet = gr.Image(
                label="Images, and below each its difference from the first",
                show_label=False,
                type="pil",
                format="png",
                interactive=False,
                elem_id="compare-sheet",
                buttons=["fullscreen"],
            )
            rows = gr.HTML("", elem_id="compare-rows")
            with gr.Column(visible=False, elem_id="compare-two") as two:
                with gr.Row():
                    left = gr.Dropdown([], label="Left", elem_id="compare-left", min_width=120)
                    right = gr.Dropdown([], label="Right", elem_id="compare-right", min_width=120)
                slider = gr.ImageSlider(
                    label="Two images, with a slider between them", type="pil", format="png", interactive=False,
                    height=384, elem_id="compare-slider", elem_classes="sq-image", buttons=["fullscreen"],
                )  # fmt: skip
    images = gr.State({})

    def start(request: gr.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
        yield from _run(desk, waiter(request.session_hash, "compare"), values)

    def foresee(request: gr.Request, model: str, base: Any) -> Iterator[tuple[Any, ...]]:
        page = waiter(request.session_hash, "compare")
        yield from compare_curve.predict(desk, page, model, base, partial(_curve_alone, desk))

    def stop(request: gr.Request) -> None:
        desk.tasks.cancel(waiter(request.session_hash, "compare"))

    outputs = [
        status, sheet, rows, picture, data, images, two, left, right, slider, head.compared, run, predict, cancel,
        head.chip,
    ]  # fmt: skip
    run.click(
        start,
        [head.model, head.base, prompt, selection, steps, seed],
        outputs,
        concurrency_limit=None,
        **QUIET,
    )
    predict.click(foresee, [head.model, head.base], outputs, concurrency_limit=None, **QUIET)
    under_way.show("compare", outputs)
    ask([left.input, right.input], _pair, [images, left, right], slider)
    cancel.click(stop, None, None, queue=False, **QUIET)


def _run(desk: Desk, page: str, values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Compare, and yield the updates of the page."""
    model, base, prompt, selection, steps, seed = values
    busy = _busy()
    yield html_components.progress(Progress(stage="loading")), *_nothing(), *busy
    try:
        figure.require()
        names = _schemes(selection)
        target = desk.target(model, base)
        options: dict[str, Any] = {"prompt": prompt_of(prompt), "seed": whole_number("Seed", seed, 0, MAX_SEED)}
        options["steps"] = whole_number("Steps", steps, 1, MAX_STEPS)
    except SdquantError as error:
        yield html_components.refusal(error, desk.roots), *_nothing(), *_idle(desk)
        return
    settings = desk.settings

    def work(job: Job) -> Comparison:
        others = target.shared(settings)
        with desk.engine.alone(job):
            return compare.compare(
                target.path, names, on_progress=lambda done, total, text: job.at(text, done, total), **options, **others
            )

    def show(event: Progress | Done) -> tuple[Any, ...]:
        if isinstance(event, Progress):
            return html_components.progress(event), *_nothing(), *busy
        if isinstance(event.error, Stopped):
            return html_components.card("info", "Cancelled"), *_nothing(), *_idle(desk)
        if event.error is not None:
            return html_components.refusal(event.error, desk.roots), *_nothing(), *_idle(desk)
        return *_shown(desk, event.value), *_idle(desk)

    yield from follow(desk.tasks, page, work, show)


def _nothing() -> tuple[Any, ...]:
    return tuple(gr.skip() for _ in range(10))


def _busy() -> tuple[Any, ...]:
    """Return the buttons and the head's chip while something is under way: neither button ends it."""
    later = gr.update(interactive=False, value=compare_curve.LATER)
    return gr.update(interactive=False), later, gr.update(interactive=True), gr.skip()


def _idle(desk: Desk) -> tuple[Any, ...]:
    again = gr.update(interactive=True, value=compare_curve.LABEL)
    return gr.update(interactive=True), again, gr.update(interactive=False), header.chip(desk)


def _curve_alone(desk: Desk, status: str, rows: Any, is_busy: bool) -> tuple[Any, ...]:
    """Return what the page shows of a prediction: the status, and the curve without images."""
    return status, gr.skip(), rows, *_nothing()[2:], *(_busy() if is_busy else _idle(desk))


def _schemes(selection: object) -> list[str]:
    if isinstance(selection, list) and 0 < len(selection) <= MOST and all(isinstance(one, str) for one in selection):
        return list(dict.fromkeys(selection))
    raise SettingsError("Cannot compare schemes", f"none are selected, or more than {MOST}", f"Select 1 to {MOST}")


def _shown(desk: Desk, result: Comparison) -> tuple[Any, ...]:
    """Return status, sheet, table with curve, the two files for download, and the images and widgets of the slider,
    and the thumbnails."""
    folder = desk.download_folder()
    picture, data = folder / "sdquant-compare.png", folder / "sdquant-compare.json"
    sheet = compare.sheet(result)
    sheet.save(picture)
    data.write_text(json.dumps(_public(desk, result), indent=2), encoding="utf-8")
    failed = [
        html_components.paragraph(desk.roots.clean(f"{row.label}: {row.error}")) for row in result.rows if row.error
    ]
    tried = len(result.rows) - 1
    title = f"✓ {tried} compared with the first" if not failed else f"{len(result.drawn)} of {tried} compared"
    status = html_components.card("ok" if not failed else "slow" if result.drawn else "breaks", title, *failed)
    files = (gr.update(value=str(path), interactive=True) for path in (picture, data))
    images = {row.label: row.image for row in result.rows if row.image is not None}
    names = list(images)
    first, last = names[0], names[-1]
    curves = quality_curve.curve(result.rows) + compare_curve.curve_html(result.curve)
    return (
        status, sheet, curves + _table(result), *files, images,
        gr.update(visible=len(names) > 1), gr.update(choices=names, value=first),
        gr.update(choices=names, value=last), _pair(images, first, last), compared_images(result),
    )  # fmt: skip


def _pair(images: dict[str, Any], left: str, right: str) -> Any:
    """Return the two images for the slider; leave it as it is if there is no such pair."""
    known = isinstance(images, dict) and left in images and right in images
    return (images[left], images[right]) if known else gr.skip()


def _public(desk: Desk, result: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON values, without paths outside the model folders."""
    values = result.to_dict()
    values["model"] = desk.roots.shown(result.model)
    for row in values["rows"]:
        row["error"] = desk.roots.clean(row["error"]) if row["error"] else None
    return values


def _table(result: Comparison) -> str:
    rows = [
        (
            row.label,
            size(row.bytes) if row.bytes is not None else "",
            f"{row.bytes / row.bytes_bf16:.0%}" if row.bytes is not None and row.bytes_bf16 else "",
            f"{row.load_seconds:.1f} s" if row.load_seconds is not None else "",
            f"{row.draw_seconds:.1f} s" if row.draw_seconds is not None else "",
            "identical" if row.identical else f"{row.psnr:.1f} dB" if row.psnr is not None else "",
        )
        for row in result.rows
    ]
    return html_components.html_table(("scheme", "weights", "of bf16", "load", "drawing", "PSNR"), rows)
