"""The vocabulary: `Scheme`, `QuantSpec`, packed weights and their layouts, `TensorInfo`, the registry, code tables.

In and out: values that every other room passes on. Nothing here reads a file of weights or knows diffusers, and only
what handles tensors imports torch. May import `utils` and `errors` alone; backends are found by name (`registry`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .backend import (
        FACTOR,
        NUMBERS,
        OFFSET,
        ROTATION,
        Backend,
        Packed,
        PackedSpec,
        QuantSpec,
        Scheme,
        Unfit,
    )
    from .choices import AUTO, LONE, MAIN, METHOD, NO_OFFLOAD, OFFLOAD_MODES, check_offload_mode
    from .detail_keys import INPUT_FIRST
    from .dtypes import COMPUTE_DTYPES, DTYPE_BITS, FLOATS, TensorInfo, TensorSpec, dtype_name, dtype_named
    from .expansion import Expansion, ExpansionParts
    from .input_scale import INPUT_SCALE, input_scale_of, usable_scale
    from .low_rank import LowRank
    from .options import (
        BIAS,
        BIAS_OPTION,
        GPTQ,
        GPTQ_OPTION,
        HADAMARD,
        IMATRIX,
        IMATRIX_OPTION,
        RANGE,
        RANGE_OPTION,
        Option,
        Requirement,
        layer_name,
    )
    from .packed_layout import BYTES as BYTE_PACKINGS
    from .packed_layout import Activations, FloatGemm, FloatRounding, Geometry, PackedLayout
    from .packed_reader import ShapeUnknown, read_weight, require_sound
    from .prequantized_weight import PLAIN_ONLY, Cut, PrequantizedWeight
    from .tensor_keys import RANGE_BUFFER, RANGE_OPERAND, is_range, leaf
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "AUTO", "BIAS", "BIAS_OPTION", "BYTE_PACKINGS", "COMPUTE_DTYPES", "DTYPE_BITS", "FACTOR", "FLOATS", "GPTQ",
    "GPTQ_OPTION", "HADAMARD", "IMATRIX", "IMATRIX_OPTION", "INPUT_FIRST", "INPUT_SCALE", "LONE", "MAIN", "METHOD",
    "NO_OFFLOAD", "NUMBERS", "OFFLOAD_MODES", "OFFSET", "PLAIN_ONLY", "RANGE", "RANGE_BUFFER", "RANGE_OPERAND",
    "RANGE_OPTION", "ROTATION", "Activations", "Backend", "Cut", "Expansion", "ExpansionParts", "FloatGemm",
    "FloatRounding", "Geometry", "LowRank", "Option", "Packed", "PackedLayout", "PackedSpec", "PrequantizedWeight",
    "QuantSpec", "Requirement", "Scheme", "ShapeUnknown", "TensorInfo", "TensorSpec", "Unfit", "bit_fields",
    "check_offload_mode", "choices", "code_tables", "dtype_name", "dtype_named", "ggml_iq", "gguf_fields", "gguf_mixes",
    "gguf_types", "hadamard", "input_columns", "input_scale_of", "is_range", "layer_name", "leaf", "name_patterns",
    "packed_reader", "packed_rows", "read_weight", "registry", "require_sound", "torch_dtypes", "usable_scale",
]  # fmt: skip
