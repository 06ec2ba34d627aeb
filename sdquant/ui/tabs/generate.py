"""Generate: a prompt, images, and next to them the model, the settings, and the time and memory that they took."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import gradio as gr

from ...errors import SdquantError
from ...models import Stopped, starts_from_image, traits
from .. import header, html_components, infotext
from ..app_state import waiter
from ..background_task import Done, follow
from ..events import QUIET, ask
from ..model_manager import Drawing, GeneratedImage, Job, Progress
from ..validation import MAX_PROMPT, MAX_SEED, number, prompt_of, text_of, whole_number
from . import lora_picker, picture_settings
from . import start_image as start_picker

if TYPE_CHECKING:
    from ...models import Traits
    from ..app_state import Desk
    from ..header import Head
    from ..under_way import UnderWay

MAX_STEPS = 200
MAX_SIDE = 4096
MAX_GUIDANCE = 100
MAX_COUNT = 8  # images at once
LAST = 12  # images that the gallery keeps
OWN = "the model's own"
_IMAGE = "Image"
_LIMITS = picture_settings.Limits(
    prompt=MAX_PROMPT, steps=MAX_STEPS, seed=MAX_SEED, side=MAX_SIDE, guidance=MAX_GUIDANCE, own=OWN
)
_IDLE = html_components.card(
    "info", "Nothing generated yet", html_components.paragraph("Write a prompt and press Enter, or Generate.")
)
_STOPPED = html_components.card(
    "info", "Cancelled", html_components.paragraph("The model is as it was; generate again at any time.")
)


def add(desk: Desk, head: Head, under_way: UnderWay) -> Callable[[gr.Blocks], None]:
    """Create the tab's widgets and connect their events. Gradio's number limits are unused: its errors offer no fix.

    Returns:
        A function that connects what follows the choice of the model, after the settings.
    """
    with gr.Row(elem_classes="sq-studio"):  # on a phone, what comes of it stands before what is chosen rarely
        with gr.Column(scale=3):
            prompt = gr.Textbox(
                "a handwritten seven", label="Prompt", lines=1, max_lines=6, max_length=MAX_PROMPT, elem_id="prompt"
            )
            negative = gr.Textbox(
                "", label="Negative prompt", lines=1, max_lines=6, max_length=MAX_PROMPT, visible=False,
                elem_id="negative",
            )  # fmt: skip
            with gr.Row():
                draw = gr.Button("Generate", variant="primary", scale=3, elem_id="draw")
                cancel = gr.Button("Cancel", variant="stop", interactive=False, min_width=90, elem_id="cancel")
            with gr.Row(elem_classes="sq-later"):
                steps = gr.Slider(1, MAX_STEPS, value=20, step=1, label="Steps", elem_id="steps", min_width=240)
                seed = gr.Number(0, label="Seed", elem_id="seed")
            with gr.Row(elem_classes="sq-later"):
                sampler = gr.Dropdown([OWN], value=OWN, label="Sampler", elem_id="sampler", min_width=240)
                guidance = gr.Number(
                    -1, label="CFG scale", info="-1: the pipeline's own", elem_id="guidance", min_width=160
                )
            start_image = start_picker.add_start(visible=_starts_from_image(desk, head.model.value, head.base.value))
            loras = lora_picker.add_loras(desk, head.model.value)
            with gr.Accordion("Size and batch", open=False, elem_classes="sq-later"), gr.Row():
                width = gr.Number(0, label="Width", info="0: the model's own", elem_id="width")
                height = gr.Number(0, label="Height", info="0: the model's own", elem_id="height")
                count = gr.Number(1, label="Batch size", info="images at once", elem_id="count")
            dropped = gr.File(
                label="Take the settings of a generated PNG", type="filepath", height=170, elem_id="dropped",
                elem_classes="sq-later",
            )  # fmt: skip
        with gr.Column(scale=4):
            status = gr.HTML(_IDLE, elem_id="status")
            image = gr.Image(
                label=_IMAGE, type="pil", format="png", interactive=False, height=384, elem_id="image",
                elem_classes="sq-image", buttons=["download", "fullscreen"],
            )  # fmt: skip
            facts = gr.HTML("", elem_id="facts")
            gallery = gr.Gallery(
                label="Last images", columns=6, height=150, object_fit="contain", interactive=False, format="png",
                visible=False, elem_id="gallery", elem_classes="sq-image", buttons=[], allow_preview=False,
            )  # fmt: skip
    before = gr.State([])
    fields = [
        prompt,
        negative,
        steps,
        seed,
        width,
        height,
        guidance,
        sampler,
        count,
        *start_image.values,
        *loras.values,
    ]

    def start(request: gr.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
        yield from _draw(desk, waiter(request.session_hash, "generate"), values)

    def stop(request: gr.Request) -> None:
        desk.tasks.cancel(waiter(request.session_hash, "generate"))

    outputs = [status, image, facts, gallery, before, start_image.selected, draw, cancel, head.chip]
    gr.on(
        [draw.click, prompt.submit, negative.submit],
        start,
        [before, head.model, head.base, *fields],
        outputs,
        concurrency_limit=None,
        trigger_mode="once",
        **QUIET,
    )
    under_way.show("generate", outputs)
    cancel.click(stop, None, None, queue=False, **QUIET)
    dropped.upload(
        lambda path, model, base, *shown: _taken(desk, path, model, base, shown),
        [dropped, head.model, head.base, *fields],
        [status, dropped, *loras.rows, *fields],
        **QUIET,
    )

    start_picker.wire_start(desk, start_image, gallery, before, image)

    def wire(page: gr.Blocks) -> None:
        lora_picker.wire_loras(desk, head, loras, page)
        ask(
            [page.load, head.model.change, head.base.change],
            lambda model, base, sampler: _traits(desk, model, base, sampler),
            [head.model, head.base, sampler],
            [negative, sampler, start_image.box],
        )

    return wire


def _starts_from_image(desk: Desk, model: str, base: str) -> bool:
    """Return whether a model takes a start image; False if it cannot be opened."""
    try:
        target = desk.target(model, base)
        return starts_from_image(target.base or target.path)
    except SdquantError:
        return False


def _known(desk: Desk, model: str, base: str) -> Traits:
    """Return the traits of a model; those of none if it cannot be opened, which a drawing explains."""
    from ...models import Traits

    try:
        target = desk.target(model, base)
        return traits(target.base or target.path)
    except SdquantError:
        return Traits()


def _traits(desk: Desk, model: str, base: str, sampler: str) -> tuple[Any, Any, Any]:
    """Return the updates of negative prompt, sampler and start image for a model."""
    known = _known(desk, model, base)
    choices = [OWN, *known.samplers]
    kept = {} if sampler in choices else {"value": OWN}  # one that stays is not sent: another may be chosen meanwhile
    return gr.update(visible=known.negative), gr.update(choices=choices, **kept), gr.update(visible=known.image)


def _draw(desk: Desk, page: str, values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Draw, and yield updates: status, image, facts, gallery, its images, the chosen one, two buttons, the chip."""
    before, model, base, *shown = values
    nothing = (gr.skip(),) * 5
    yield html_components.progress(Progress(stage="loading")), *nothing, *_buttons(busy=True), gr.skip()
    try:
        target = desk.target(model, base)
        drawing = _drawing(desk, shown, traits(target.base or target.path))
    except SdquantError as error:
        yield html_components.refusal(error, desk.roots), *nothing, *_buttons(busy=False), gr.skip()
        return
    settings = desk.settings

    def work(job: Job) -> GeneratedImage:
        return desk.engine.draw(target.request(settings), drawing, job)

    def show(event: Progress | Done) -> tuple[Any, ...]:
        if isinstance(event, Progress):
            return html_components.progress(event), *nothing, *_buttons(busy=True), gr.skip()
        return *_ended(desk, event, before), *_buttons(busy=False), header.chip(desk)

    yield from follow(desk.tasks, page, work, show)


