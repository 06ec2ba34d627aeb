"""Files of weights: containers (safetensors, GGUF), what their headers show, and the families of models in them.

In: paths and headers. Out: `Checkpoint`, the tensors of one model in one or several files; `TensorFile`, which reads
them; writers of both containers. Readers are strict: a damaged file is refused by name.
May import `nn` and what is below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .checkpoint import FORMAT_VERSION, METADATA_KEY, Checkpoint, main_dtype, single_file
    from .component_configs import SIDE_FILES, Given, without_quantization
    from .config_sizes import config_numbers, refuse_endless
    from .filename_hints import suffix_hint
    from .gguf import conventions as gguf_conventions
    from .gguf import file as gguf_file
    from .gguf import header as gguf_header
    from .gguf import text_names as gguf_text_names
    from .gguf import vision_names as gguf_vision_names
    from .gguf.writer import write_gguf
    from .model_families import Family
    from .readahead import Readahead
    from .safetensors import SafetensorsFile
    from .tensor_file import Get, Recipe, TensorFile, closing_files, over_files
    from .type_histogram import TypeRow
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "FORMAT_VERSION", "METADATA_KEY", "SIDE_FILES", "Checkpoint", "Family", "Get", "Given", "Readahead", "Recipe",
    "SafetensorsFile", "TensorFile", "TypeRow", "checkpoint", "closing_files", "component_configs", "config_numbers",
    "folders", "gguf_conventions", "gguf_file", "gguf_header", "gguf_text_names", "gguf_vision_names",
    "known_configs", "main_dtype", "model_families", "over_files", "quantization_methods", "refuse_endless",
    "refused_files", "resaved_names", "safetensors", "safetensors_writer", "sdquant_metadata", "single_file",
    "sized_configs", "suffix_hint", "text_encoders", "type_histogram", "without_quantization", "write_gguf",
]  # fmt: skip
