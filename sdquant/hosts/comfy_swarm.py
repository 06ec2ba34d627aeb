"""The node by which SwarmUI's Generate tab loads files in nf4 and fp4, where no other package has it.

SwarmUI is a ComfyUI inside. It tells such files by their tensors, and writes a workflow with the node UNETLoaderNF4 of
ComfyUI_bitsandbytes_NF4, which was last changed in August 2024
(src/BuiltinExtensions/ComfyUIBackend/WorkflowGeneratorModelSupport.cs, SwarmUI 0.9.8, 062407c7 of 2026-08-21).
"""

from __future__ import annotations

from typing import Any

from . import comfy_nodes, comfy_paths, display
from .comfy_nodes import Input, Node

ID = "UNETLoaderNF4"


def _load(unet_name: str, bnb_dtype: str = "nf4") -> Any:
    from .comfy_load import AS_FOUND, load

    return load(comfy_paths.diffusion_model(unet_name), AS_FOUND)


_NODE = Node(
    id=ID,
    title="Load NF4 Diffusion Model (sdquant, for SwarmUI)",
    summary="Loads a diffusion model in nf4 or fp4 where SwarmUI asks for it. In workflows of your own, use Load "
    "Diffusion Model (sdquant), which reads all other forms, too.",
    inputs=(
        Input(
            name="unet_name",
            type="COMBO",
            choices=comfy_paths.diffusion_models,
            tooltip="A .safetensors file in models/diffusion_models",
        ),
        Input(
            name="bnb_dtype",
            type="COMBO",
            choices=lambda: ["nf4", "fp4"],
            default="nf4",
            tooltip="What SwarmUI takes the file for; the file itself says what it is",
            optional=True,
        ),
    ),
    outputs=comfy_nodes.NODES[0].outputs,
    run=_load,
    aliases=("swarmui", "nf4"),
)


def nodes() -> tuple[Node, ...]:
    """Return all nodes: with SwarmUI's unless ComfyUI has one of this name already."""
    there = getattr(display.module("nodes"), "NODE_CLASS_MAPPINGS", {}) if display.has("nodes") else {}
    return comfy_nodes.NODES if ID in there else (*comfy_nodes.NODES, _NODE)
