"""The models bundled with sdquant: two small pipelines that generate handwritten digits."""

from __future__ import annotations

from pathlib import Path

from ..errors import MissingComponentError

MODELS = ("digits-sd", "digits-flux")


def path(name: str) -> Path:
    """Return the folder of a bundled pipeline.

    Raises:
        MissingComponentError: there is no such model, or it was left out of the installation.
    """
    folder = Path(__file__).parents[1] / "demo" / "models" / name
    if name not in MODELS:
        raise MissingComponentError(
            f"Unknown bundled model {name!r}", f"sdquant ships {' and '.join(MODELS)}", "Use one of them"
        )
    if not (folder / "model_index.json").exists():
        raise MissingComponentError(
            f"Cannot load the bundled model {name!r}",
            f"{folder} does not exist",
            "Reinstall sdquant, or train the model",
        )
    return folder


def place(name: str) -> str:
    """Return the folder of the bundled model of this name unless a file of that name exists; other paths unchanged."""
    return str(path(name)) if name in MODELS and not Path(name).exists() else name
