"""Questions that a page asks the server after each of several events, of which only the last answer matters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}


def ask(
    triggers: Sequence[Any], function: Callable[..., Any], inputs: Any, outputs: Any, *, queue: bool = True
) -> gr.events.Dependency:
    """Call `function` after any of these events; once more afterwards if others have come while it ran.

    Gradio's own `trigger_mode="always_last"` repeats the whole event, with all that other functions do after it: a
    choice that somebody has made since was lost, and two functions that are slower than the next event let each other
    run for ever. Of an event of its own, which `then` is, there is nothing else to repeat.

    Returns:
        What `function` has done, for another `then`.
    """
    first = gr.on(list(triggers), None, None, None, js="() => []", **QUIET)
    return first.then(function, inputs, outputs, trigger_mode="always_last", queue=queue, **QUIET)
