"""The only room that knows diffusers' and transformers' classes; authors' layouts of files; the hub.

In: paths, headers, pipelines and modules. Out: `Detected`, modules without weights, and `WeightLoader`, which puts
weights into them. May import `formats` and what is below; torch, diffusers and transformers only when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from . import names as key_names
    from .activation_memory import Trace
    from .bias_correction import BiasCorrection
    from .bundled_models import MODELS as BUNDLED_MODELS
    from .bundled_models import path as bundled_path
    from .bundled_models import place as bundled_place
    from .classes import class_of, meta_model
    from .components import PREFIXES as KEY_PREFIXES
    from .components import missing_parameters, model_class, model_name, quiet, set_module, set_tensor, tied, ties_in
    from .detection import Detected, detect, joined
    from .dummy_inputs import Inputs
    from .float_weights import with_float_weights
    from .generate import Stopped, draw, native_size
    from .hub_references import Reference
    from .keep_in_fp32 import float32_of_class, float32_of_model, matched
    from .left_out import stray_warnings
    from .libraries import is_of_transformers
    from .loras import Lora, LoraSet
    from .op_counts import Product, Work
    from .pipeline_traits import Traits, sampling_with, starts_from_image, traits
    from .pipelines import components_of, is_pipeline, main_part, weight_bytes, weight_parts
    from .promised_schemes import same_scheme
    from .quantize_weight import refuse_not_finite, require_finite
    from .rounding_loss import RoundingLoss
    from .single_file import convert, original_names
    from .single_file.original_names import OutputTensor
    from .start_images import StartImage, pipeline_for
    from .stored_files import stored_components
    from .weight_loader import WeightLoader, common_kind, install_packed, misfit
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "BUNDLED_MODELS",
    "KEY_PREFIXES",
    "BiasCorrection",
    "Detected",
    "Inputs",
    "Lora",
    "LoraSet",
    "OutputTensor",
    "Product",
    "Reference",
    "RoundingLoss",
    "StartImage",
    "Stopped",
    "Trace",
    "Traits",
    "WeightLoader",
    "Work",
    "activation_memory",
    "bundled_path",
    "bundled_place",
    "call_hooks",
    "class_of",
    "classes",
    "common_kind",
    "components",
    "components_of",
    "convert",
    "detect",
    "detection",
    "draw",
    "dummy_inputs",
    "file_tokenizers",
    "fitting",
    "float32_of_class",
    "float32_of_model",
    "gguf_encoders",
    "hub",
    "hub_references",
    "install_packed",
    "is_of_transformers",
    "is_pipeline",
    "joined",
    "keep_in_fp32",
    "key_names",
    "libraries",
    "lone_files",
    "main_part",
    "matched",
    "meta_model",
    "misfit",
    "missing_parameters",
    "model_class",
    "model_name",
    "native_size",
    "original_names",
    "partial_encoders",
    "peft_hooks",
    "pipeline_folders",
    "pipeline_for",
    "pipelines",
    "quantize_weight",
    "quiet",
    "refuse_not_finite",
    "require_finite",
    "same_scheme",
    "sampling_with",
    "set_module",
    "set_tensor",
    "starts_from_image",
    "stored_components",
    "stray_warnings",
    "tied",
    "ties_in",
    "traits",
    "weight_bytes",
    "weight_parts",
    "with_float_weights",
]  # fmt: skip
