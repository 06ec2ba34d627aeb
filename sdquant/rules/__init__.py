"""Quantization by rules: which layer gets which type, with the names and numerics of Qwix.

    rule.py          QuantizationRule and QtRule; the first that matches a layer decides
    qtypes.py        the types, one row each: bounds, storage
    method.py        how a range is to be found, as rules write it
    rounding.py      rounding into the types, and back
    calibration.py   the range of a tensor, and the scale that follows from it
    qarray.py        a quantized tensor with its scales; quantize and dequantize
    matmul.py        products of quantized tensors, in integers where both are

Bit for bit as in Qwix 0.1.8 on the CPU in float32 and bfloat16, where XLA divides as IEEE says. Better here: scales of
float16 are computed in float32, where Qwix takes those of ordinary weights for zero.

Not yet: the provider and the flow (`quantize_model`, `quantize_params`), static ranges, training, YAML.
"""
