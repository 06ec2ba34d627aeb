"""Keys of training."""

from __future__ import annotations

from ..row import MAXDIFFUSION, Key

_TRAIN = ("train",)

KEYS = (
    Key(
        name="learning_rate", kind="float", default=1e-5, least=0, origin=MAXDIFFUSION, commands=_TRAIN,
        help="the optimizer's learning rate",
    ),
    Key(
        name="max_train_steps", kind="int", default=1000, least=1, origin=MAXDIFFUSION, commands=_TRAIN,
        help="optimizer steps in all",
    ),
)  # fmt: skip
