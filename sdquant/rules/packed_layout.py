"""Quantization settings of a layer's weight and input under a rule, and the layout of a packed weight. No torch."""

from __future__ import annotations

import math
from dataclasses import replace

from ..core import TensorSpec, Unfit
from ..errors import SettingsError
from .core.calibration_method import CalibrationMethod, method
from .core.how_to_quantize import HowToQuantize, scale_shape, tile_sizes
from .core.qtypes import qtype
from .qconfig import QtRule, QuantizationRule

# The dtype that a format stores its scales in, if smaller than the weight's: exact, since they were rounded to it.
SCALES = {"power of two": "float8_e8m0fnu", "float8_e4m3fn": "float8_e4m3fn"}

DEFAULT_METHOD = "absmax"  # of activations

UNIT = 8  # codes that are packed together, in as many bytes as each has bits

# In the details of a packed weight: the shape of its static range of activations.
ACT_SHAPE = "act_shape"


def weight_how(rule: QuantizationRule, shape: tuple[int, ...]) -> HowToQuantize:
    """Return the settings of a weight [out, in] or [out, in, k...]: a scale for each output, and each tile of inputs.

    Raises:
        Unfit: tiles that do not divide its inputs.
    """
    assert rule.weight_qtype is not None
    tiles = {} if rule.tile_size is None else {1: rule.tile_size}
    try:
        how = HowToQuantize(
            qtype=rule.weight_qtype,
            channelwise_axes=() if per_tensor(rule) else (0,),
            tiled_axes=tiles,
            calibration_method=rule.weight_calibration_method,
        )
        scale_shape(shape, how)
    except SettingsError as error:
        raise Unfit(f"tiles of {rule.tile_size} do not divide its {shape[1]} inputs") from error
    return how


def act_how(rule: QuantizationRule, ndim: int, *, conv: bool) -> HowToQuantize:
    """Return the settings of activations of `ndim` dimensions: a scale for each row (and tile) of a linear layer's
    input, or for each sample of a convolution's input."""
    assert rule.act_qtype is not None
    last = ndim - 1
    return HowToQuantize(
        qtype=rule.act_qtype,
        channelwise_axes=() if per_tensor(rule) else (0,) if conv else tuple(range(last)),
        tiled_axes={} if rule.tile_size is None or conv else {last: rule.tile_size},
        calibration_method=rule.act_calibration_method or DEFAULT_METHOD,
    )


def act_method(rule: QuantizationRule) -> CalibrationMethod:
    """Return the calibration method of activations."""
    return method(rule.act_calibration_method or DEFAULT_METHOD)


def per_tensor(rule: QuantizationRule) -> bool:
    """Return whether a whole tensor shares one scale."""
    return isinstance(rule, QtRule) and rule.disable_channelwise_axes


def plain_tiles(rule: QuantizationRule, shape: tuple[int, ...]) -> QuantizationRule:
    """Return the rule for a weight of this shape with its tile size as an int; None where one tile is all inputs.

    Raises:
        Unfit: see `weight_how`.
    """
    size = tile_sizes(shape, weight_how(rule, shape)).get(1)
    return replace(rule, tile_size=None if size == shape[1] and qtype(rule.weight_qtype or "").tile is None else size)


def layout(
    rule: QuantizationRule, shape: tuple[int, ...], dtype: str, act_shape: tuple[int, ...] | None = None
) -> dict[str, TensorSpec]:
    """Return shapes and dtypes of the tensors of a packed weight of this shape and dtype.

    Args:
        act_shape: of the static range of activations, if there is one; None for one number per tile.

    Raises:
        Unfit: the rule cannot hold such a weight.
    """
    if len(shape) < 2:
        raise Unfit(f"a weight of {len(shape)} dimension has no inputs")
    if len(shape) > 2 and rule.act_qtype is not None and qtype(rule.act_qtype).tile is not None:
        raise Unfit(f"{rule.act_qtype} needs tiles, and the activations of a convolution have none")
    how = weight_how(rule, shape)
    row = how.row
    if row.bits < 8:
        codes = TensorSpec(dtype="uint8", shape=(shape[0], row_bytes(math.prod(shape[1:]), row.bits)))
    else:
        codes = TensorSpec(dtype=row.storage, shape=shape)
    fixed = how.method.name == "fixed"
    size = (1,) * len(shape) if fixed else scale_shape(shape, how)
    scale = TensorSpec(dtype=SCALES.get(row.scale_type, "float32" if dtype == "float16" else dtype), shape=size)
    parts = {"qvalue": codes, "scale": scale}
    if how.method.asymmetric:
        parts["zero_point"] = TensorSpec(dtype=row.storage, shape=size)
    if rule.act_static_scale:
        assert rule.act_qtype is not None
        if act_shape is None:
            tiled = rule.tile_size is not None and len(shape) == 2 and act_method(rule).name != "fixed"
            act_shape = (size[1],) if tiled else (1,)
        parts["act_scale"] = TensorSpec(dtype="float32", shape=act_shape)
        if act_method(rule).asymmetric:
            parts["act_zero_point"] = TensorSpec(dtype=qtype(rule.act_qtype).storage, shape=act_shape)
    return parts


def row_bytes(row: int, bits: int) -> int:
    """Return the bytes of a row of `row` packed codes; the last unit is padded."""
    return -(-row // UNIT) * bits
