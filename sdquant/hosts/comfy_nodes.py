"""Nodes for ComfyUI: load a quantized diffusion model, quantize one on load, save it, inspect a file."""

from __future__ import annotations

from typing import Any

from ..errors import MissingComponentError
from ..utils.byte_sizes import size
from .comfy_load import choices

FOLDER = "sdquant_diffusion_models"
EXTENSIONS = frozenset({".safetensors", ".sft", ".gguf"})
CATEGORY = "sdquant"


def register_folder() -> None:
    """Register ComfyUI's diffusion model folders under another name, with `.gguf` among the extensions."""
    import folder_paths  # type: ignore[import-not-found]

    known = folder_paths.folder_names_and_paths
    paths = known["diffusion_models" if "diffusion_models" in known else "unet"][0]
    known[FOLDER] = (paths, set(EXTENSIONS))  # the same list: folders that are added later are in it


def _path(name: str) -> str:
    import folder_paths

    path = folder_paths.get_full_path(FOLDER, name)
    if path is None:
        raise MissingComponentError(
            f"Cannot load {name!r}",
            "it is in none of ComfyUI's diffusion_models folders",
            "Put it there, and refresh",
        )
    return str(path)


class _OfFile:
    """Base of nodes for a file: a choice among the files in the folders at the time that ComfyUI asks."""

    CATEGORY = CATEGORY

    @classmethod
    def _files(cls) -> tuple[list[str]]:
        import folder_paths

        return (folder_paths.get_filename_list(FOLDER),)


class LoadDiffusionModel(_OfFile):
    """Node that loads a file in any format that sdquant reads, or quantizes a float one while it loads."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"
    DESCRIPTION = (
        "Loads a diffusion model that is quantized in any form that sdquant reads (bitsandbytes, quanto, float8, GGUF, "
        "SDNQ, ...), or quantizes a float one while it loads. LoRA nodes work as usual."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Return the inputs: the file, and the scheme to quantize it to."""
        return {"required": {"model_name": cls._files(), "quantize": (choices(),)}}

    def load(self, model_name: str, quantize: str) -> tuple[Any]:
        """Load the model."""
        from .comfy_load import load

        return (load(_path(model_name), quantize),)


class SaveDiffusionModel:
    """Node that writes a model of LoadDiffusionModel."""

    CATEGORY = CATEGORY
    RETURN_TYPES = ()
    FUNCTION = "save"
    OUTPUT_NODE = True
    DESCRIPTION = "Writes a quantized diffusion model as one safetensors file below ComfyUI's output folder."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Return the inputs: the model, and the prefix of the file name."""
        name = ("STRING", {"default": "diffusion_models/quantized"})
        return {"required": {"model": ("MODEL",), "filename_prefix": name}}

    def save(self, model: Any, filename_prefix: str) -> dict[str, Any]:
        """Save the model, and return the file name for ComfyUI to show under the node."""
        from .comfy_save import save

        return {"ui": {"text": [save(model, filename_prefix).name]}}


class Inspect(_OfFile):
    """Node that describes the contents of a file."""

    RETURN_TYPES = ("STRING",)
    FUNCTION = "inspect"
    OUTPUT_NODE = True
    DESCRIPTION = (
        "Says what a model file holds: family, quantization, size, and how that is known. Reads its header only."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Return the input: the file."""
        return {"required": {"model_name": cls._files()}}

    def inspect(self, model_name: str) -> dict[str, Any]:
        """Describe the file, as text for ComfyUI to show and for the next node."""
        from ..models import detection

        detected = detection.read_headers(_path(model_name), find_classes=False)
        lines = [
            model_name,
            f"{detected.family or 'unknown'} {detected.component or ''}, {detected.container}".strip(),
            f"quantization: {f'{detected.quant} ({detected.backend})' if detected.quant else 'none'}",
            f"weights: {size(detected.bytes)} in {detected.tensors} tensors",
            *detected.evidence,
            *(f"warning: {line}" for line in detected.warnings),
        ]
        text = "\n".join(lines)
        return {"ui": {"text": [text]}, "result": (text,)}


NODE_CLASS_MAPPINGS: dict[str, type] = {
    "SdquantLoadDiffusionModel": LoadDiffusionModel,
    "SdquantSaveDiffusionModel": SaveDiffusionModel,
    "SdquantInspect": Inspect,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "SdquantLoadDiffusionModel": "Load Diffusion Model (sdquant)",
    "SdquantSaveDiffusionModel": "Save Diffusion Model (sdquant)",
    "SdquantInspect": "Inspect Model File (sdquant)",
}
