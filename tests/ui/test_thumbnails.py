"""The thumbnails of the scheme table: one for each scheme that can be made, small."""

from __future__ import annotations

from sdquant.core import registry
from sdquant.planning import RULES
from sdquant.ui import thumbnails


def test_every_scheme_has_one() -> None:
    made = {row.name for row in registry.schemes() if row.on_the_fly and row.name != RULES}
    assert made <= set(thumbnails.thumbnail_schemes()), "run python -m tools.thumbnails"
    assert "none" in thumbnails.thumbnail_schemes() and thumbnails.PICTURE.stat().st_size < 300_000
    assert 'aria-label="A seven as nf4 draws it' in thumbnails.thumbnail("nf4", "nf4")
    assert thumbnails.thumbnail("q4_k", "q4_k") == "" and "data:image/png;base64," in thumbnails.thumbnail_css()
