"""Qwix's numerics: types, calibration, quantized arrays and their products. Nothing here knows a model."""
