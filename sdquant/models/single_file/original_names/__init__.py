"""Original tensor names of the models' authors, which files for other tools need. Imports no torch.

A module for each family, with rows for the tensors that are fused or renamed there. Written from the authors' layouts;
`diffusers` has only the way back, against which the writer holds the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from .auraflow import auraflow
from .chroma import chroma
from .cosmos import cosmos
from .dc_ae import dc_ae
from .flux import flux
from .flux2 import flux2
from .flux3 import flux3
from .hunyuan_video import hunyuan_video
from .krea2 import krea2
from .ltx import ltx, ltx2
from .ltx_vae import ltx2_audio_vae, ltx2_vae, ltx_vae
from .lumina2 import lumina2
from .minimax_h3 import minimax_h3
from .mochi import mochi
from .qwen_image21 import qwen_image21
from .rows import OutputTensor, Shapes, same, shape_of
from .sana import sana
from .sd3 import sd3
from .stable_cascade import stable_cascade
from .unet import controlnet, unet
from .wan import wan, wan_animate, wan_animate_2
from .wan_vae import wan_vae
from .z_image import z_image

__all__ = ["OutputTensor", "known", "shape_of", "written"]

_MODELS: Mapping[str, Callable[[Shapes], Iterator[OutputTensor]]] = {
    "AuraFlowTransformer2DModel": auraflow,
    "AutoencoderDC": dc_ae,
    "ChromaTransformer2DModel": chroma,
    "ControlNetModel": controlnet,
    "ErnieImageTransformer2DModel": same,
    "Flux2Transformer2DModel": flux2,
    "Flux3Transformer2DModel": flux3,
    "FluxTransformer2DModel": flux,
    "HiDreamImageTransformer2DModel": same,
    "Krea2Transformer2DModel": krea2,
    "Lumina2Transformer2DModel": lumina2,
    "QwenImage21Transformer2DModel": qwen_image21,
    "QwenImageTransformer2DModel": same,
    "SD3Transformer2DModel": sd3,
    "SanaTransformer2DModel": sana,
    "StableCascadeUNet": stable_cascade,
    "UNet2DConditionModel": unet,
    "ZImageControlNetModel": same,
    "ZImageTransformer2DModel": z_image,
    "WanTransformer3DModel": wan,
    "WanVACETransformer3DModel": wan,
    "SkyReelsV2Transformer3DModel": wan,
    "ChronoEditTransformer3DModel": wan,
    "WanAnimateTransformer3DModel": wan_animate,
    "WanAnimate2Transformer3DModel": wan_animate_2,
    "LTXVideoTransformer3DModel": ltx,
    "LTX2VideoTransformer3DModel": ltx2,
    "HunyuanVideoTransformer3DModel": hunyuan_video,
    "MochiTransformer3DModel": mochi,
    "CosmosTransformer3DModel": cosmos,
    "MotifVideoTransformer3DModel": same,
    "MiniMaxH3Transformer3DModel": minimax_h3,
    "AutoencoderKLWan": wan_vae,
    "AutoencoderKLLTXVideo": ltx_vae,
    "AutoencoderKLLTX2Video": ltx2_vae,
    "AutoencoderKLLTX2Audio": ltx2_audio_vae,
}


def known(class_name: str | None) -> bool:
    """Return whether there are rows for the class."""
    return class_name in _MODELS


def written(class_name: str | None, shapes: Shapes) -> list[OutputTensor] | None:
    """Return a component's tensors under the original names, in the order of `shapes`; None if these are unknown."""
    make = _MODELS.get(class_name or "")
    rows = list(make(shapes)) if make is not None else []
    place = {name: at for at, name in enumerate(shapes)}
    used = [source for row in rows for source in row.sources]
    if sorted(used) != sorted(place) or len({row.name for row in rows}) != len(rows):
        return None
    return sorted(rows, key=lambda row: place[row.sources[0]])
