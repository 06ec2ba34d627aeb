"""Write the example workflows beside the nodes for ComfyUI, in the form that its page saves (version 0.4).

python -m tools.hosts.comfy_workflows
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdquant.hosts import host

# The sockets of ComfyUI's own nodes (0.33.0): inputs by name, outputs in their order.
_SOCKETS: dict[str, tuple[dict[str, str], list[str]]] = {
    "LoraLoader": ({"model": "MODEL", "clip": "CLIP"}, ["MODEL", "CLIP"]),
    "CLIPTextEncode": ({"clip": "CLIP"}, ["CONDITIONING"]),
    "FluxGuidance": ({"conditioning": "CONDITIONING"}, ["CONDITIONING"]),
    "EmptySD3LatentImage": ({}, ["LATENT"]),
    "VAELoader": ({}, ["VAE"]),
    "KSampler": (
        {"model": "MODEL", "positive": "CONDITIONING", "negative": "CONDITIONING", "latent_image": "LATENT"}, ["LATENT"]
    ),
    "VAEDecode": ({"samples": "LATENT", "vae": "VAE"}, ["IMAGE"]),
    "SaveImage": ({"images": "IMAGE"}, []),
    "SdquantLoadDiffusionModel": ({}, ["MODEL"]),
    "SdquantLoadCLIP": ({}, ["CLIP"]),
    "SdquantSaveDiffusionModel": ({"model": "MODEL"}, []),
    "SdquantInspect": ({}, ["text"]),
    "CheckpointLoaderSimple": ({}, ["MODEL", "CLIP", "VAE"]),
    "SdquantQuantizeModel": ({"model": "MODEL"}, ["MODEL"]),
    "EmptyLatentImage": ({}, ["LATENT"]),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Node:
    """A node. `at`: its column and row. `given`: by input, the node before it and the number of its output."""

    kind: str
    at: tuple[int, int]
    widgets: list[Any] = field(default_factory=list)
    given: dict[str, tuple[int, int]] = field(default_factory=dict)


_LOADER = _Node(kind="SdquantLoadDiffusionModel", at=(0, 0), widgets=["flux1-dev.safetensors", "int8_convrot"])

WORKFLOWS: dict[str, list[_Node]] = {
    "Flux in 8 bits with a LoRA": [
        _LOADER,
        _Node(
            kind="SdquantLoadCLIP",
            at=(0, 1),
            widgets=["clip_l.safetensors", "flux", "int8_convrot", "t5xxl_fp16.safetensors", "none", "none"],
        ),
        _Node(kind="VAELoader", at=(0, 2), widgets=["ae.safetensors"]),
        _Node(
            kind="LoraLoader",
            at=(1, 0),
            widgets=["lora.safetensors", 1.0, 1.0],
            given={"model": (1, 0), "clip": (2, 0)},
        ),
        _Node(kind="CLIPTextEncode", at=(2, 0), widgets=["a lighthouse at dusk"], given={"clip": (4, 1)}),
        _Node(kind="CLIPTextEncode", at=(2, 1), widgets=[""], given={"clip": (4, 1)}),
        _Node(kind="FluxGuidance", at=(3, 0), widgets=[3.5], given={"conditioning": (5, 0)}),
        _Node(kind="EmptySD3LatentImage", at=(3, 1), widgets=[1024, 1024, 1]),
        _Node(
            kind="KSampler",
            at=(4, 0),
            widgets=[0, "randomize", 20, 1.0, "euler", "simple", 1.0],
            given={"model": (4, 0), "positive": (7, 0), "negative": (6, 0), "latent_image": (8, 0)},
        ),
        _Node(kind="VAEDecode", at=(5, 0), given={"samples": (9, 0), "vae": (3, 0)}),
        _Node(kind="SaveImage", at=(6, 0), widgets=["sdquant"], given={"images": (10, 0)}),
    ],
    "Quantize a checkpoint": [
        _Node(kind="CheckpointLoaderSimple", at=(0, 0), widgets=["sd_xl_base_1.0.safetensors"]),
        _Node(kind="SdquantQuantizeModel", at=(1, 0), widgets=["int8_convrot"], given={"model": (1, 0)}),
        _Node(kind="CLIPTextEncode", at=(1, 1), widgets=["a lighthouse at dusk"], given={"clip": (1, 1)}),
        _Node(kind="CLIPTextEncode", at=(1, 2), widgets=["blurry"], given={"clip": (1, 1)}),
        _Node(kind="EmptyLatentImage", at=(2, 1), widgets=[1024, 1024, 1]),
        _Node(
            kind="KSampler",
            at=(3, 0),
            widgets=[0, "randomize", 20, 7.0, "euler", "normal", 1.0],
            given={"model": (2, 0), "positive": (3, 0), "negative": (4, 0), "latent_image": (5, 0)},
        ),
        _Node(kind="VAEDecode", at=(4, 0), given={"samples": (6, 0), "vae": (1, 2)}),
        _Node(kind="SaveImage", at=(5, 0), widgets=["sdquant"], given={"images": (7, 0)}),
    ],
    "Quantize a diffusion model and save it": [
        _LOADER,
        _Node(
            kind="SdquantSaveDiffusionModel",
            at=(1, 0),
            widgets=["diffusion_models/flux1-dev-int8"],
            given={"model": (1, 0)},
        ),
        _Node(kind="SdquantInspect", at=(0, 1), widgets=["flux1-dev.safetensors"]),
    ],
}


def workflow(rows: list[_Node]) -> dict[str, Any]:
    """The workflow of nodes, which are numbered from 1."""
    links: list[list[Any]] = []
    nodes: list[dict[str, Any]] = []
    for number, row in enumerate(rows, 1):
        inputs, outputs = _SOCKETS[row.kind]
        slots = []
        for slot, (name, kind) in enumerate(inputs.items()):
            source, output = row.given[name]
            links.append([len(links) + 1, source, output, number, slot, kind])
            slots.append({"name": name, "type": kind, "link": len(links)})
        nodes.append({
            "id": number, "type": row.kind, "pos": [380 * row.at[0], 260 * row.at[1]], "size": [340, 200], "flags": {},
            "order": number - 1, "mode": 0, "inputs": slots,
            "outputs": [
                {"name": name, "type": "STRING" if name == "text" else name, "links": []} for name in outputs
            ],
            "properties": {"Node name for S&R": row.kind}, "widgets_values": row.widgets,
        })  # fmt: skip
    for link, source, output, *_ in links:
        nodes[source - 1]["outputs"][output]["links"].append(link)
    return {
        "last_node_id": len(nodes), "last_link_id": len(links), "nodes": nodes, "links": links, "groups": [],
        "config": {}, "extra": {}, "version": 0.4,
    }  # fmt: skip


def written() -> dict[Path, str]:
    """The files' texts."""
    folder = Path(host.__file__).parent / "comfyui" / "example_workflows"
    return {folder / f"{name}.json": json.dumps(workflow(rows), indent=1) + "\n" for name, rows in WORKFLOWS.items()}


if __name__ == "__main__":
    for path, text in written().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
