"""Forge Neo 2.26, 5692d2d (2026-08-17), backend/quant_ops.py: its own quantized tensors: none here."""


class QuantizedTensor:
    pass
