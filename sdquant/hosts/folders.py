"""The folders in which a host keeps its models; its tab can inspect files in these only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..ui import Roots
from . import display

# Settings and flags that name a folder of models, in any of the hosts.
_OPTIONS = ("ckpt_dir", "diffusers_dir", "unet_dir", "te_dir")
_FLAGS = ("ckpt_dir", "models_dir", "ckpt_dirs")


def roots() -> Roots:
    """Return the folder of bundled models, and the host's model folders that exist."""
    shared, paths = display.module("modules.shared"), display.module("modules.paths")
    named: list[Any] = [getattr(paths, "models_path", None)]
    named += [shared.opts.data.get(name) for name in _OPTIONS]
    named += [getattr(shared.cmd_opts, name, None) for name in _FLAGS]
    flat = [one for each in named for one in (each if isinstance(each, (list, tuple)) else [each])]
    real_paths = dict.fromkeys(os.path.realpath(one) for one in flat if isinstance(one, (str, Path)) and str(one))
    return Roots(place for place in real_paths if os.path.isdir(place) and os.path.dirname(place) != place)


def clean(text: str) -> str:
    """Remove the paths of this machine from a sentence."""
    return roots().clean(text)
