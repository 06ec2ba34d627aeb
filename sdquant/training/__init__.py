"""Training of a UNet or transformer, quantized or not: `sdquant train CONFIG.yml key=value ...`; LoRA, calibration.

In: a config file (`config`), a model and pictures. Out: a model that can be saved, a LoRA, or static activation ranges.
`run.py` goes from settings to a trained model, read top to bottom. On the CPU a resumed training is bit-identical to an
uninterrupted one: no random generator's state is carried from step to step (see rng.py), and all other state is in the
checkpoint. May import `integrations` and what is below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .calibration import Calibration, calibrate, prepare_models, refuse_unfollowed
    from .config import Key, RunConfig, quantization_of
    from .config import load as load_config
    from .config.generate import draw_config
    from .config.keys import keys as config_keys
    from .config.value_types import format_value
    from .run import Summary, train
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "Calibration", "Key", "RunConfig", "Summary", "calibrate", "config", "config_keys", "digits", "draw_config",
    "format_value", "load_config", "lora", "prepare_models", "quantization_of", "refuse_unfollowed", "train",
]  # fmt: skip
