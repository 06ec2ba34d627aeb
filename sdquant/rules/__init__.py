"""Quantization by rules: which layer gets which type; names and numerics are Qwix's.

    rules = [
        QuantizationRule(module_path=".*attn.*", weight_qtype="int4", tile_size=32),
        QuantizationRule(weight_qtype="int8", act_qtype="int8"),
    ]
    pipe = sdquant.load_model("some-model", rules=rules)

Rules:

    qconfig.py       QuantizationRule and QtRule; the first that matches a layer decides
    core/qtypes.py   the types, one entry each: bounds, storage
    core/calibration_method.py  calibration methods, as rules write them
    parse.py         rules as mappings, JSON, YAML
    core/how_to_quantize.py  settings of one tensor; the shape of its scales
    packed_layout.py a rule's settings for a layer's weight and input; the layout of a packed weight
    quant_spec.py    rules as a `QuantSpec` for loaders

The arithmetic, in core/:

    numerics.py      rounding to the types, and decoding
    calibration.py   the range of a tensor, and the scale that follows from it
    qarray.py        a quantized tensor with its scales; quantize and dequantize
    dot_general.py, conv_general.py   products of quantized tensors, in integers where both are
    bit_packing.py, ../packed_qarray.py   codes as bytes; a quantized weight as packed tensors (stored by `backend`)
    static_range.py  static ranges of activations, from calibration

Products of two activations, where a rule names them:

    core/batched_matmul.py   of quantized tensors, matrix by matrix
    providers/product.py     of float tensors under a rule, with gradients
    core/attention.py, core/einsum.py   operations made of such products
    product_ranges.py        their static ranges, as buffers of the modules that multiply
    intercepted_ops.py, interception.py   torch's functions, replaced while a module runs that a rule names
    report.py        counts of what these rules have quantized

The flow:

    providers/ptq.py PtqProvider
    model_quantization.py   quantize_model
    params.py        quantize_params
    providers/prequantized.py  process_prequantized_params, restore_quantization_rules: checkpoints of other tools
    qt/              QtProvider: training with quantization in the loop; ranges over batches
    model_rules.py, infer_rules.py   rules_of_model: the rules of a model or a saved file

Bit for bit as in Qwix at aa623acb (2026-08-13) on the CPU in float32 and bfloat16, where XLA divides as IEEE says. The
release 0.1.8 is older: it has neither int16 nor mxfp8_16, and its mxfp8 and mxfp4 are mxfp8_ceil and mxfp4_ceil here.

Differences: scales of float16 are computed in float32, where Qwix treats those of ordinary weights as zero; static
ranges do not tie a model to one sequence length. Products of two activations are quantized only by rules that name
them, and need no weight_qtype for that; in Qwix a rule for all operations includes them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.how_to_quantize import HowToQuantize
    from .core.qarray import QArray, dequantize, quantize
    from .model_quantization import quantize_model
    from .model_rules import rules_of_model
    from .params import assign, load_params, missing_params, quantize_params, require_complete
    from .providers.prequantized import process_prequantized_params, restore_quantization_rules
    from .providers.ptq import PtqProvider
    from .qconfig import QtRule, QuantizationRule
    from .qt import QtProvider, collecting, load_quant_stats, merge_quant_stats, quant_stats

# Looked up when they are first used: the planner reads rules without torch.
_LAZY = {
    "HowToQuantize": "core.how_to_quantize",
    "PtqProvider": "providers.ptq",
    "QArray": "core.qarray",
    "QtProvider": "qt",
    "QtRule": "qconfig",
    "QuantizationRule": "qconfig",
    "assign": "params",
    "collecting": "qt",
    "dequantize": "core.qarray",
    "load_params": "params",
    "load_quant_stats": "qt",
    "merge_quant_stats": "qt",
    "missing_params": "params",
    "process_prequantized_params": "providers.prequantized",
    "quant_stats": "qt",
    "quantize": "core.qarray",
    "quantize_model": "model_quantization",
    "quantize_params": "params",
    "require_complete": "params",
    "restore_quantization_rules": "providers.prequantized",
    "rules_of_model": "model_rules",
}

__all__ = [
    "HowToQuantize",
    "PtqProvider",
    "QArray",
    "QtProvider",
    "QtRule",
    "QuantizationRule",
    "assign",
    "collecting",
    "dequantize",
    "load_params",
    "load_quant_stats",
    "merge_quant_stats",
    "missing_params",
    "process_prequantized_params",
    "quant_stats",
    "quantize",
    "quantize_model",
    "quantize_params",
    "require_complete",
    "restore_quantization_rules",
    "rules_of_model",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
