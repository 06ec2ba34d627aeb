"""A page of the kinds of parts that the real one has, served by `python -m tests.ui.small_page [FOLDER ...]`.

It is small, loads no model, and names what it is given back, so that the tests of the server can look for leaks.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from sdquant.errors import SdquantError
from sdquant.ui.html import escape
from sdquant.ui.roots import Roots
from sdquant.ui.server import serve


def build(roots: Roots) -> Any:
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
        given.upload(size, given, told, api_name="size")
        gr.Button("Sleep").click(slow, None, told, api_name="slow")
        gr.Button("Here").click(None, None, told, js="() => 'by script'")
    return page


def main(folders: list[str]) -> None:
    """Serve it at any port, and say which."""
    roots = Roots(folders)
    serve(lambda: build(roots), port=0, open_browser=False)


if __name__ == "__main__":
    main(sys.argv[1:])
