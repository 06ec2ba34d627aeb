"""The nodes for ComfyUI, a row each: what they ask for, give and do. `comfy_schema` makes ComfyUI's classes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import comfy_inspect, comfy_paths
from .comfy_clip import DEFAULT_TYPE, clip_types
from .comfy_load import AS_FOUND, choices


@dataclass(frozen=True, kw_only=True)
class Input:
    """What a node asks for.

    Attributes:
        name: as workflows store it. type: ComfyUI's: COMBO, STRING, MODEL, ...
        choices: of a COMBO, at the time that ComfyUI asks.
        optional: whether it may be left out; then it is not given to the node.
    """

    name: str
    type: str
    tooltip: str
    choices: Callable[[], list[str]] | None = None
    default: str | None = None
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a node gives. `type`: ComfyUI's. `name`: shown beside it."""

    type: str
    name: str
    tooltip: str


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node.

    Attributes:
        id: as workflows store it. title: in the menu. summary: a sentence or two.
        run: called with the inputs by name. Returns the output, or the text of a node that `shows` it.
        shows: whether it runs with nothing behind it, and shows a text.
        aliases: further words that find it.
    """

    id: str
    title: str
    summary: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    run: Callable[..., Any]
    shows: bool = False
    aliases: tuple[str, ...] = ()


def _load(model_name: str, quantize: str = AS_FOUND) -> Any:
    from .comfy_load import load

    return load(comfy_paths.diffusion_model(model_name), quantize)


def _load_clip(clip_name: str, type: str, quantize: str = AS_FOUND, **more: str) -> Any:
    from .comfy_clip import load_text_encoders

    names = [clip_name, *(more[name] for name in _MORE if more.get(name, NONE) != NONE)]
    return load_text_encoders([comfy_paths.text_encoder(name) for name in names], type, quantize)


def _quantize(model: Any, quantize: str) -> Any:
    from .comfy_quantize import quantized_patcher

    return quantized_patcher(model, quantize)


def _save(model: Any, filename_prefix: str) -> str:
    from .comfy_save import comfyui_reads, save

    name = save(model, filename_prefix).name
    if comfyui_reads(model):
        return f"Saved as {name}, which ComfyUI's own 'Load Diffusion Model' reads, too"
    return (
        f"Saved as {name}. Load it with 'Load Diffusion Model (sdquant)': ComfyUI's own loader does not know this "
        "format, and refuses it"
    )


def _inspect(model_name: str) -> str:
    return comfy_inspect.file_description(comfy_paths.diffusion_model(model_name), model_name)


_FILE = Input(
    name="model_name",
    type="COMBO",
    choices=comfy_paths.diffusion_models,
    tooltip="A .safetensors or .gguf file in models/diffusion_models",
)
NONE = "none"
_MORE = ("clip_name2", "clip_name3", "clip_name4")
_MODEL = Output(type="MODEL", name="MODEL", tooltip="For samplers, LoRA nodes and whatever else takes a model")
_SCHEMES = (
    "int8_convrot is close to the original at half the size, w4a8 and nf4 are a quarter of it. The list has what this "
    "Python can make: nf4, int8 (NNCF), qint4 and sdnq-... are in it once their libraries are installed"
)

NODES = (
    Node(
        id="SdquantLoadDiffusionModel",
        title="Load Diffusion Model (sdquant)",
        summary="Loads a diffusion model that is quantized in any form that sdquant reads (bitsandbytes, quanto, "
        "float8, GGUF, SDNQ, ...), or quantizes a float one while it loads. LoRA nodes work as usual.",
        inputs=(
            _FILE,
            Input(
                name="quantize",
                type="COMBO",
                choices=choices,
                default=AS_FOUND,
                tooltip=f"What to quantize a float model to; {AS_FOUND!r} leaves the file as it is. {_SCHEMES}",
            ),
        ),
        outputs=(_MODEL,),
        run=_load,
        aliases=("unet loader", "gguf", "nf4", "quantize", "sdnq", "bitsandbytes"),
    ),
    Node(
        id="SdquantLoadCLIP",
        title="Load CLIP (sdquant)",
        summary="Loads text encoders that are quantized in any form that sdquant reads (GGUF, float8, nf4, SVDQuant, "
        "...), or quantizes float ones while they load. One file, or those that the model takes together: CLIP-L and "
        "T5 for Flux, both CLIPs for SDXL.",
        inputs=(
            Input(
                name="clip_name",
                type="COMBO",
                choices=comfy_paths.text_encoders,
                tooltip="A .safetensors or .gguf file in models/text_encoders",
            ),
            Input(
                name="type",
                type="COMBO",
                choices=clip_types,
                default=DEFAULT_TYPE,
                tooltip="The model that the text encoder is for, as in ComfyUI's own loaders",
            ),
            Input(
                name="quantize",
                type="COMBO",
                choices=choices,
                default=AS_FOUND,
                tooltip=f"What to quantize float text encoders to; {AS_FOUND!r} leaves files as they are. {_SCHEMES}",
            ),
            *(
                Input(
                    name=name,
                    type="COMBO",
                    choices=lambda: [NONE, *comfy_paths.text_encoders()],
                    default=NONE,
                    tooltip="Another text encoder of the same model",
                    optional=True,
                )
                for name in _MORE
            ),
        ),
        outputs=(Output(type="CLIP", name="CLIP", tooltip="For text encoding and LoRA nodes"),),
        run=_load_clip,
        aliases=("text encoder", "clip loader", "dual clip loader", "t5", "gguf"),
    ),
    Node(
        id="SdquantQuantizeModel",
        title="Quantize Model (sdquant)",
        summary="Quantizes a float model that another node loaded, such as that of a checkpoint. LoRAs before this "
        "node are merged into it; those after it are applied to the quantized weights each time that they are used.",
        inputs=(
            Input(name="model", type="MODEL", tooltip="A model with float weights"),
            Input(
                name="quantize",
                type="COMBO",
                choices=lambda: choices()[1:],
                tooltip=f"What to quantize its weights to. {_SCHEMES}",
            ),
        ),
        outputs=(_MODEL,),
        run=_quantize,
        aliases=("compress", "int8", "nf4", "low vram"),
    ),
    Node(
        id="SdquantSaveDiffusionModel",
        title="Save Diffusion Model (sdquant)",
        summary="Writes a quantized diffusion model as one safetensors file below ComfyUI's output folder.",
        inputs=(
            Input(name="model", type="MODEL", tooltip="A model that one of sdquant's nodes loaded or quantized"),
            Input(
                name="filename_prefix",
                type="STRING",
                default="diffusion_models/quantized",
                tooltip="The beginning of the file's name, with folders, below the output folder",
            ),
        ),
        outputs=(),
        run=_save,
        shows=True,
        aliases=("export", "model save"),
    ),
    Node(
        id="SdquantInspect",
        title="Inspect Model File (sdquant)",
        summary="Says what a model file holds: family, quantization, size, and how that is known. Reads its header "
        "only.",
        inputs=(_FILE,),
        outputs=(Output(type="STRING", name="text", tooltip="The same text, for another node"),),
        run=_inspect,
        shows=True,
        aliases=("detect", "model info"),
    ),
)
