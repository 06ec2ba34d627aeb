"""Layers with float parameters that compute with quantized operands, and their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core import Unfit
from ...errors import SettingsError
from ...nn import require_fit, settings_of
from ...utils.autocast import is_autocast_on
from ..core.calibration_method import method
from ..core.qarray import range_of
from ..core.qtypes import qtype
from ..core.static_range import operand
from ..packed_layout import act_how, weight_how
from ..quant_spec import operation_of
from .conv_general_qt import qt_convolve
from .dot_general_qt import qt_linear
from .saved_operands import Operand, QtOperands
from .statistics import QuantStat

if TYPE_CHECKING:
    from typing import Self

    from ..qconfig import QtRule


class QtLayer(nn.Module):
    """Base of the layers. Comes before the `torch.nn` class in their bases.

    Parameters have the names and dtypes of the float layer, so that checkpoints are interchangeable.
    Under autocast the layer computes in the dtype that the float layer would.

    Attributes:
        rule: of its quantization. path: of the layer in its model.
        statistics: of the range of its input; None without act_static_scale. Not part of `state_dict`: see
            `quant_stats`.
        generator: of stochastic rounding; None is torch's own, which `torch.manual_seed` sets.
    """

    rule: QtRule
    path: str
    statistics: QuantStat | None
    generator: torch.Generator | None

    @classmethod
    def of(cls, module: nn.Module, rule: QtRule, path: str) -> Self:
        """Make the layer from a float one, whose parameters it shares.

        Raises:
            SettingsError: the rule cannot be used for it.
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.__dict__.update(settings_of(module))
        layer._parameters.update(module._parameters)
        layer.training = module.training
        shape = tuple(layer._float()[0].shape)
        conv = len(shape) > 2
        _check(rule, shape, path)
        layer.rule, layer.path, layer.generator, layer.statistics = rule, path, None, None
        if rule.act_static_scale:
            name = operand(path, operation_of(shape))
            layer.statistics = QuantStat(name, rule.act_batch_axes, whole=conv)
        return layer

    def float_layer(self) -> nn.Module:
        """Return the `torch.nn` layer of this one, with the same parameters."""
        base = next(base for base, quantized in LAYERS.items() if isinstance(self, quantized))
        floats = base.__new__(base)
        nn.Module.__init__(floats)
        own = ("rule", "path", "generator", "statistics")
        floats.__dict__.update({name: value for name, value in settings_of(self).items() if name not in own})
        floats._parameters.update(self._parameters)
        floats.training = self.training
        return floats

    def _float(self) -> tuple[Tensor, Tensor | None]:
        """Return the float weight and bias."""
        weight = self._parameters["weight"]
        assert weight is not None
        return weight, self._parameters.get("bias")

    def _operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the input, weight and bias in the compute dtype."""
        (weight, bias), kind = self._float(), x.device.type
        if not is_autocast_on(kind) or x.dtype == torch.float64:
            return x, weight, bias
        dtype = torch.get_autocast_dtype(kind)
        return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)

    @torch.no_grad()
    def _activations(self, x: Tensor, *, conv: bool) -> Operand:
        """Return the quantization of the input: its type, method and range."""
        if self.rule.act_qtype is None:
            return Operand(None)
        how = act_how(self.rule, x.ndim, conv=conv)
        limits = range_of(x, how)
        if self.statistics is not None:
            limits = self.statistics.range_for(limits)
        return Operand(how.qtype, how.calibration_method, limits)

    @torch.no_grad()
    def _weights(self, weight: Tensor) -> Operand:
        """Return the quantization of the weight: its type, method and range."""
        how = weight_how(self.rule, tuple(weight.shape))
        return Operand(how.qtype, how.calibration_method, range_of(weight, how))


class QtLinear(QtLayer, nn.Linear):
    """[..., in] -> [..., out]."""

    def forward(self, input: Tensor) -> Tensor:
        require_fit(input, self.weight.shape)
        x, weight, bias = self._operands(input)
        with torch.autocast(x.device.type, enabled=False):
            of_x, of_weight = self._activations(x, conv=False), self._weights(weight)
            return qt_linear(x, weight, bias, QtOperands(self.rule, of_x, of_weight, self.generator))


class _QtConv(QtLayer):
    def forward(self, input: Tensor) -> Tensor:
        return _convolved(self, input)


class QtConv1d(_QtConv, nn.Conv1d):
    """[b, in, l] or [in, l] -> [b, out, l'] or [out, l']."""


class QtConv2d(_QtConv, nn.Conv2d):
    """[b, in, h, w] or [in, h, w] -> [b, out, h', w'] or [out, h', w']."""


class QtConv3d(_QtConv, nn.Conv3d):
    """[b, in, d, h, w] or [in, d, h, w] -> [b, out, d', h', w'] or [out, d', h', w']."""


LAYERS: dict[type[nn.Module], type[QtLayer]] = {
    nn.Linear: QtLinear,
    nn.Conv1d: QtConv1d,
    nn.Conv2d: QtConv2d,
    nn.Conv3d: QtConv3d,
}


def _convolved(layer: Any, x: Tensor) -> Tensor:
    require_fit(x, layer.weight.shape, layer.groups)
    if x.ndim == layer.weight.ndim - 1:
        return _convolved(layer, x[None])[0]
    x, weight, bias = layer._operands(x)
    padding = layer.padding
    with torch.autocast(x.device.type, enabled=False):
        if layer.padding_mode != "zeros":
            x = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
            padding = 0
        of_x, of_weight = layer._activations(x, conv=True), layer._weights(weight)
        arguments = (layer.stride, padding, layer.dilation, layer.groups)
        return qt_convolve(x, weight, bias, arguments, QtOperands(layer.rule, of_x, of_weight, layer.generator))


def _check(rule: QtRule, shape: tuple[int, ...], path: str) -> None:
    """Raise now for rules that would fail when the layer runs."""
    what = f"Cannot train layer {path!r} with the rule for {rule.module_path!r}"
    fix = "Change the rule, or add an earlier one that matches this layer"
    if rule.weight_qtype is None:
        raise SettingsError(what, "the rule has no weight_qtype", fix)
    try:
        weight_how(rule, shape)
    except Unfit as reason:
        raise SettingsError(what, str(reason), fix) from None
    if rule.act_qtype is not None and len(shape) > 2 and qtype(rule.act_qtype).tile is not None:
        raise SettingsError(what, f"{rule.act_qtype} needs tiles, and the input of a convolution has none", fix)
    if rule.bwd_qtype is None:
        return
    row, how = qtype(rule.bwd_qtype), method(rule.bwd_calibration_method)
    fix = 'Use bwd_qtype="int8" or "float8_e5m2", with the method "absmax"'
    if row.tile is not None:
        raise SettingsError(what, f"{row.name} needs tiles, and gradients have none", fix)
    if how.asymmetric and not row.asymmetric:
        raise SettingsError(what, f"the range of gradients is asymmetric, but {row.name} has no zero point", fix)