def _drawing(desk: Desk, shown: Sequence[Any], known: Traits) -> Drawing:
    """Check the values of the widgets. A negative prompt or image that the page does not show counts for nothing."""
    prompt, negative, steps, seed, width, height, guidance, sampler, count, editor, strength, *chosen = shown
    text, loras = lora_picker.chosen_loras(desk, chosen, prompt_of(prompt))
    return Drawing(
        prompt=prompt_of(text),
        loras=loras,
        start=start_picker.chosen_start((editor, strength)) if known.image else None,
        negative=text_of("The negative prompt", negative) if known.negative else "",
        steps=whole_number("Steps", steps, 1, MAX_STEPS),
        seed=whole_number("Seed", seed, 0, MAX_SEED),
        width=whole_number("Width", width, 0, MAX_SIDE) or None,
        height=whole_number("Height", height, 0, MAX_SIDE) or None,
        guidance=_guidance(guidance),
        sampler=None if sampler in (None, OWN) else text_of("The sampler", sampler),
        count=whole_number("Batch size", count, 1, MAX_COUNT),
    )


def _ended(desk: Desk, done: Done, before: list[Any]) -> tuple[Any, ...]:
    """Return status, image, facts, gallery, its images and the chosen one at the end of a drawing."""
    nothing = (gr.skip(),) * 5
    if isinstance(done.error, Stopped):
        return _STOPPED, *nothing
    if done.error is not None:
        return html_components.refusal(done.error, desk.roots), *nothing
    result: GeneratedImage = done.value
    new = picture_settings.with_settings(desk, result)
    last = [*new, *(before if isinstance(before, list) else [])][:LAST]
    return (
        html_components.card("ok", f"✓ Generated in {result.seconds:.1f} s"),
        gr.update(value=result.images[0], label=_IMAGE),
        html_components.drawn(result, desk.roots, resident()),
        gr.update(value=last, visible=True, selected_index=None),
        last,
        0,
    )


