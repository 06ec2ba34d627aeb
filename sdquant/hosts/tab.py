"""The tab: the last load and its quantization, and the inspection of files in the host's folders.

Uses only the common API of gradio 3.41, 3.43 and 4.40: Blocks, Row, Dropdown, Button, HTML, load, click, update.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..errors import SdquantError
from ..utils.byte_sizes import size
from . import folders

if TYPE_CHECKING:
    from ..models import Detected
    from .status import Status

TITLE, ID = "sdquant", "sdquant_tab"


def build(status: Status) -> list[tuple[Any, str, str]]:
    """Build the tab as hosts expect it: blocks, title, id."""
    import gradio as gr

    with gr.Blocks(analytics_enabled=False) as blocks:
        shown = gr.HTML(value=status_html(status))
        again = gr.Button(value="Refresh")
        with gr.Row():
            file = gr.Dropdown(label="File or folder of a model", choices=_names(), value=None)
            look = gr.Button(value="Inspect")
        result = gr.HTML(value="")

        def refresh() -> tuple[str, Any]:
            return status_html(status), gr.update(choices=_names())

        blocks.load(fn=refresh, inputs=[], outputs=[shown, file])  # a page that is opened is older than this build
        again.click(fn=refresh, inputs=[], outputs=[shown, file])
        look.click(fn=inspected_html, inputs=[file], outputs=[result])
    return [(blocks, TITLE, ID)]


def build_refusal(text: str) -> list[tuple[Any, str, str]]:
    """Build the tab of an extension that cannot run: why, and what to do."""
    import gradio as gr

    with gr.Blocks(analytics_enabled=False) as blocks:
        gr.HTML(value=f"<p><b>sdquant is not active.</b> {html.escape(text)}</p>")
    return [(blocks, TITLE, ID)]


def status_html(status: Status) -> str:
    """Format the host, the last load, and what works in this host, as HTML."""
    host, last_load = status.host, status.seen
    lines = [f"<h3>{html.escape(host.title)}</h3>"]
    if last_load.error is not None:
        lines.append(f"<p><b>The last load failed.</b> {html.escape(last_load.error)}</p>")
    if last_load.model is None:
        lines.append("<p>No model was loaded yet.</p>")
    else:
        contents = f" ({html.escape(last_load.found)})" if last_load.found else ""
        lines.append(f"<p>Last load: <b>{html.escape(last_load.model)}</b>{contents}</p>")
    if last_load.parts:
        rows = [(row.component, row.scheme or "none", row.how, size(row.bytes)) for row in last_load.parts.values()]
        lines.append(_table(("component", "quantization", "how", "weights"), rows))
    lines += [f"<p>{html.escape(text)}.</p>" for text in host.can]
    lines += [f"<p><b>Not here:</b> {html.escape(text)}.</p>" for text in host.cannot]
    return "".join(lines)


def inspected_html(name: Any) -> str:
    """Format the detected contents of a file, or the error, as HTML."""
    from ..models import detect

    if not name:
        return "<p>Pick a file or folder.</p>"
    places = folders.roots()
    try:
        return _detected_html(str(name), detect(places.resolve(name)))
    except SdquantError as error:
        return f"<p>{html.escape(places.clean(str(error)))}</p>"


def _detected_html(name: str, detected: Detected) -> str:
    rows = [
        (part, one.container, one.family or "unknown", one.quant or "none", str(one.tensors), size(one.bytes))
        for part, one in (detected.parts or {detected.component or "": detected}).items()
    ]
    lines = [f"<p><b>{html.escape(name)}</b></p>"]
    lines.append(_table(("component", "container", "family", "quantization", "tensors", "weights"), rows))
    evidence = [line for one in (detected.parts or {"": detected}).values() for line in one.evidence]
    lines += [f"<p>{html.escape(folders.clean(text))}</p>" for text in (*evidence, *detected.warnings)]
    return "".join(lines)


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _names() -> list[str]:
    return [row.name for row in folders.roots().files()]
