"""From a loaded model to files: a folder, safetensors, GGUF, ComfyUI's single file, an adapter that PEFT reads.

In: pipelines, components, and plans for `sdquant quantize`. Out: files, each whole or not there.
May import `planning` and what is below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .export_floats import DequantizationReport, dequantize_to
    from .export_gguf import quantize_file
    from .model_files import save
    from .quantization_config import library_config, own_config
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "DequantizationReport", "comfy_mix", "dequantize_to", "export_gguf", "export_single_file", "folder_size",
    "foreseen_size", "library_config", "library_formats", "model_files", "next_steps", "original_layout", "own_config",
    "portable", "quantize_file", "save",
]  # fmt: skip
