"""Generate: a prompt, an image, and next to it the model, the settings, and the time and memory that it took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import gradio as gr

from ...errors import SdquantError
from ...models import Stopped
from .. import header, html_components
from ..background_task import Done, follow
from ..model_manager import Drawing, GeneratedImage, Job, Progress
from ..validation import MAX_PROMPT, MAX_SEED, number, prompt_of, whole_number

if TYPE_CHECKING:
    from ..app_state import Desk
    from ..header import Head

MAX_STEPS = 200
MAX_SIDE = 4096
MAX_GUIDANCE = 100
_QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
_IDLE = html_components.card(
    "info", "Nothing drawn yet", html_components.paragraph("Write a prompt and press Enter, or Draw.")
)
_STOPPED = html_components.card(
    "info", "Cancelled", html_components.paragraph("The model is as it was; draw again at any time.")
)


def add(desk: Desk, head: Head) -> None:
    """Create the tab's widgets and connect their events. Gradio's number limits are unused: its errors offer no fix."""
    with gr.Row():
        with gr.Column(scale=3):
            prompt = gr.Textbox(
                "a handwritten seven", label="Prompt", lines=1, max_lines=6, max_length=MAX_PROMPT, elem_id="prompt"
            )
            with gr.Row():
                draw = gr.Button("Draw", variant="primary", scale=3, elem_id="draw")
                cancel = gr.Button("Cancel", variant="stop", interactive=False, min_width=90, elem_id="cancel")
            with gr.Row():
                steps = gr.Slider(1, MAX_STEPS, value=20, step=1, label="Steps", elem_id="steps")
                seed = gr.Number(0, label="Seed", elem_id="seed")
            with gr.Accordion("Size and guidance", open=False), gr.Row():
                width = gr.Number(0, label="Width", info="0: the model's own", elem_id="width")
                height = gr.Number(0, label="Height", info="0: the model's own", elem_id="height")
                guidance = gr.Number(-1, label="Guidance", info="-1: the pipeline's own", elem_id="guidance")
        with gr.Column(scale=4):
            status = gr.HTML(_IDLE, elem_id="status")
            image = gr.Image(
                label="Image", type="pil", format="png", interactive=False, height=384, elem_id="image",
                elem_classes="sq-image", buttons=["download", "fullscreen"],
            )  # fmt: skip
            facts = gr.HTML("", elem_id="facts")

    def start(request: gr.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
        yield from _draw(desk, str(request.session_hash), values)

    def stop(request: gr.Request) -> None:
        desk.cancel(str(request.session_hash))

    gr.on(
        [draw.click, prompt.submit],
        start,
        [head.model, head.base, prompt, steps, seed, width, height, guidance],
        [status, image, facts, draw, cancel, head.chip],
        concurrency_limit=None,
        trigger_mode="once",
        **_QUIET,
    )
    cancel.click(stop, None, None, queue=False, **_QUIET)


def _draw(desk: Desk, page: str, values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Draw, and yield updates: status, image, facts, the two buttons, the head's chip."""
    model, base, prompt, steps, seed, width, height, guidance = values
    nothing = (gr.skip(), gr.skip())
    yield html_components.progress(Progress(stage="loading")), *nothing, *_buttons(busy=True), gr.skip()
    try:
        drawing = Drawing(
            prompt=prompt_of(prompt),
            steps=whole_number("Steps", steps, 1, MAX_STEPS),
            seed=whole_number("Seed", seed, 0, MAX_SEED),
            width=whole_number("Width", width, 0, MAX_SIDE) or None,
            height=whole_number("Height", height, 0, MAX_SIDE) or None,
            guidance=_guidance(guidance),
        )
        target = desk.target(model, base)
    except SdquantError as error:
        yield html_components.refusal(error, desk.roots), *nothing, *_buttons(busy=False), gr.skip()
        return
    settings = desk.settings

    def work(job: Job) -> GeneratedImage:
        return desk.engine.draw(target.request(settings), drawing, job)

    for event in follow(desk, page, work):
        if isinstance(event, Progress):
            yield html_components.progress(event), *nothing, *_buttons(busy=True), gr.skip()
        else:
            yield *_ended(desk, event), *_buttons(busy=False), header.chip(desk)


def _ended(desk: Desk, done: Done) -> tuple[Any, Any, Any]:
    """Return status, image and facts at the end of a drawing."""
    if isinstance(done.error, Stopped):
        return _STOPPED, gr.skip(), gr.skip()
    if done.error is not None:
        return html_components.refusal(done.error, desk.roots), gr.skip(), gr.skip()
    title = f"✓ Drawn in {done.value.seconds:.1f} s"
    return (
        html_components.card("ok", title),
        done.value.image,
        html_components.drawn(done.value, desk.roots, resident()),
    )


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    import psutil  # type: ignore[import-untyped,unused-ignore]  # required by accelerate, hence always there

    return int(psutil.Process().memory_info().rss)


def _guidance(value: object) -> float | None:
    """Check the guidance scale; None for -1 or an empty field, which use the pipeline's own."""
    if value is None or value == -1:
        return None
    return number("Guidance", value, 0, MAX_GUIDANCE)


def _buttons(*, busy: bool) -> tuple[Any, Any]:
    return gr.update(interactive=not busy), gr.update(interactive=busy)
