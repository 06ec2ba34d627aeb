"""The models that come with sdquant: two small pipelines that draw handwritten digits."""

from __future__ import annotations

from pathlib import Path

from ..errors import MissingComponentError

MODELS = ("digits-sd", "digits-flux")


def path(name: str) -> Path:
    """The folder of a shipped pipeline.

    Raises:
        MissingComponentError: there is no such model, or it was left out of the installation.
    """
    folder = Path(__file__).parents[1] / "demo" / "models" / name
    if name not in MODELS:
        raise MissingComponentError(
            f"The shipped model {name!r} was asked for", f"sdquant ships {' and '.join(MODELS)}", "Choose one of them"
        )
    if not (folder / "model_index.json").exists():
        raise MissingComponentError(
            f"The shipped model {name!r} was asked for", f"{folder} is not there", "Install sdquant again, or train it"
        )
    return folder


def place(name: str) -> str:
    """A path as given, or that of the shipped model of this name where no such file exists."""
    return str(path(name)) if name in MODELS and not Path(name).exists() else name
