"""The page: a head and five tabs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import gradio as gr

from . import header
from .app_state import Desk
from .events import QUIET
from .tabs import compare, convert, generate, inspect, settings
from .theme import look
from .under_way import UnderWay

if TYPE_CHECKING:
    from .model_folders import Roots

__all__ = ["build", "look"]

TITLE = "sdquant"


def build(roots: Roots, settings_path: Path) -> gr.Blocks:
    """Build the page for the models below `roots`, with the settings in `settings_path`."""
    desk = Desk(roots, settings_path)
    with gr.Blocks(title=TITLE, analytics_enabled=False) as page:
        head = header.build_header(desk)
        tab = gr.State("Generate")
        under_way = UnderWay(desk)
        with gr.Tabs(overflow_behavior="wrap") as tabs:
            with gr.Tab("Generate", id="generate", elem_id="tab-generate"):
                wire_generate = generate.add(desk, head, under_way)
            with gr.Tab("Settings", id="settings", elem_id="tab-settings"):
                settings.add(desk, head, page, under_way)
            with gr.Tab("Inspect", id="inspect", elem_id="tab-inspect"):
                inspect.add(desk, page, under_way)
            with gr.Tab("Compare", id="compare", elem_id="tab-compare"):
                compare.add(desk, head, under_way)
            with gr.Tab(convert.TITLE, id="convert", elem_id="tab-convert"):
                convert.add(desk, head, tab, under_way)
        wire_generate(page)
        # Each, in turn: of quick ones Gradio would drop the last, and the tab that somebody sees stays empty.
        tabs.select(_name, None, tab, trigger_mode="multiple", **QUIET)
        header.wire(head, desk, page)
        under_way.wire(page, tabs, tab)
    return page


def _name(event: gr.SelectData) -> str:
    """Return the name of the tab that was chosen: what takes long is looked at when somebody sees it."""
    return str(event.value)
