"""Which folder is a ComfyUI, and where the nodes go in it. No torch."""

from __future__ import annotations

from pathlib import Path

NODES = Path(__file__).parent / "comfyui"
_MARKS = ("main.py", "nodes.py", "folder_paths.py", "comfy/sd.py", "custom_nodes")


def is_comfyui(folder: Path) -> bool:
    """Whether the folder is ComfyUI's own, with `main.py` in it."""
    return all((folder / mark).exists() for mark in _MARKS)


def target(folder: Path) -> Path:
    """Where a copy of `NODES` belongs in a ComfyUI folder."""
    return folder / "custom_nodes" / "sdquant"
