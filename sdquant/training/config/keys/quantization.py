"""Keys of quantization."""

from __future__ import annotations

import re

from ....errors import SettingsError
from ....rules import calibration_method
from ..value_types import MAXDIFFUSION, Key


def _pattern(value: str) -> None:
    try:
        re.compile(value)
    except re.error as error:
        raise SettingsError(
            f"Cannot use qwix_module_path={value!r}",
            f"it is not a valid regular expression: {error}",
            'Use a pattern such as ".*attn.*"',
        ) from error


def _tile(value: float | None) -> None:
    if value is not None and (value <= 0 or (isinstance(value, float) and value > 1)):
        raise SettingsError(
            f"Cannot use tile_size={value}",
            "it must be a whole number above 0, or a fraction (one divided by the number of tiles)",
            "Use 128, or 0.25 for four tiles",
        )


_MOST_PARTS = 4096  # more devices than anybody has; each part costs a look at every weight

KEYS = (
    Key(
        name="quantization", kind="str", default="", origin=MAXDIFFUSION, field="quant",
        help="a preset of rules or a scheme, as use_qwix_quantization says; component=scheme+component=scheme for each "
        "its own; '' changes nothing",
    ),
    Key(
        name="use_qwix_quantization", kind="bool", default=False, origin=MAXDIFFUSION,
        help="true: quantization names a preset of the rule engine; false: a scheme of a backend",
    ),
    Key(
        name="qwix_module_path", kind="str", default=".*", origin=MAXDIFFUSION, check=_pattern,
        help="the modules that a preset is for: a regular expression for the whole of a module's path",
    ),
    Key(
        name="weight_quantization_calibration_method", kind="str", default="absmax", origin=MAXDIFFUSION,
        check=calibration_method.method,
        help="how a preset finds the range of weights: absmax, minmax, rms,7 or fixed,-10,10",
    ),
    Key(
        name="act_quantization_calibration_method", kind="str", default="absmax", origin=MAXDIFFUSION,
        check=calibration_method.method, help="the same for activations",
    ),
    Key(
        name="bwd_quantization_calibration_method", kind="str", default="absmax", origin=MAXDIFFUSION,
        check=calibration_method.method, commands=("train",), help="the same for gradients",
    ),
    Key(
        name="tile_size", kind="number", default=None, check=_tile,
        help="numbers that share a scale in a preset's linear layers, or one over how many tiles there are "
        "(default: the preset's own)",
    ),
    Key(
        name="rules", kind="mappings", default=(),
        help="rules of one's own instead of a preset: mappings of the fields of QuantizationRule, the first that "
        "matches a layer decides",
    ),
    Key(
        name="quant_stats", kind="str", default=None,
        help="file of activation ranges found by calibration (.safetensors), which makes a preset's ranges static",
    ),
    Key(
        name="quantization_local_shard_count", kind="int", default=-1, least=-1, most=_MOST_PARTS,
        origin=MAXDIFFUSION,
        help="parts that ranges are found in, one after another or by card or process: of weights (generate), of the "
        "sum in the weight's gradient (train; 0 leaves it unquantized); -1: as many as slices",
    ),
    Key(
        name="compile_topology_num_slices", kind="int", default=-1, least=-1, most=_MOST_PARTS,
        origin=MAXDIFFUSION,
        help="slices that the work counts as spread over; -1 or 0: as many as nodes, else accelerators",
    ),
)  # fmt: skip
