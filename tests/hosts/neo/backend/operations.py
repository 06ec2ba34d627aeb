"""Forge Neo 2.26, 5692d2d (2026-08-17), backend/operations.py: layers with functions for their weights and biases."""

import torch


class ForgeWeights:
    parameters_manual_cast = False
    weight_function = []  # noqa: RUF012 - Neo's own
    bias_function = []  # noqa: RUF012

    def values(self, x):
        found = []
        for value, functions in ((self.weight, self.weight_function), (self.bias, self.bias_function)):
            for function in functions:
                value = function(value.clone())
            found.append(None if value is None else value.to(x))
        return found


class ForgeOperations:
    class Linear(torch.nn.Linear, ForgeWeights):
        def forward(self, x):
            return torch.nn.functional.linear(x, *self.values(x))

    class Conv2d(torch.nn.Conv2d, ForgeWeights):
        def forward(self, x):
            return self._conv_forward(x, *self.values(x))
