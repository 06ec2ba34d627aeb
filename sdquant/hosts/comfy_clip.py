"""Load text encoders into ComfyUI, with its own model classes and tokenizers, but packed weights.

Facts: `load_text_encoder_state_dicts` and `CLIP` in `comfy/sd.py` of ComfyUI 0.33.0.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedFileError
from . import comfy_load, comfy_state

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from ..core import QuantSpec
    from ..formats import Checkpoint

log = logging.getLogger(__name__)

DEFAULT_TYPE = "stable_diffusion"
_NORM = re.compile(r"norm\d*\.weight$")

# What transformers calls what ComfyUI calls otherwise, by the tensor that shows it.
_RENAMED = (
    ("embeddings.token_embedding.weight", (("", "text_model."), ("text_model.text_projection", "text_projection"))),
    ("model.language_model.layers.0.self_attn.k_proj.weight", (("model.language_model.", "model."),)),
    ("language_model.model.layers.0.self_attn.k_proj.weight", (("language_model.model.", "model."),)),
)


def clip_types() -> list[str]:
    """Return the types of models that text encoders are for, as ComfyUI's own loaders call them."""
    import comfy.sd  # type: ignore[import-not-found]

    names = [one.name.lower() for one in comfy.sd.CLIPType]
    return [DEFAULT_TYPE, *(name for name in names if name != DEFAULT_TYPE)]


def load_text_encoders(
    paths: Sequence[str], kind: str, quant: str = comfy_load.AS_FOUND, disable_dynamic: bool = True
) -> Any:
    """Load text encoders from a file each, and return ComfyUI's CLIP of them.

    Args:
        paths: `.safetensors` or `.gguf` files, quantized or not.
        kind: one of `clip_types`.
        quant: what to quantize those to that have float weights.

    Raises:
        SdquantError: a file cannot be loaded, or ComfyUI has no such encoder.
    """
    import comfy.model_management  # type: ignore[import-not-found]
    import comfy.sd
    import comfy.utils  # type: ignore[import-not-found]
    import folder_paths  # type: ignore[import-not-found]

    from .comfy_ops import operations
    from .comfy_patcher import patcher_class

    device = comfy.model_management.text_encoder_device()
    spec = None if quant == comfy_load.AS_FOUND else comfy_load.checked(quant, device)
    sources = [comfy_state.source(Path(path), component="text_encoder") for path in paths]
    for scheme in sorted({weight.scheme for src in sources for weight in src.prequantized.values()}):
        comfy_load.check_scheme(scheme, "found", device)
    bar = comfy.utils.ProgressBar(sum(comfy_state.size(src) for src in sources))
    states = [comfy_state.read(src, None if src.prequantized else spec, device, bar.update) for src in sources]
    packed = sum(state.packed for state in states)
    what = " and ".join(Path(path).name for path in paths)
    log.info("%s: %d tensors are packed (%s)", what, packed, spec or "as found")
    function = comfy.sd.load_text_encoder_state_dicts
    clip = function(
        [_renamed(_vectors(src, state.tensors)) for src, state in zip(sources, states, strict=True)],
        embedding_directory=folder_paths.get_folder_paths("embeddings"),
        clip_type=comfy.sd.CLIPType[kind.upper()],
        model_options={"custom_operations": operations()},
        **comfy_load.known_options(function, disable_dynamic=True),
    )
    clip.patcher.__class__ = patcher_class()  # of the same object: ComfyUI may have loaded it, and looks for it
    _require_loaded(clip, what, packed, spec)
    clip.patcher.cached_patcher_init = (_load_patcher, (paths, kind, quant))
    return clip


def _load_patcher(*args: Any, **kwargs: Any) -> Any:
    return load_text_encoders(*args, **kwargs).patcher


def _vectors(src: Checkpoint, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors, with the norm that sdquant writes as a matrix of one row (`saving.model_files.guarded`)."""
    if not src.specs:  # not written by sdquant
        return tensors
    return {
        name: tensor[0] if tensor.ndim == 2 and len(tensor) == 1 and _NORM.search(name) else tensor
        for name, tensor in tensors.items()
    }


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by ComfyUI's names."""
    for key, prefixes in _RENAMED:
        if key in tensors:
            return {_with(name, prefixes): tensor for name, tensor in tensors.items()}
    return dict(tensors)


def _with(name: str, prefixes: Sequence[tuple[str, str]]) -> str:
    for old, new in prefixes:
        if name.startswith(old):
            name = new + name.removeprefix(old)
    return name


def _require_loaded(clip: Any, what: str, packed: int, spec: QuantSpec | None) -> None:
    """Raise if ComfyUI took the file for another encoder: then most of its weights have no place."""
    from .comfy_patcher import packed_layers

    there = len(packed_layers(clip.patcher.model))
    if packed and 2 * there < packed:
        raise UnsupportedFileError(
            f"Cannot load {what}{f' in {spec}' if spec is not None else ''}",
            f"of its {packed} packed weights ComfyUI's text encoder has a place for {there}",
            "Choose the type of the model that it is for, and name all files that this model takes",
        )
