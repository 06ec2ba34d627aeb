"""GGUF files that are no diffusion model, refused with what they are for."""

from __future__ import annotations

from ..core import registry
from ..errors import RefusedFileError, UnsupportedFileError
from ..formats import METADATA_KEY, Checkpoint, refused_files

_ALONE = "Use a GGUF of only the UNet/transformer, and base=<pipeline folder> for the other components"
_PART = "Use a .safetensors file of this component, or leave it out to use the one in the pipeline folder"
_WITH_ITS_MODEL = (
    "Use the GGUF file of its language model with this one beside it, or pass both as parts of a pipeline with such a "
    "text encoder"
)

# What a GGUF file may be besides a diffusion model: why it is refused, and the ways out for the model and for a part.
_REFUSALS = {
    "text-encoder": ("it is a text encoder or language model", _ALONE, _PART),
    "projector": ("it is the vision projector of a language model", _WITH_ITS_MODEL, _WITH_ITS_MODEL),
    "adapter": (
        "it is a LoRA, and LoRAs cannot be loaded from GGUF",
        "Load the base model, then the LoRA as safetensors",
        "Leave it out, and call pipe.load_lora_weights with the LoRA as safetensors",
    ),
    "split": ("it is one part of a split file", refused_files.MERGE_SHARDS, refused_files.MERGE_SHARDS),
}


def refuse_undecodable(src: Checkpoint) -> None:
    """Raise UnsupportedFileError if a tensor is of a type that cannot be dequantized."""
    from ..backends import gguf

    strange = gguf.undecodable(src.tensors)
    if strange:
        raise UnsupportedFileError(
            f"Cannot load {src.files[0]}",
            "it has tensors in types that this version cannot dequantize: "
            + ", ".join(f"{kind} ({len(names)})" for kind, names in strange.items()),
            "Use a file of the same model in one of these types: "
            + ", ".join(row.name for row in registry.get("gguf").schemes if row.group),
        )


def refuse_unless_diffusion(src: Checkpoint, *, is_component: bool) -> None:
    """Raise UnsupportedFileError for a file of another kind."""
    from ..formats import gguf_file

    header = src.headers[src.files[0]]
    if METADATA_KEY in src.metadata or not isinstance(header, gguf_file.GGUFHeader):
        return
    kind = gguf_file.classify(header)
    what = f"Cannot use {src.files[0]} as a component" if is_component else f"Cannot load {src.files[0]}"
    if kind == "all-in-one":
        raise RefusedFileError(
            what,
            f"it is an all-in-one checkpoint, but only the UNet/transformer is supported in GGUF ({kind.evidence})",
            "Use one file per component, such as a GGUF of only the UNet/transformer" if is_component else _ALONE,
        )
    if kind in _REFUSALS:
        why, alone, part = _REFUSALS[kind]
        raise UnsupportedFileError(what, f"{why} ({kind.evidence})", part if is_component else alone)
