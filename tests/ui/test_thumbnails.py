"""The thumbnails of the scheme table: one for each scheme that can be made, small; or of a comparison."""

from __future__ import annotations

import base64
import io

from PIL import Image

from sdquant.core import registry
from sdquant.evaluation import Comparison, ComparisonRow
from sdquant.planning import RULES
from sdquant.ui import thumbnails


def test_every_scheme_has_one() -> None:
    made = {row.name for row in registry.schemes() if row.on_the_fly and row.name != RULES}
    assert made <= set(thumbnails.thumbnail_schemes()), "run python -m tools.thumbnails"
    assert "none" in thumbnails.thumbnail_schemes() and thumbnails.PICTURE.stat().st_size < 300_000
    assert 'title="A seven as nf4 draws it' in thumbnails.thumbnail("nf4", "nf4")
    assert thumbnails.thumbnail("q4_k", "q4_k") == "" and "data:image/png;base64," in thumbnails.thumbnail_css()


def test_those_of_a_comparison() -> None:
    def row(label: str, size: tuple[int, int] | None, **more: float) -> ComparisonRow:
        image = None if size is None else Image.new("RGB", size, "red")
        return ComparisonRow(quant=label, label=label, image=image, **more)

    rows = (row("as found", (2000, 900)), row("nf4", (32, 32), psnr=21.04), row("int8", None))
    result = Comparison(
        model="m", prompt='a "seven"\n' + "x" * 99, seed=0, steps=1, guidance=None, size=(1, 1), settings={},
        device="cpu", amplify=4, rows=rows, versions={}, machine={},
    )  # fmt: skip
    compared = thumbnails.compared_images(result)
    assert set(compared.pictures) == {"none", "nf4"}
    for url, _ in compared.pictures.values():
        data = base64.b64decode(url.partition(",")[2])
        assert Image.open(io.BytesIO(data)).size == (88, 88) and len(data) < 10_000
    shown = thumbnails.thumbnail("nf4", "nf4", compared)
    assert "“a &quot;seven&quot; xxx" in shown and "…” as nf4 draws it: 21.0 dB" in shown
    assert "A seven as int8" in thumbnails.thumbnail("int8", "int8", compared)
    assert "last comparison" in thumbnails.pictures_note(compared)