def _taken(desk: Desk, path: str | None, model: str, base: str, shown: Sequence[Any]) -> tuple[Any, ...]:
    """Return status, the emptied file box, the LoRAs' rows, and the widgets with the settings of a picture.

    Not taken: numbers outside the limits, a sampler that the model at hand lacks, LoRAs that there are no files of.
    """
    rows = (gr.skip(),) * lora_picker.MOST
    try:
        if path is None:
            return (gr.skip(), gr.skip(), *rows, *(gr.skip() for _ in shown))
        settings = infotext.read(path)
    except SdquantError as error:
        return html_components.refusal(error, desk.roots), None, *rows, *(gr.skip() for _ in shown)
    settings["Prompt"], loras = infotext.split_loras(settings["Prompt"])
    samplers = (OWN, *_known(desk, model, base).samplers)
    new = picture_settings.widget_values(settings, samplers, _LIMITS, gr.skip())
    visible, values, missing = lora_picker.taken_loras(desk, loras)
    sampler = settings.get("Sampler") or OWN
    lines = [", ".join(f"{name} {value}" for name, value in settings.items() if "rompt" not in name)]
    lines[0] += "".join(f", LoRA {name} {strength:g}" for name, strength in loras if name not in missing)
    if sampler not in samplers:
        lines.append(f"Not taken: the sampler {sampler}, which the chosen model does not have.")
    if missing:
        lines.append(f"Not taken: {', '.join(missing)}. No LoRA file below the model folders has that name.")
    card = html_components.card("info", "Settings taken from the picture", *map(html_components.paragraph, lines))
    strength = picture_settings.denoising(settings, gr.skip())
    return card, None, *visible, *new, gr.skip(), strength, *values


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    import psutil  # type: ignore[import-untyped,unused-ignore]  # required by accelerate, hence always there

    return int(psutil.Process().memory_info().rss)


def _guidance(value: object) -> float | None:
    """Check the guidance scale; None for -1 or an empty field, which use the pipeline's own."""
    if value is None or value == -1:
        return None
    return number("CFG scale", value, 0, MAX_GUIDANCE)


def _buttons(*, busy: bool) -> tuple[Any, Any]:
    return gr.update(interactive=not busy), gr.update(interactive=busy)
