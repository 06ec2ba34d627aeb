"""Keys of drawing: what `generate` draws, and the samples of `train`."""

from __future__ import annotations

from ..value_types import MAXDIFFUSION, Key

_GENERATE = ("generate",)
_MOST_SEED = 2**63 - 1

KEYS = (
    Key(name="prompt", kind="str", default="", origin=MAXDIFFUSION, help="what to draw", commands=_GENERATE),
    Key(
        name="negative_prompt", kind="str", default="", origin=MAXDIFFUSION, commands=_GENERATE,
        help="what not to draw; '' for nothing of it",
    ),
    Key(
        name="guidance_scale", kind="float", default=None, origin=MAXDIFFUSION, commands=_GENERATE,
        help="how closely the prompt is followed (default: the pipeline's)",
    ),
    Key(
        name="num_inference_steps", kind="int", default=20, least=1, origin=MAXDIFFUSION, commands=_GENERATE,
        help="denoising steps",
    ),
    Key(
        name="seed", kind="int", default=0, least=0, most=_MOST_SEED, origin=MAXDIFFUSION,
        help="of the noise, and of all that is random in training",
    ),
    Key(
        name="resolution", kind="int", default=None, least=1, origin=MAXDIFFUSION,
        help="width and height in pixels (default: the model's)",
    ),
    Key(
        name="height", kind="int", default=None, least=1, origin=MAXDIFFUSION, commands=_GENERATE,
        help="height in pixels, where it is not the width",
    ),
    Key(
        name="width", kind="int", default=None, least=1, origin=MAXDIFFUSION, commands=_GENERATE,
        help="width in pixels, where it is not the height",
    ),
    Key(
        name="count", kind="int", default=None, least=1, commands=_GENERATE,
        help="how many pictures, with seeds from seed on (default: per_device_batch_size)",
    ),
    Key(
        name="per_device_batch_size", kind="int", default=1, least=1, origin=MAXDIFFUSION,
        help="pictures at once on a device",
    ),
)  # fmt: skip
