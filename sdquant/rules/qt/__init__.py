"""Training with quantization in the loop: Qwix's QtProvider for torch.

    provider.py      QtProvider: makes the layers for `quantize_model`
    layers.py        QtLinear, QtConv1d to QtConv3d: float parameters, quantized products
    dot_general_qt.py, conv_general_qt.py   the products and their gradients
    gradients.py     quantization of gradients
    saved_operands.py   operands saved for the backward pass
    statistics.py    ranges of activations over batches (quant_stats)

Weights stay float parameters; a layer quantizes its weight and its input each time it runs. Without a bwd_qtype
gradients pass straight through the rounding (quantization-aware training, QAT); with one they are quantized too, and
multiplied with the codes of the forward pass (quantized training, QT).
"""

from __future__ import annotations

from .layers import QtConv1d, QtConv2d, QtConv3d, QtLayer, QtLinear
from .provider import QtProvider
from .statistics import collecting, load_quant_stats, merge_quant_stats, quant_stats

__all__ = [
    "QtConv1d",
    "QtConv2d",
    "QtConv3d",
    "QtLayer",
    "QtLinear",
    "QtProvider",
    "collecting",
    "load_quant_stats",
    "merge_quant_stats",
    "quant_stats",
]
