"""The table of keys: every key of a config file is one row of one of these tables. To add a key, add a row.

loading.py        the model, and how it is loaded: most rows are made from the fields of `Request`
quantization.py   what is quantized into what
drawing.py        what is drawn
training.py       how a model is trained
output.py         where results go, and over how many devices work is spread
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from ....errors import SettingsError
from ....utils.arguments import ANSWERS
from ....utils.suggestions import nearest

if TYPE_CHECKING:
    from ..value_types import Key


@lru_cache(maxsize=1)
def keys() -> tuple[Key, ...]:
    """Return all rows, in the order of a listing."""
    from . import drawing, loading, output, quantization, training

    return (*loading.keys(), *quantization.KEYS, *drawing.KEYS, *training.KEYS, *output.KEYS)


@lru_cache(maxsize=1)
def _by_name() -> dict[str, Key]:
    return {row.name: row for row in keys()}


def key(name: str) -> Key:
    """Return the row of this name.

    Raises:
        SettingsError: there is none.
    """
    row = _by_name().get(name)
    if row is None:
        raise SettingsError(f"Unknown key {name!r:.80}", f"the keys are {', '.join(_by_name())}", did_you_mean(name))
    return row


# What the command line, `load_model`, MaxDiffusion and Qwix call the same, or nearly.
_OTHER_NAMES = {
    "model": "pretrained_model_name_or_path",
    "model_name_or_path": "pretrained_model_name_or_path",
    "quant": "quantization",
    "quantization_calibration_method": "weight_quantization_calibration_method",
    "module_path": "qwix_module_path",
    "steps": "num_inference_steps",
    "guidance": "guidance_scale",
    "out": "output_dir",
    "batch_size": "per_device_batch_size",
}


def did_you_mean(name: str) -> str:
    """Return the fix for a key that does not exist: the nearest key, if there is one."""
    fields = {row.field: row.name for row in keys() if row.field}
    low = name.strip().lower().replace("-", "_")
    answer = ANSWERS.get(low)
    near = _OTHER_NAMES.get(low) or fields.get(low) or fields.get(answer.use if answer is not None else "")
    near = near or nearest(low, _by_name())
    return f"Did you mean {near}?" if near else "Remove it, or use one of these"
