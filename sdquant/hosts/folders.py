"""Where a host keeps its models: what may be inspected in its tab, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..ui.model_folders import Roots
from . import display

# Settings and flags that name a folder of models, in any of the hosts.
_OPTIONS = ("ckpt_dir", "diffusers_dir", "unet_dir", "te_dir")
_FLAGS = ("ckpt_dir", "models_dir", "ckpt_dirs")


def roots() -> Roots:
    """The shipped models' folder and the host's folders of models that are there."""
    shared, paths = display.module("modules.shared"), display.module("modules.paths")
    named: list[Any] = [getattr(paths, "models_path", None)]
    named += [shared.opts.data.get(name) for name in _OPTIONS]
    named += [getattr(shared.cmd_opts, name, None) for name in _FLAGS]
    flat = [one for each in named for one in (each if isinstance(each, (list, tuple)) else [each])]
    found = dict.fromkeys(os.path.realpath(one) for one in flat if isinstance(one, (str, Path)) and str(one))
    return Roots(place for place in found if os.path.isdir(place) and os.path.dirname(place) != place)


def clean(text: str) -> str:
    """A sentence without the paths of this machine."""
    return roots().clean(text)
