"""The image to start from, on the Generate tab: as a whole (image to image), or only what is painted over (inpaint)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from ...errors import SdquantError
from ...models import StartImage
from ...utils.picture_files import open_picture
from .. import html_components
from ..events import QUIET
from ..validation import number

if TYPE_CHECKING:
    from ..app_state import Desk

USUAL = 0.6
_LEAST = 0.01
_SIDE = 2048  # pixels that a photo is reduced to: no model here draws more, and the page sends it to and fro


@dataclass(frozen=True, kw_only=True)
class StartPicker:
    """The widgets.

    Attributes:
        file: takes the files that are dropped on the editor or chosen in it, by the page's script: a browser opens
            fewer kinds, and says nothing of those that it cannot. message: why one cannot be used.
        take: what the script writes when an image of the gallery is dropped. selected: the number of the image of the
            gallery that is shown large.
    """

    box: gr.Accordion
    editor: gr.ImageEditor
    strength: gr.Slider
    use: gr.Button
    file: gr.File
    message: gr.HTML
    take: gr.Textbox
    selected: gr.State

    @property
    def values(self) -> list[Any]:
        """Return the widgets whose values `chosen_start` takes."""
        return [self.editor, self.strength]


def add_start(*, visible: bool) -> StartPicker:
    """Create the widgets at the current position in the page."""
    with gr.Accordion(
        "Image to image, inpaint", open=False, visible=visible, elem_id="start-box", elem_classes="sq-later"
    ) as box:
        gr.HTML(
            html_components.note("Paint over what is to be drawn anew; without paint, all of it is."), padding=False
        )
        editor = gr.ImageEditor(
            label="Start image",
            type="pil", format="png", sources=["upload", "clipboard"], transforms=(), layers=False, height=340,
            brush=gr.Brush(default_size=16, colors=["#ff3366"], color_mode="fixed"), elem_id="start",
        )  # fmt: skip
        message = gr.HTML("", elem_id="start-said", padding=False)
        strength = gr.Slider(
            _LEAST, 1, value=USUAL, step=0.01, label="Denoising strength", info="How much of it changes",
            elem_id="strength",
        )  # fmt: skip
        use = gr.Button("Use the image that is shown", size="sm", elem_id="start-use")
    take = gr.Textbox("", label="Dropped", elem_id="start-take", elem_classes="sq-unseen", max_length=20)
    file = gr.File(label="Start image file", type="filepath", elem_id="start-file", elem_classes="sq-unseen")
    return StartPicker(
        box=box, editor=editor, strength=strength, use=use, file=file, message=message, take=take, selected=gr.State(0)
    )


def wire_start(desk: Desk, picker: StartPicker, gallery: gr.Gallery, images: gr.State, image: gr.Image) -> None:
    """Connect the events: an image of the gallery that is chosen is shown large, and goes into the editor by the
    button, or by dropping it there."""

    def select(event: gr.SelectData, images: object) -> tuple[int, Any]:
        number = event.index if isinstance(event.index, int) else 0
        known = images if isinstance(images, list) else []
        if not 0 <= number < len(known):
            return 0, gr.skip()
        picture, caption = known[number]
        return number, gr.update(value=picture, label=f"Image: {caption}")

    gallery.select(select, images, [picker.selected, image], trigger_mode="multiple", **QUIET)
    shown = [picker.editor, picker.message]
    picker.use.click(_image, [images, picker.selected], shown, **QUIET)
    picker.take.change(_dropped, [images, picker.take], shown, **QUIET)
    picker.file.upload(lambda path: (*_from_file(desk, path), None), picker.file, [*shown, picker.file], **QUIET)


def _from_file(desk: Desk, path: str | None) -> tuple[Any, Any]:
    """Return the picture of a file, and why there is none."""
    if path is None:
        return gr.skip(), gr.skip()
    try:
        image = open_picture(path, f"Cannot start from {Path(path).name[:80]}")
    except SdquantError as error:
        return gr.skip(), html_components.refusal(error, desk.roots)
    image.thumbnail((_SIDE, _SIDE))
    return image, ""


def _image(images: object, number: object) -> tuple[Any, Any]:
    """Return an image of the gallery, whose entries are images with captions; no change if there is none.

    The second value is what stands below the editor.
    """
    known = images if isinstance(images, list) else []
    if not isinstance(number, int) or isinstance(number, bool) or not known:
        return gr.skip(), html_components.note("There is no image yet: generate one first.")
    return known[number if 0 <= number < len(known) else 0][0].convert("RGB"), ""


def _dropped(images: object, command: object) -> tuple[Any, Any]:
    first = str(command).partition(" ")[0]
    return _image(images, int(first)) if first.isascii() and first.isdigit() else (gr.skip(), gr.skip())


def chosen_start(values: Sequence[Any]) -> StartImage | None:
    """Return the start image, with a mask if something is painted over; None without an image.

    Raises:
        SettingsError: the strength is no number from 0.01 to 1.
    """
    editor, strength = values
    image = editor.get("background") if isinstance(editor, dict) else None
    if image is None:
        return None
    mask = _mask(editor.get("layers") or [], image.size)
    return StartImage(image=image, strength=number("Denoising strength", strength, _LEAST, 1), mask=mask)


def _mask(layers: Sequence[Any], size: tuple[int, int]) -> Any:
    """Return what is painted in white on black; None for nothing."""
    from PIL import Image, ImageChops

    mask = Image.new("L", size, 0)
    for layer in layers:
        painted = layer.convert("RGBA").getchannel("A").resize(size, Image.Resampling.NEAREST)
        mask = ImageChops.lighter(mask, painted.point(lambda value: 255 if value else 0))
    return mask if mask.getbbox() is not None else None
