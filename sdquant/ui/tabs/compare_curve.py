"""Compare's predicted curve: quality against bytes for the model at hand, with the mix of the settings on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import gradio as gr

from ...errors import SdquantError
from ...evaluation import compare
from ...models import Stopped
from .. import html_components, quality_curve
from ..background_task import Done, follow
from ..model_manager import Job, Progress

if TYPE_CHECKING:
    from ...planning import MixCurve
    from ..app_state import Desk

LABEL = "Predict the curve"
LATER = "Predict the curve, when this is done"
_STAGE = "reading the weights"


def curve_html(curve: MixCurve | None) -> str:
    """Format a predicted curve with its table; "" for none."""
    if curve is None:
        return ""
    return quality_curve.predicted(curve) + html_components.html_table(
        ("stored as", "weights", "quality"), curve.rows()
    )


def predict(
    desk: Desk, page: str, model: str, base: Any, format_event: Callable[[str, Any, bool], tuple[Any, ...]]
) -> Iterator[tuple[Any, ...]]:
    """Predict the curve, and yield what `format_event` makes of the status, the curve, and whether it is under way."""
    yield format_event(html_components.progress(Progress(stage=_STAGE)), gr.skip(), True)
    try:
        target = desk.target(model, base)
    except SdquantError as error:
        yield format_event(html_components.refusal(error, desk.roots), gr.skip(), False)
        return
    values = target.shared(desk.settings)

    def work(job: Job) -> MixCurve:
        return compare.predict_curve(target.path, on_weights=partial(job.at, _STAGE), **values)

    def show(event: Progress | Done) -> tuple[Any, ...]:
        if isinstance(event, Progress):
            return format_event(html_components.progress(event), gr.skip(), True)
        if isinstance(event.error, Stopped):
            return format_event(html_components.card("info", "Cancelled"), gr.skip(), False)
        if event.error is not None:
            return format_event(html_components.refusal(event.error, desk.roots), gr.skip(), False)
        return format_event(html_components.card("ok", "✓ Predicted"), curve_html(event.value), False)

    yield from follow(desk.tasks, page, work, show)
