"""The head of the page: the choice of the model for all tabs, and the loaded model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gradio as gr

from . import html_components
from .events import QUIET, ask

if TYPE_CHECKING:
    from .app_state import Desk

TITLE = (
    '<div class="sq-brand"><b role="heading" aria-level="1">sdquant</b>'
    "<span>quantization for diffusion models</span></div>"
)


@dataclass(frozen=True, kw_only=True)
class Head:
    """The widgets of the head.

    Attributes:
        model, base: a name, and names of what it is used with, as `Desk.target` takes them. again: searches for
            models again. chip: the model in memory. compared: the `ComparedImages` of the page's last comparison.
        visits: what the page's script writes when somebody comes back to the page.
    """

    model: gr.Dropdown
    base: gr.Dropdown
    again: gr.Button
    chip: gr.HTML
    compared: gr.State
    visits: gr.Textbox


def build_header(desk: Desk) -> Head:
    """Create the head at the current position in the page."""
    models = desk.models()
    first = models[0] if models else None
    with gr.Row(elem_classes="sq-head", equal_height=True):
        gr.HTML(TITLE, padding=False)
        model = gr.Dropdown(
            models,
            value=first,
            label="Model",
            info="Folders and files below the model folders",
            scale=1,
            elem_id="model",
        )
        # Off for a pipeline, and not hidden: what is below would move.
        base = gr.Dropdown(
            desk.companions(first),
            value=_beginning(desk, first),
            multiselect=True,
            label="Together with",
            info="For a lone file: pipeline, T5, VAE, config",
            interactive=_is_lone(desk, first),
            scale=1,
            elem_id="base",
        )
        again = gr.Button("↻ Refresh", size="sm", scale=0, min_width=120, elem_id="again")
    shown = gr.HTML(chip(desk), padding=False, elem_id="in-memory")
    visits = gr.Textbox("", label="Seen", elem_id="page-seen", elem_classes="sq-unseen", max_length=20)
    return Head(model=model, base=base, again=again, chip=shown, compared=gr.State(None), visits=visits)


def wire(head: Head, desk: Desk, page: gr.Blocks) -> None:
    """Connect the events of the head."""

    # A model that is chosen again, as when the page is drawn anew, takes no companions away that were chosen since.
    last_model = gr.State("")

    def picked(model: str, before: str) -> tuple[Any, str]:
        if model == before:
            return gr.skip(), model
        return gr.update(
            choices=desk.companions(model), value=_beginning(desk, model), interactive=_is_lone(desk, model)
        ), model

    def again(model: str, others: list[str] | None) -> tuple[Any, Any]:
        models = desk.models()
        model = model if model in models else next(iter(models), "")
        companions = desk.companions(model)
        kept = [one for one in others or () if one in {name for _, name in companions}]
        return (
            gr.update(choices=models, value=model or None),
            gr.update(choices=companions, value=kept or _beginning(desk, model)),
        )

    def arrived(model: str) -> tuple[str, Any, Any]:
        # Not the values: somebody may have chosen meanwhile.
        return chip(desk), gr.update(choices=desk.models()), gr.update(choices=desk.companions(model))

    page.load(arrived, head.model, [head.chip, head.model, head.base], **QUIET)
    # Another page may have loaded another model meanwhile.
    ask([head.visits.change], lambda: chip(desk), None, head.chip, queue=False)
    ask([head.model.change], picked, [head.model, last_model], [head.base, last_model], queue=False)
    head.again.click(again, [head.model, head.base], [head.model, head.base], **QUIET)


def _is_lone(desk: Desk, model: str | None) -> bool:
    """Return whether a model lacks what "Together with" gives: it is no whole pipeline."""
    return bool(model) and not desk.is_pipeline(str(model))


def _beginning(desk: Desk, model: str | None) -> list[str]:
    """Return what a model is used with unless somebody chooses."""
    base = desk.base_for(str(model)) if _is_lone(desk, model) else None
    return [base] if base else []


def chip(desk: Desk) -> str:
    """Format the model in memory as a line of HTML."""
    model = desk.engine.held
    if model is None:
        return html_components.chip("No model is loaded.", "The first image loads one.")
    return html_components.chip(
        desk.roots.shown(model.plan.path), f"loaded: {html_components.scheme_words(model.plan)}"
    )
