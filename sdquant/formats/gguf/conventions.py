"""Conventions that readers of diffusion GGUF files rely on, as rows: city96's ComfyUI-GGUF above all, and diffusers.

`general.architecture` is one of the names that ComfyUI-GGUF accepts; models that it does not know have a name of their
own. Some layers are never quantized: the few at the two ends of a model, which matter most for quality. The rows are
those of city96's patch for llama-quantize, for the original layer names and for diffusers'. No torch.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..model_families import Family


@dataclass(frozen=True)
class Architecture:
    """A row.

    Attributes:
        name: of `general.architecture`.
        families: of `families.ROWS` whose files are tagged so. Not all of them are the model that the name says.
        ends: pattern of the modules that stay floats.
        folds: whether weights whose rows are not a multiple of the block size are stored reshaped, with the original
            shape in the metadata. ComfyUI-GGUF reads that for all models, diffusers for none, and city96's tools write
            it for UNets only.
    """

    name: str
    families: tuple[str, ...]
    ends: str
    folds: bool = False


_FLUX_ENDS = (
    "img_in txt_in time_in vector_in guidance_in final_layer distilled_guidance_layer x_embedder context_embedder "
    "time_text_embed time_guidance_embed norm_out proj_out"
)
_UNET_ENDS = "class_embedding time_embedding add_embedding time_embed label_emb conv_in conv_out input_blocks.0.0 out.2"
_LTX2_ENDS = (
    "adaln_single caption_projection patchify_proj proj_out audio_adaln_single audio_caption_projection "
    "audio_patchify_proj audio_proj_out prompt_adaln_single audio_prompt_adaln_single "
    "av_ca_video_scale_shift_adaln_single av_ca_audio_scale_shift_adaln_single "
    "av_ca_a2v_gate_adaln_single av_ca_v2a_gate_adaln_single"
)
_ROWS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("flux", ("flux", "flux2", "chroma"), _FLUX_ENDS),
    ("sd1", ("sd", "sd1", "sd2"), _UNET_ENDS),
    ("sdxl", ("sdxl",), _UNET_ENDS),
    (
        "sd3",
        ("sd3",),
        "x_embedder t_embedder y_embedder context_embedder final_layer pos_embed time_text_embed norm_out proj_out",
    ),
    (
        "aura",
        ("auraflow",),
        "t_embedder init_x_linear modF.1 cond_seq_linear final_linear time_step_proj pos_embed norm_out "
        "context_embedder proj_out",
    ),
    ("ltxv", ("ltx-video",), "adaln_single caption_projection patchify_proj proj_out"),
    ("ltxv", ("ltx2",), _LTX2_ENDS),
    ("hyvid", ("hunyuan-video",), "txt_in img_in time_in vector_in guidance_in final_layer"),
    (
        "wan",
        ("wan", "wan-vace", "wan-animate", "wan-animate-2"),
        "patch_embedding text_embedding time_projection time_embedding img_emb head",
    ),
    ("hidream", ("hidream",), "p_embedder t_embedder x_embedder final_layer caption_projection"),
    ("cosmos", ("cosmos",), "p_embedder t_embedder t_embedding_norm x_embedder pos_embedder final_layer"),
    (
        "lumina2",
        ("lumina2", "z-image"),
        "x_embedder t_embedder cap_embedder final_layer context_refiner noise_refiner time_caption_embed norm_out "
        "all_x_embedder all_final_layer control_all_x_embedder",
    ),
    ("qwen_image", ("qwen-image",), "img_in txt_in time_text_embed norm_out proj_out"),
    # Unknown to ComfyUI-GGUF; by the names in its forks, if there are any.
    ("qwen_image21", ("qwen-image-2.1",), "img_in txt_in time_text_embed modulation norm_out proj_out"),
    (
        "flux3",
        ("flux3",),
        "emb_in txt_in time_in ref_time_in final_layer x_embedders context_embedder timestep_embedder "
        "target_timestep_embedder norm_out proj_out",
    ),
    ("krea2", ("krea2",), "first tmlp tproj txtmlp last img_in txt_in time_embed time_mod_proj final_layer"),
    ("ernie", ("ernie-image",), "x_embedder text_proj time_embedding adaLN_modulation final_norm final_linear"),
    (
        "sana",
        ("sana",),
        "x_embedder t_embedder cfg_embedder t_block y_embedder final_layer patch_embed time_embed caption_projection "
        "proj_out",
    ),
    (
        "stable-cascade",
        ("stable-cascade",),
        "embedding clip_mapper clip_txt_mapper clip_txt_pooled_mapper clip_img_mapper effnet_mapper pixels_mapper clf",
    ),
    (
        "controlnet",
        ("controlnet",),
        f"{_UNET_ENDS} input_hint_block zero_convs middle_block_out controlnet_cond_embedding controlnet_down_blocks "
        "controlnet_mid_block",
    ),
    # Names that ComfyUI-GGUF rejects, but some of its forks accept.
    ("mochi", ("mochi",), "x_embedder t_embedder t5_y_embedder t5_yproj final_layer"),
    ("motif_video", ("motif-video",), "x_embedder context_embedder time_text_embed norm_out proj_out"),
    (
        "minimax_h3",
        ("minimax-h3",),
        "video_patch_proj audio_patch_proj condition_proj time_embedder final_layer",
    ),
)
ARCHITECTURES: tuple[Architecture, ...] = tuple(
    Architecture(name, families, ends, folds=name in ("sd1", "sdxl")) for name, families, ends in _ROWS
)

SMALL = 1024  # numbers; a tensor of no more stays in F32
# Parameters that other readers cannot take in 16 bits or in blocks: they look at layers' weights and biases only.
_IN_LAYERS = (".weight", ".bias")
# Of Wan Animate's motion encoder, no layer is one of those that look for blocks.
_FULL = re.compile(r"\.ff_i\.gate\.weight$|pos_embedder|scale_shift_table|modulation$|^motion_encoder\.")
# The types that ComfyUI-GGUF decodes by itself. What it leaves to gguf-py comes back in the shape as stored.
FOLDED = frozenset({
    "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "q6_k", "q5_k", "q4_k", "q3_k", "q2_k", "iq4_nl", "iq4_xs",
})  # fmt: skip


def architecture(row: Family | None) -> Architecture | None:
    """Return the row of a family; None for text encoders, VAEs, and models that no other program reads from GGUF."""
    if row is None or not row.draws:
        return None
    return next((one for one in ARCHITECTURES if row.family in one.families), None)


def stays_float(name: str, shape: tuple[int, ...], row: Architecture | None) -> bool:
    """Return whether a layer's weight stays unquantized. `ends` lists modules by their full name from the top."""
    if row is None:
        return False
    ends = any(name.startswith(f"{module}.") for module in row.ends.split())
    return ends or len(shape) > 4 or _FULL.search(name) is not None


def stays_single(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether an unquantized tensor is written in F32: norms and biases, small tensors, 3-D convolutions, and
    parameters outside of layers."""
    return (
        len([n for n in shape if n > 1]) < 2
        or len(shape) > 4
        or math.prod(shape) <= SMALL
        or not name.endswith(_IN_LAYERS)
        or _FULL.search(name) is not None
    )
