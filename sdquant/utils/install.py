"""Commands that install sdquant and the packages behind its schemes, for every text that names one.

A web UI pins the packages of its Python, and a plain `pip install` would replace them: Forge's diffusers 0.31 by 0.42,
A1111's pydantic 1 by 2. So in such a Python all commands name that Python, install what is missing, and nothing else.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

CHECKOUT = "PATH/TO/SDQUANT"  # the folder of a checkout, as the documentation and the folders for web UIs write it
SOURCE = CHECKOUT  # what pip installs: no package index has sdquant yet. "sdquant" once one has.

# The packages of sdquant's extras, as pyproject.toml has them.
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "bnb": ("bitsandbytes>=0.48",),
    "quanto": ("optimum-quanto>=0.2.7",),
    "gguf": ("gguf>=0.17", "libgguf>=0.2.2"),
    "nncf": ("nncf>=3.3",),
    "openvino": ("openvino>=2026.0", "nncf>=3.3"),
    "sdnq": ("sdnq>=0.2.5",),
    "comfy": ("comfy-kitchen>=0.2.40",),
    "figures": ("matplotlib>=3.9", "pillow>=10.1"),
}
# What these packages need that a web UI may not have: all but torch, numpy and what sdquant itself needs.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "optimum-quanto": ("ninja", "huggingface_hub"),
    "sdnq": ("diffusers", "transformers", "accelerate"),
    "gguf": ("requests",),
    "nncf": (
        "networkx", "ninja", "openvino-telemetry", "pydot", "pyparsing", "rich", "markdown-it-py", "mdurl", "pygments",
        "scikit-learn", "joblib", "narwhals", "threadpoolctl", "scipy", "tabulate",
    ),
    "openvino": ("openvino-telemetry",),
    "matplotlib": (
        "contourpy", "cycler", "fonttools", "kiwisolver", "pillow", "pyparsing", "python-dateutil", "six", "tzdata",
    ),
    "peft": ("transformers", "accelerate", "huggingface_hub"),
}  # fmt: skip

_inside = False  # whether this process is a web UI; its extension says so


def set_inside(inside: bool) -> None:
    """Set whether this process is a web UI."""
    global _inside
    _inside = inside


def in_web_ui() -> bool:
    """Return whether this Python is that of a web UI: this process is one, or its environment is in one's folder."""
    home = Path(sys.prefix).parent
    places = ("webui.py", "comfy/sd.py", "ComfyUI/comfy/sd.py")  # the last: the portable one, its Python beside it
    return _inside or any((home / name).is_file() for name in places)


def install_extra(extra: str) -> str:
    """Return the command that installs sdquant with an extra, such as "gguf"; in a web UI, its packages alone."""
    if in_web_ui() and extra in EXTRAS:
        return install_beside(*EXTRAS[extra])
    return f'pip install "{SOURCE}[{extra}]"'


def install_packages(*names: str) -> str:
    """Return the command that installs packages which are no extra's."""
    return install_beside(*names) if in_web_ui() else f"pip install {' '.join(names)}"


def install_beside(*requirements: str) -> str:
    """Return the command that installs packages, and what they need and is missing, beside all that is there."""
    where = f"--target {spaced(str(bundle / 'packages'))} " if (bundle := _bundle()) is not None else ""
    return (
        f"{spaced(sys.executable)} -m pip install --no-deps {where}{' '.join(map(_quoted, with_needs(requirements)))}"
    )


def install_alone(python: str) -> str:
    """Return the command that installs sdquant for a Python whose other packages stay as they are."""
    return f"{python} -m pip install --no-deps {SOURCE}"


def with_needs(requirements: tuple[str, ...], is_installed: Callable[[str], bool] | None = None) -> list[str]:
    """Return requirements and the packages that they need and that are not installed."""
    there = is_installed or _is_installed
    needs = [name for row in requirements for name in NEEDS.get(re.split("[<>=!~]", row)[0], ())]
    return [*requirements, *(name for name in dict.fromkeys(needs) if not there(name))]


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _bundle() -> Path | None:
    """Return the folder of the bundle in a web UI's extension that this sdquant is in; None if it is in none."""
    code = Path(__file__).parents[2]
    return code.parent if (code.name, code.parent.name) == ("code", "bundle") else None


def spaced(path: str) -> str:
    """Return a path as a command line has it: in quotes if there is a space in it."""
    return f'"{path}"' if " " in path else path


def _quoted(requirement: str) -> str:
    return f'"{requirement}"' if re.search("[<>]", requirement) else requirement
