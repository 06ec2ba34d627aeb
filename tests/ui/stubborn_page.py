"""A page whose one job is inside of torch, with a file half-written, and never looks whether it was cancelled.

Served by `python -m tests.ui.stubborn_page` as `sdquant ui` would.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdquant import cli
from sdquant.ui.background_task import follow
from sdquant.utils.atomic_write import whole_file

if TYPE_CHECKING:
    from sdquant.ui.model_folders import Roots
    from sdquant.ui.model_manager import Job

from .small_page import look

__all__ = ["build", "look"]


def build(roots: Roots, settings: Path) -> Any:
    """The page."""
    import gradio as gr
    import torch

    from sdquant.ui.app_state import Desk

    desk = Desk(roots, settings)

    def work(job: Job) -> None:
        numbers = torch.ones(700, 700)
        with whole_file(roots.folders[1] / "half.bin") as file:
            file.write(b"half")
            file.flush()
            while True:
                numbers @ numbers

    def start() -> Iterator[str]:
        for event in follow(desk.tasks, "page", work):
            yield str(event)

    with gr.Blocks(title="stubborn", analytics_enabled=False) as page:
        gr.Button("Work").click(start, None, gr.Textbox(), api_name="work")
    return page


if __name__ == "__main__":
    sys.modules["sdquant.ui.app"] = sys.modules["__main__"]
    raise SystemExit(cli.main(["ui", "--no-browser", *sys.argv[1:]]))
