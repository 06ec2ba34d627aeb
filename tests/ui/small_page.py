"""A page of the kinds of parts that the real one has, served by `python -m tests.ui.small_page` as `sdquant ui` would.

It is small, loads no model, and names what it is given back, so that the tests of the server can look for leaks.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdquant import cli
from sdquant.errors import SdquantError
from sdquant.ui.html_components import escape

if TYPE_CHECKING:
    from sdquant.ui.model_folders import Roots


def build(roots: Roots, settings: Path) -> Any:
    """The page."""
    import gradio as gr

    def look(name: str) -> str:
        try:
            return f"<p>{escape(roots.shown(roots.resolve(name)))}</p>"
        except SdquantError as error:
            return f"<p>{escape(roots.clean(str(error)))}</p>"

    def draw() -> Any:
        from PIL import Image

        return Image.new("L", (8, 8))

    def size(file: str) -> str:
        return str(len(open(file, "rb").read()))

    def slow() -> str:
        time.sleep(60)
        return "slept"

    with gr.Blocks(title="small", analytics_enabled=False) as page:
        name = gr.Textbox(label="Model")
        seen = gr.HTML()
        gr.Button("Look").click(look, name, seen, api_name="look")
        picture = gr.Image(label="Picture")
        gr.Button("Draw").click(draw, None, picture, api_name="draw")
        told = gr.Textbox(label="Bytes")
        given = gr.File(label="Given")
        given.upload(size, given, told, api_name="size", queue=False)
        gr.Button("Sleep").click(slow, None, told, api_name="slow")
        gr.Button("Here").click(None, None, told, js="() => 'by script'")
    return page


def look() -> dict[str, Any]:
    """What is passed to Gradio beside the page."""
    return {"css": ".small { color: inherit }"}


if __name__ == "__main__":
    # The command itself, with this page in place of the real one.
    sys.modules["sdquant.ui.app"] = sys.modules["__main__"]
    raise SystemExit(cli.main(["ui", "--no-browser", *sys.argv[1:]]))
