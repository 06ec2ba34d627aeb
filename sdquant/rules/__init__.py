"""Quantization by rules: which layer gets which type, with the names and numerics of Qwix.

    rules = [
        QuantizationRule(module_path=".*attn.*", weight_qtype="int4", tile_size=32),
        QuantizationRule(weight_qtype="int8", act_qtype="int8"),
    ]
    pipe = sdquant.load_model("some-model", rules=rules)

What rules say:

    rule.py          QuantizationRule and QtRule; the first that matches a layer decides
    qtypes.py        the types, one row each: bounds, storage
    method.py        how a range is to be found, as rules write it
    text.py          rules as mappings, JSON, YAML
    how.py           how one tensor is quantized; the shape of its scales
    layout.py        what a rule means for a layer's weight and input; the parts of a packed weight
    spec.py          rules as what a loader is asked for
    planning.py      what they reach in a model, and what they contradict

The arithmetic:

    rounding.py      rounding into the types, and back
    calibration.py   the range of a tensor, and the scale that follows from it
    qarray.py        a quantized tensor with its scales; quantize and dequantize
    matmul.py, convolution.py, integers.py   products of quantized tensors, in integers where both are
    packing.py, packed.py   codes as bytes; a quantized weight as plain parts (`backends.rules` stores these)
    static.py        ranges of activations found beforehand

Products of two activations, where a rule names them:

    products.py      of quantized tensors, matrix by matrix
    straight.py      of float tensors under a rule, with gradients
    attention.py, einsum.py   what is made of such products
    sites.py         their static ranges, as buffers of the modules that multiply
    operations.py, interception.py   torch's functions, replaced while a module runs that a rule names
    report.py        which rules have done so

The flow:

    providers.py     PtqProvider
    flow.py          quantize_model
    params.py        quantize_params
    prequantized.py  process_prequantized_params, restore_quantization_rules: what another tool quantized
    qt/              QtProvider: training with quantization in the loop; ranges over batches
    kept.py, recovering.py   rules_of_model: back from a model, or a saved one, to its rules

Bit for bit as in Qwix at aa623acb (2026-08-13) on the CPU in float32 and bfloat16, where XLA divides as IEEE says. The
release 0.1.8 is older: it has neither int16 nor mxfp8_16, and its mxfp8 and mxfp4 are mxfp8_ceil and mxfp4_ceil here.

Better here: scales of float16 are computed in float32, where Qwix takes those of ordinary weights for zero; static
ranges do not tie a model to one sequence length. Products of two activations are quantized only by rules that name
them, and need no weight_qtype for that; in Qwix a rule for all operations takes them along.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .flow import quantize_model
    from .how import HowToQuantize
    from .kept import rules_of_model
    from .params import assign, load_params, missing_params, quantize_params, require_complete
    from .prequantized import process_prequantized_params, restore_quantization_rules
    from .providers import PtqProvider
    from .qarray import QArray, dequantize, quantize
    from .qt import QtProvider, collecting, load_quant_stats, merge_quant_stats, quant_stats
    from .rule import QtRule, QuantizationRule

# Looked up when they are first used: the planner reads rules without torch.
_LAZY = {
    "HowToQuantize": "how",
    "PtqProvider": "providers",
    "QArray": "qarray",
    "QtProvider": "qt",
    "QtRule": "rule",
    "QuantizationRule": "rule",
    "assign": "params",
    "collecting": "qt",
    "dequantize": "qarray",
    "load_params": "params",
    "load_quant_stats": "qt",
    "merge_quant_stats": "qt",
    "missing_params": "params",
    "process_prequantized_params": "prequantized",
    "quant_stats": "qt",
    "quantize": "qarray",
    "quantize_model": "flow",
    "quantize_params": "params",
    "require_complete": "params",
    "restore_quantization_rules": "prequantized",
    "rules_of_model": "kept",
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
