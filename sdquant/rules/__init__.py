"""Quantization by rules: which layer gets which type, with the names and numerics of Qwix.

    qtypes.py        the types, one row each: bounds, storage, rounding into them and back
    calibration.py   the range of a tensor, and the scale that follows from it
    qarray.py        a quantized tensor with its scales; quantize and dequantize

Bit for bit as in Qwix on the CPU in float32 and bfloat16. What is better here: scales of float16 are computed in float32.
"""
