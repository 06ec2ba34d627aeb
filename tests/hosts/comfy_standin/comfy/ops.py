"""Layers that cast their weights when used, as in `comfy/ops.py`."""

import torch

import comfy.model_management

RAN = []  # the classes whose forward ran


def run_every_op():
    """Where ComfyUI looks whether it was interrupted."""


def cast_bias_weight(s, input=None, dtype=None, device=None, bias_dtype=None, offloadable=False):
    dtype, device = dtype or input.dtype, device or input.device
    weight = comfy.model_management.cast_to(s.weight, None, device, copy=len(s.weight_function) > 0).to(dtype)
    for function in s.weight_function:
        weight = function(weight)
    bias = None
    if s.bias is not None:
        bias = comfy.model_management.cast_to(s.bias, None, device, copy=len(s.bias_function) > 0).to(
            bias_dtype or dtype
        )
        for function in s.bias_function:
            bias = function(bias)
    return weight, bias


class CastWeightBiasOp:
    comfy_cast_weights = False
    weight_function = []  # noqa: RUF012
    bias_function = []  # noqa: RUF012


class _Cast:
    def reset_parameters(self):
        return None

    def forward(self, *args, **kwargs):
        run_every_op()
        RAN.append(type(self))
        if self.comfy_cast_weights or len(self.weight_function) > 0 or len(self.bias_function) > 0:
            return self.forward_comfy_cast_weights(*args, **kwargs)
        return super().forward(*args, **kwargs)


class _Convolution(_Cast):
    def forward_comfy_cast_weights(self, input):
        weight, bias = cast_bias_weight(self, input)
        return self._conv_forward(input, weight, bias)


class disable_weight_init:
    class Linear(_Cast, torch.nn.Linear, CastWeightBiasOp):
        def forward_comfy_cast_weights(self, input):
            weight, bias = cast_bias_weight(self, input)
            return torch.nn.functional.linear(input, weight, bias)

    class Conv1d(_Convolution, torch.nn.Conv1d, CastWeightBiasOp):
        pass

    class Conv2d(_Convolution, torch.nn.Conv2d, CastWeightBiasOp):
        pass

    class Conv3d(_Convolution, torch.nn.Conv3d, CastWeightBiasOp):
        def _conv_forward(self, input, weight, bias, autopad=None, *args, **kwargs):
            if autopad == "causal_zero":
                weight = weight[:, :, -input.shape[2] :, :, :]
            return super()._conv_forward(input, weight, bias, *args, **kwargs)

        def forward_comfy_cast_weights(self, input, autopad=None):
            weight, bias = cast_bias_weight(self, input)
            return self._conv_forward(input, weight, bias, autopad=autopad)

    class LayerNorm(_Cast, torch.nn.LayerNorm, CastWeightBiasOp):
        def forward_comfy_cast_weights(self, input):
            weight, bias = cast_bias_weight(self, input) if self.weight is not None else (None, None)
            return torch.nn.functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)

    class RMSNorm(_Cast, torch.nn.RMSNorm, CastWeightBiasOp):
        def reset_parameters(self):
            self.bias = None

        def forward_comfy_cast_weights(self, input):
            weight, _ = cast_bias_weight(self, input) if self.weight is not None else (None, None)
            return torch.nn.functional.rms_norm(input, self.normalized_shape, weight, self.eps)


class manual_cast(disable_weight_init):
    class Linear(disable_weight_init.Linear):
        comfy_cast_weights = True

    class Conv1d(disable_weight_init.Conv1d):
        comfy_cast_weights = True

    class Conv2d(disable_weight_init.Conv2d):
        comfy_cast_weights = True

    class Conv3d(disable_weight_init.Conv3d):
        comfy_cast_weights = True

    class LayerNorm(disable_weight_init.LayerNorm):
        comfy_cast_weights = True

    class RMSNorm(disable_weight_init.RMSNorm):
        comfy_cast_weights = True
