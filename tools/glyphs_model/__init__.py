"""How glyphs-flux is trained: `python -m tools.glyphs_model.train`. It does not come with sdquant, for 14 MB."""

from pathlib import Path

FOLDER = Path(__file__).parents[2] / "train-work" / "glyphs-flux"
