"""Layers that transformers and diffusers keep in float32 in models of 16 bits, and in floats in bitsandbytes' schemes.

A model class lists them in `_keep_in_fp32_modules`: their activations overflow float16, or are too coarse in bfloat16.
In both libraries they are float32 whatever dtype is requested, and here too; if a scheme quantizes them, their
products are computed in float32.

The libraries skip these layers when they quantize, and so does SDNQ. If a file has them quantized, bitsandbytes'
readers take the codes for weights, and SDNQ cannot run them: models cast activations to the dtype of such a weight,
which is that of its codes there. So by default they stay floats in the schemes of both, and saved files equal those of
the libraries. The option `wo` (`nf4,wo`), named after T5's layer, quantizes them as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from ..core import QuantSpec

OPTION = "wo"

_T5 = re.compile(r"(MT5|UMT5|T5)(Encoder|For|Model|PreTrained|Stack)")  # how the names of transformers' classes begin
_WAN = ("rope", "time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")
_JOY = ("time_embedder", "norm1", "norm2", "norm_out")

# As the classes of diffusers 0.42 have it.
_BY_CLASS: Mapping[str, tuple[str, ...]] = {
    "AnyFlowFARTransformer3DModel": _WAN[1:],
    "AnyFlowTransformer3DModel": _WAN[1:],
    "AutoencoderKLMiniMaxH3": ("encoder", "quant_conv", "norm1", "norm2", "norm_out", "scale1", "scale2"),
    "AutoencoderKLMiniMaxH3Audio": ("encoder", "decoder", "pre_block", "dec_in_proj", "mean_proj", "logs_proj"),
    "ChronoEditTransformer3DModel": _WAN[1:],
    "Cosmos3OmniTransformer": ("time_embedder",),
    "CosmosControlNetModel": ("learnable_pos_embed",),
    "CosmosTransformer3DModel": ("learnable_pos_embed",),
    "Flux3Transformer2DModel": ("norm_q", "norm_k"),
    "HeliosTransformer3DModel": (*_WAN[1:], "history_key_scale"),
    "JoyImageEditPlusTransformer3DModel": _JOY,
    "JoyImageEditTransformer3DModel": _JOY,
    "Kandinsky5Transformer3DModel": ("time_embeddings", "modulation", "visual_modulation", "text_modulation"),
    "Kandinsky6SRTransformer3DModel": ("time_embeddings", "pooled_bias", "modulation"),
    "Kandinsky6Transformer3DModel": ("time_embeddings", "modulation"),
    "Krea2Transformer2DModel": ("norm", "norm1", "norm2", "norm_q", "norm_k"),
    "MiniMaxH3Transformer3DModel": ("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out", "rope"),
    "RFD4ProteinaAutoencoder": ("latent_decoder_mean_n_log_scale", "norm"),
    "RFD4ProteinaTransformer": ("cond_factory", "norm", "ln_out"),
    "SkyReelsV2Transformer3DModel": _WAN,
    "WanAnimate2Transformer3DModel": ("time_embedding", "time_projection", *_WAN[2:], "modulation"),
    "WanAnimateTransformer3DModel": (*_WAN[1:], "motion_synthesis_weight", "rope"),
    "WanTransformer3DModel": _WAN,
    "WanVACETransformer3DModel": _WAN,
}


@dataclass(frozen=True)
class Float32:
    """The tensors of a 16-bit model that its library keeps in float32.

    Attributes:
        soft: patterns for models in float16, strict: for those in bfloat16 too. whole: they mean a whole word of a
            tensor's name, as in diffusers; else any part of it, as in transformers.
    """

    soft: frozenset[str] = frozenset()
    strict: frozenset[str] = frozenset()
    whole: bool = False

    def keeps(self, name: str, dtype: str) -> bool:
        """Return whether the tensor `name` is float32 in a model of dtype `dtype` ("float16", "bfloat16")."""
        if dtype not in ("float16", "bfloat16"):
            return False
        patterns = self.strict if dtype == "bfloat16" else self.soft | self.strict
        if self.whole:
            return not patterns.isdisjoint(name.split("."))
        return bool(patterns) and _any_of(patterns).search(name) is not None

    def dtype(self, name: str, dtype: str) -> str:
        """Return `dtype`, or "float32" for a tensor that is kept in it."""
        return "float32" if self.keeps(name, dtype) else dtype


@cache
def _any_of(patterns: frozenset[str]) -> re.Pattern[str]:
    return re.compile("|".join(pattern.replace("*", ".*") for pattern in sorted(patterns)))


def float32_of_model(model: nn.Module) -> Float32:
    """Return the patterns of the model itself; in transformers they include those of its submodels."""
    from .libraries import is_of_transformers

    soft, strict = (
        frozenset(getattr(model, name, None) or ())
        for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    )
    if is_of_transformers(model):
        return Float32(soft, strict)
    return Float32(strict=soft | strict, whole=True)


def float32_of_class(class_name: str | None) -> Float32:
    """Return the patterns by the name of the model's class, before there is a model."""
    if _T5.match(class_name or ""):
        return Float32(soft=frozenset(of_class(class_name)))
    return Float32(strict=frozenset(of_class(class_name)), whole=True)


def of_class(class_name: str | None) -> tuple[str, ...]:
    """Return the modules that a class of diffusers or transformers keeps in floats, as patterns for `matched`."""
    if _T5.match(class_name or ""):
        return ("wo",)
    return _BY_CLASS.get(class_name or "", ())


def kept(class_name: str | None, spec: QuantSpec) -> tuple[str, ...]:
    """Return the modules that stay floats in this scheme: none with `wo`, or if no library has the scheme."""
    return () if OPTION not in spec.scheme.options or spec[OPTION] else of_class(class_name)


def why_kept(spec: QuantSpec) -> str:
    """Return the reason that the plan shows for a layer that stays in floats."""
    return f"its library keeps it in floats and reads it in no other form ({spec},{OPTION} quantizes it)"


def matched(path: str, patterns: Iterable[str]) -> bool:
    """Return whether diffusers or transformers would keep the layer at `path` in floats because of one of `patterns`:
    each is the beginning or the end of a path, or a module on it."""
    return any(
        path.endswith(pattern) or path.startswith(f"{pattern}.") or f"{pattern}." in path for pattern in patterns
    )
