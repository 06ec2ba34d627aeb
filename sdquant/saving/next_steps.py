"""What opens a file or folder that was written, in words for people who use web UIs."""

from __future__ import annotations

from pathlib import Path

# What ComfyUI's own loader reads (0.33.0; docs/web-uis.md has the versions); the rest is for sdquant's node.
COMFYUI_READS = (
    "fp8", "qint8", "int8_row", "int8_tensor", "int8_convrot", "comfy:nvfp4", "mxfp8", "w4a4", "w4a8", "w6a8",
)  # fmt: skip
FORGE_READS = ("nf4", "fp4")
_FOLDER = "ComfyUI's folder models/diffusion_models"
_NODE = "'Load Diffusion Model (sdquant)', which `sdquant install-extension` adds"


def comfyui_reads(scheme: str) -> bool:
    """Return whether ComfyUI's own loader reads a .safetensors file in a scheme."""
    return scheme.partition(",")[0] in COMFYUI_READS


def opened_with(out: Path, scheme: str | None) -> str:
    """Return where to put what was written, and what opens it.

    Args:
        out: a folder, a .safetensors or a .gguf file with a transformer or UNet.
        scheme: of its weights; None for floats.
    """
    if out.suffix == ".gguf":
        return f"For ComfyUI: put it into {_FOLDER}, and use 'Unet Loader (GGUF)' of ComfyUI-GGUF, or {_NODE}."
    if out.suffix != ".safetensors":
        return "For diffusers: `from_pretrained` opens it, after `import sdquant`. SD.Next lists it among its models."
    if scheme is None or comfyui_reads(scheme):
        return f"For ComfyUI: put it into {_FOLDER}, and use its own node 'Load Diffusion Model'."
    forge = " Forge reads it itself." if scheme.partition(",")[0] in FORGE_READS else ""
    return f"For ComfyUI: put it into {_FOLDER}, and use {_NODE}.{forge}"
