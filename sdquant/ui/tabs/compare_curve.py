"""Compare's predicted curve: quality against bytes for the model at hand, with the mix of the settings on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import gradio as gr

from ...errors import SdquantError
from ...evaluation import compare
from ...models import Stopped
from .. import html_components, quality_curve
from ..app_state import waiter
from ..background_task import follow
from ..events import QUIET
from ..model_manager import Job, Progress

if TYPE_CHECKING:
    from ...planning import MixCurve
    from ..app_state import Desk

_STAGE = "reading the weights"


def add_prediction(desk: Desk, button: Any, where: Sequence[Any], out: Sequence[Any]) -> None:
    """Connect the button. out: the status, the place of the curve, the button and Cancel."""

    def start(request: gr.Request, model: str, base: Any) -> Iterator[tuple[Any, ...]]:
        yield from _run(desk, waiter(request.session_hash, "compare"), model, base)

    button.click(start, list(where), list(out), concurrency_limit=None, **QUIET)


def curve_html(curve: MixCurve | None) -> str:
    """Format a predicted curve with its table; "" for none."""
    if curve is None:
        return ""
    return quality_curve.predicted(curve) + html_components.html_table(
        ("stored as", "weights", "quality"), curve.rows()
    )


def _run(desk: Desk, page: str, model: str, base: Any) -> Iterator[tuple[Any, ...]]:
    busy = (gr.update(interactive=False), gr.update(interactive=True))
    idle = (gr.update(interactive=True), gr.update(interactive=False))
    yield html_components.progress(Progress(stage=_STAGE)), gr.skip(), *busy
    try:
        target = desk.target(model, base)
    except SdquantError as error:
        yield html_components.refusal(error, desk.roots), gr.skip(), *idle
        return
    values = target.shared(desk.settings)

    def work(job: Job) -> MixCurve:
        return compare.predict_curve(target.path, on_weights=partial(job.at, _STAGE), **values)

    for event in follow(desk, page, work):
        if isinstance(event, Progress):
            yield html_components.progress(event), gr.skip(), *busy
        elif isinstance(event.error, Stopped):
            yield html_components.card("info", "Cancelled"), gr.skip(), *idle
        elif event.error is not None:
            yield html_components.refusal(event.error, desk.roots), gr.skip(), *idle
        else:
            yield html_components.card("ok", "✓ Predicted"), curve_html(event.value), *idle
