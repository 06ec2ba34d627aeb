"""The web UIs that sdquant plugs into, one row each: how to recognize them, where to install, what works there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..errors import SettingsError
from ..planning import fields
from . import display

if TYPE_CHECKING:
    from ..settings import Field

_LOAD = "the web UI loads the files itself"
_ONE = "in the web UI a component has one scheme; convert the model with `sdquant quantize -q auto,size=6GB` first"
_THEIRS = {
    "device": "the web UI's own, which it is started with", "cache": _LOAD, "cache_limit": _LOAD, "allow_pickle": _LOAD,
    "size": _ONE, "quality": _ONE,
}  # fmt: skip
_LORAS = (
    "LoRAs (LoHa, LoKr and DoRA too) work as on unquantized layers, several at once and with their strengths. They are "
    "applied each time that a weight is used; without them the model is what it was, bit for bit"
)


@dataclass(frozen=True, kw_only=True)
class HostProgram:
    """A program into whose folder sdquant's extension is copied.

    Attributes:
        name: identifier. title: name shown to users.
        files: files in the program's folder; only this program has the first.
        source: the folder in this package to copy. into: the target, relative to the program's folder.
        then: the user's next step, as a sentence.
        can, cannot: what works there and what does not, as sentences for users, without the final period.
    """

    name: str
    title: str
    files: tuple[str, ...]
    source: str = "webui"
    into: str = "extensions/sdquant"
    then: str = "Its section is Settings, Quantization"
    can: tuple[str, ...]
    cannot: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Host(HostProgram):
    """A web UI with settings, to which sdquant adds a section. `name` is also its module's in this package.

    Attributes:
        module: a module that only this host has.
        theirs: settings of sdquant that the host decides itself, each with the reason.
    """

    module: str
    theirs: Mapping[str, str]

    def fields(self) -> tuple[Field, ...]:
        """Return the settings that its section shows."""
        return tuple(row for row in fields() if row.name not in self.theirs)


# The order matters: Forge has all of A1111's files and modules, and Neo all of Forge's.
HOSTS = (
    Host(
        name="sdnext",
        title="SD.Next",
        module="modules.model_quant",
        files=("modules/model_quant.py", "modules/script_callbacks.py", "webui.py"),
        then="Its section is System, Settings, Quantization, the last one; SD.Next's own is 'Model Quantization'",
        can=(
            "Transformers and text encoders that SD.Next loads one by one (Flux, SD3, Qwen, Wan, ...) are quantized "
            "while they load; models that it loads whole (SD 1.5, SDXL), and VAEs, after it, before they are moved",
            "Offloading stays with SD.Next. Its setting 'Model offload mode' is checked against the scheme before the "
            "load, and refused with a reason where the two cannot work together",
            "Folders that sdquant saved load as they are, those in nf4, fp4 and bnb-int8 on a CPU too, and so does a "
            "quantized T5 in Flux's, in place of the one that SD.Next shares between models",
            _LORAS,
            "ControlNet, IP-Adapter and textual inversion work, and merging, which reads files",
        ),
        cannot=(
            "Language models for captions and prompts, and ControlNets, stay as they are",
            "Folders in nf4, fp4 or bnb-int8 that other programs saved need a GPU: diffusers loads them there",
            "A T5 in a Flux folder that is not quantized is not used: SD.Next loads one of its own ('Use shared "
            "instance of text encoder'), and with that off takes Flux's CLIP for it",
            "One part of the model cannot be quantized twice: where SDNQ is ticked for it in SD.Next's own settings "
            "and a scheme is chosen here, the load is refused",
        ),
        theirs={
            "offload": "SD.Next's setting 'Model offload mode'",
            "budget": "SD.Next's settings for balanced offload",
            "dtype": "SD.Next's setting 'Device precision type'",
            **_THEIRS,
        },
    ),
    Host(
        name="neo",
        title="Forge Neo",
        module="backend.quant_ops",
        files=("backend/quant_ops.py", "modules_forge", "modules/script_callbacks.py", "webui.py"),
        can=(
            "The UNet or transformer and the text encoders are quantized after they are loaded, in RAM, before Neo "
            "moves them",
            "Neo's own mover keeps what fits on the GPU and brings the rest layer by layer, quantized layers too; "
            "measured with a fifth of the model left in RAM",
            _LORAS,
            "ControlNet, Control-LoRA, IP-Adapter and textual inversion work, and merging, which reads files",
        ),
        cannot=(
            "Files that are quantized already are loaded by Neo itself. For sdquant, set Neo's 'Diffusion in Low Bits' "
            "to Automatic",
            "A quantized model is not saved by 'Save Current Model', which writes float weights: Neo shows why",
            "The libraries' own layers (runtime=library) are not used: Neo's mover knows only plain tensors",
            "The VAE stays as it is",
        ),
        theirs={
            "quant.vae": "the VAE stays as it is",
            "mode": "after the load: Neo reads files whole",
            "runtime": "sdquant's plain layers, the only ones that Neo's mover can bring",
            "offload": "Neo's own mover ('GPU Weights')",
            "budget": "Neo's 'GPU Weights'",
            "dtype": "Neo chooses it",
            **_THEIRS,
        },
    ),
    Host(
        name="forge",
        title="Forge",
        module="backend.loader",
        files=("backend/loader.py", "modules_forge", "modules/script_callbacks.py", "webui.py"),
        can=(
            "The UNet or transformer and the text encoders are quantized after they are loaded, in RAM, before Forge "
            "moves them",
            "Forge's own mover keeps what fits on the GPU and swaps the rest layer by layer, quantized layers too",
            _LORAS,
            "ControlNet, Control-LoRA, IP-Adapter and textual inversion work, and merging, which reads files",
        ),
        cannot=(
            "Files that are quantized already are loaded by Forge itself. For sdquant, set Forge's 'Diffusion in Low "
            "Bits' to Automatic",
            "The libraries' own layers (runtime=library) are not used: Forge's mover knows only plain tensors",
            "A quantized model is not saved as a UNet or checkpoint, which would hold float weights: Forge shows why",
            "Hypernetworks have no effect: Forge has none any more",
            "The VAE stays as it is",
        ),
        theirs={
            "quant.vae": "the VAE stays as it is",
            "mode": "after the load: Forge reads files whole",
            "runtime": "sdquant's plain layers, the only ones that Forge's mover can swap",
            "offload": "Forge's own mover ('GPU Weights')",
            "budget": "Forge's 'GPU Weights'",
            "dtype": "Forge chooses it",
            **_THEIRS,
        },
    ),
    Host(
        name="reforge",
        title="reForge",
        module="ldm_patched.modules.patcher_extension",
        files=("ldm_patched/modules/patcher_extension.py", "modules_forge", "modules/script_callbacks.py", "webui.py"),
        can=(
            "The UNet or transformer and the text encoders are quantized after they are loaded, in RAM, before reForge "
            "moves them",
            "reForge's own mover keeps what fits on the GPU and brings the rest layer by layer, quantized layers too",
            "A changed setting takes effect with the next image: the model is loaded anew. Other models that reForge "
            "keeps stay what they are until they are selected",
            _LORAS,
            "ControlNet, Control-LoRA, IP-Adapter and textual inversion work, and merging, which reads files",
        ),
        cannot=(
            "The libraries' own layers (runtime=library) are not used: reForge's mover knows only plain tensors",
            "A text encoder that is chosen in place of the checkpoint's while the model is loaded stays as it is until "
            "the model is loaded again",
            "Hypernetworks have no effect: reForge has none any more",
            "The VAE stays as it is",
        ),
        theirs={
            "quant.vae": "the VAE stays as it is",
            "mode": "after the load: reForge reads files whole",
            "runtime": "sdquant's plain layers, the only ones that reForge's mover can bring",
            "offload": "reForge's own mover (--always-low-vram and the like)",
            "budget": "reForge's own mover",
            "dtype": "reForge chooses it",
            **_THEIRS,
        },
    ),
    Host(
        name="a1111",
        title="AUTOMATIC1111",
        module="modules.sd_models",
        files=("modules/sd_models.py", "modules/script_callbacks.py", "webui.py"),
        can=(
            "The UNet is quantized as soon as its weights are loaded, before the first image",
            "A changed setting takes effect with the next image: the model is loaded anew",
            _LORAS,
            "Hypernetworks and textual inversion work, and merging, which reads files; ControlNet, Control-LoRA and "
            "IP-Adapter too, by the extension sd-webui-controlnet",
        ),
        cannot=(
            "With --lowvram, --medvram or --medvram-sdxl the load is refused: these flags move the UNet in pieces, "
            "which a quantized one is not made for. It needs less memory without them",
            "With A1111's own 'FP8 weight' the load is refused too: the UNet would be codes of eight bits twice",
            "The memory that loading takes stays what it is: the file is read whole before it is quantized",
            "Text encoders and the VAE stay as they are",
        ),
        theirs={
            "quant.text_encoder": "text encoders stay as they are",
            "quant.vae": "the VAE stays as it is",
            "mode": "after the load: the file is read whole",
            "runtime": "sdquant's plain layers, which move with the model",
            "offload": "none: the model is on the device",
            "budget": "none: the model is on the device",
            "dtype": "--no-half and --precision",
            **_THEIRS,
        },
    ),
)


COMFYUI = HostProgram(
    name="comfyui",
    title="ComfyUI",
    files=("comfy/sd.py", "folder_paths.py", "custom_nodes", "nodes.py", "main.py"),
    source="comfyui",
    into="custom_nodes/sdquant",
    then="Its nodes are beside ComfyUI's own loaders in the menu; double-click and type 'sdquant'",
    can=(
        "'Load Diffusion Model (sdquant)' loads quantized files from the folder diffusion_models in every form that "
        "sdquant reads, or quantizes a float one while it loads",
        "'Load CLIP (sdquant)' does the same with text encoders, one to four files at once",
        "'Quantize Model (sdquant)' quantizes the model of any other node, such as that of a checkpoint",
        "LoRA nodes work as usual: a LoRA is applied to a quantized weight each time that it is used",
        "'Save Diffusion Model (sdquant)' writes the quantized model as one file; 'Inspect Model File (sdquant)' says "
        "what a file holds",
        "Moving between RAM and the GPU stays with ComfyUI",
    ),
    cannot=(
        "VAEs stay as they are: load them with ComfyUI's own node. Text encoders are not saved: keep their files",
        "Folders in diffusers' form are not loaded: `sdquant quantize` makes one file of the model in them",
        "The libraries' own layers (runtime=library) are not used: ComfyUI moves only plain tensors",
        "A model with a LoRA on it is not saved: save it first, then add the LoRA",
    ),
)

Row = TypeVar("Row", bound=HostProgram)

PLACES: tuple[HostProgram, ...] = (*HOSTS, COMFYUI)


@dataclass(frozen=True, kw_only=True)
class OtherProgram:
    """A program that looks like A1111 and loads models otherwise: told by `files`, where it runs by `module`."""

    title: str
    files: tuple[str, ...]
    module: str
    why: str


# Forge's name, and A1111's files and modules: asked for before that.
OTHERS = (
    OtherProgram(
        title="Forge Classic or a Forge of before August 2024",
        files=("modules_forge/forge_loader.py",),
        module="modules_forge.forge_loader",
        why="it loads models by code of its own, which sdquant does not hook into: nothing would be quantized",
    ),
)
_BEFORE_A1111 = len(HOSTS) - 1


def running() -> Host:
    """Return the web UI that this process runs.

    Raises:
        SettingsError: sdquant does not know it.
    """
    rows: tuple[Host | OtherProgram, ...] = (*HOSTS[:_BEFORE_A1111], *OTHERS, *HOSTS[_BEFORE_A1111:])
    for row in rows:
        if display.has(row.module):
            return _served(row)
    raise SettingsError(
        "Cannot load sdquant's extension",
        f"this program is none of {_titles(HOSTS)}",
        "Use it in one of them, or run: sdquant ui",
    )


def in_folder(folder: Path) -> HostProgram:
    """Return the web UI that is installed in a folder.

    Raises:
        SettingsError: the folder contains none that sdquant knows.
    """
    rows: tuple[HostProgram | OtherProgram, ...] = (*PLACES[:_BEFORE_A1111], *OTHERS, *PLACES[_BEFORE_A1111:])
    for row in rows:
        if all((folder / name).exists() for name in row.files):
            return _served(row)
    why = f"it contains none of {_titles(PLACES)}" if folder.is_dir() else "there is no such folder"
    raise SettingsError(
        f"Cannot find a web UI in {folder}", why, "Name the folder that contains webui.py, or for ComfyUI main.py"
    )


def _served(row: Row | OtherProgram) -> Row:
    """Return the row.

    Raises:
        SettingsError: it is that of another program.
    """
    if not isinstance(row, OtherProgram):
        return row
    fix = f"Use {_titles(PLACES, 'or')}, or sdquant's own page: sdquant ui"
    raise SettingsError(f"Cannot use sdquant in {row.title}", row.why, fix)


def _titles(rows: Iterable[HostProgram], word: str = "and") -> str:
    *most, last = (row.title for row in rows)
    return f"{', '.join(most)} {word} {last}"
