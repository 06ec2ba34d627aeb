"""reForge 3b56b268 (2026-03-11), ldm_patched/modules/ops.py: layers whose class says that they may stay in RAM."""

import torch


class CastWeightBiasOp:
    ldm_patched_cast_weights = False
    weight_function = []  # noqa: RUF012 - reForge's own
    bias_function = []  # noqa: RUF012

    def cast_bias_weight(self, x):
        found = []
        for value, functions in ((self.weight, self.weight_function), (self.bias, self.bias_function)):
            for function in functions:
                value = function(value.clone())
            found.append(None if value is None else value.to(x))
        return found


class disable_weight_init:
    class Linear(torch.nn.Linear, CastWeightBiasOp):
        def forward(self, x):
            return torch.nn.functional.linear(x, *self.cast_bias_weight(x))

    class Conv2d(torch.nn.Conv2d, CastWeightBiasOp):
        def forward(self, x):
            return self._conv_forward(x, *self.cast_bias_weight(x))
