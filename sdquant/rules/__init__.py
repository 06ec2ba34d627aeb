"""Quantization by rules: which layer gets which type; names and numerics are Qwix's.

    rules = [QuantizationRule(module_path=".*attn.*", weight_qtype="int4"), QuantizationRule(weight_qtype="int8")]
    pipe = sdquant.load_model("some-model", rules=rules)

In: rules, models, tensors. Out: `RulesSpec` for the planner, quantized models and arrays. `core/` has the arithmetic,
`providers/` and `qt/` quantize models with it. Bit for bit as in Qwix, but for what docs/rules.md lists.
May import `models` and what is below. The planner reads rules without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .calibrated_spec import (
        CalibratedSpec,
        calibrated_schemes,
        require_magnitudes,
        shrink_moments,
        unweighed,
        with_statistics,
    )
    from .core import calibration_method
    from .core.how_to_quantize import HowToQuantize
    from .core.qarray import QArray, dequantize, quantize
    from .core.sharding import sharded
    from .core.static_range import operand as input_operand
    from .file_rules import rules_in
    from .layer_statistics import ComponentStatistics, LayerStatistics
    from .mix_spec import MixSpec, Share, mix_of
    from .model_quantization import quantize_model
    from .model_rules import attach_rules, given_rules, rules_of_model
    from .packed_layout import ACT_SHAPE, plain_tiles
    from .params import assign, load_params, missing_params, quantize_params, require_complete
    from .parse import rules_of
    from .providers.prequantized import process_prequantized_params, restore_quantization_rules
    from .providers.ptq import PtqProvider
    from .qconfig import QtRule, QuantizationRule, Rules, rule_of
    from .qt import QtProvider, collecting, load_quant_stats, merge_quant_stats, quant_stats
    from .qt.statistics import QuantStat, has_statistics
    from .quant_spec import RulesSpec, is_for_products_alone, operation_of, with_rules
    from .range_checks import require_ranges
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "ACT_SHAPE", "CalibratedSpec", "ComponentStatistics", "HowToQuantize", "LayerStatistics", "MixSpec", "PtqProvider",
    "QArray", "QtProvider", "QtRule", "QuantStat", "QuantizationRule", "Rules", "RulesSpec", "Share", "assign",
    "attach_rules", "calibrated_schemes", "calibration_method", "collecting", "dequantize", "given_rules",
    "has_statistics", "infer_rules", "input_operand", "interception", "is_for_products_alone", "layer_statistics",
    "load_params", "load_quant_stats", "merge_quant_stats", "missing_params", "mix_of", "model_rules", "operation_of",
    "plain_tiles", "presets", "process_prequantized_params", "product_ranges", "qconfig", "quant_spec", "quant_stats",
    "quantize", "quantize_model", "quantize_params", "require_complete", "require_magnitudes", "require_ranges",
    "restore_quantization_rules", "rule_of", "rules_in", "rules_of", "rules_of_model", "sharded", "shrink_moments",
    "statistics_file", "unweighed", "weight_samples", "with_rules", "with_statistics",
]  # fmt: skip
