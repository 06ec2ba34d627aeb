"""A picture of each scheme in the table: from the last comparison of this model, or else the same digit.

The digits are in one file, a part for each scheme, which `python -m tools.thumbnails` made.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..planning import NOT_QUANTIZED
from .html_components import escape

if TYPE_CHECKING:
    from ..evaluation import Comparison

PICTURE = Path(__file__).with_suffix(".png")
SIDE = 44  # pixels in the page
_SHARP = 2 * SIDE  # pixels of a picture of a comparison: screens have up to two for one of the page
_SHOWN = 60  # characters of a prompt
_REFERENCE = "as found"  # what a comparison calls a model that its files do not quantize


@dataclass(frozen=True, kw_only=True, eq=False)  # Gradio hashes what a page keeps
class ComparedImages:
    """The small pictures of a comparison.

    Attributes:
        model: the path of the model. prompt: what they show.
        pictures: scheme to a `data:` URL, and what it is.
    """

    model: str
    prompt: str
    pictures: Mapping[str, tuple[str, str]] = field(repr=False)


def compared_images(result: Comparison) -> ComparedImages:
    """Return the small pictures of a comparison: a JPEG of some kilobytes for each scheme that gave an image."""
    pictures = {}
    for row in result.rows:
        if row.image is None:
            continue
        closeness = "identical to the first" if row.identical else f"{row.psnr:.1f} dB" if row.psnr is not None else ""
        scheme = NOT_QUANTIZED if row.label == _REFERENCE else row.label
        pictures[scheme] = (_data_url(row.image), closeness)
    return ComparedImages(model=result.model, prompt=result.prompt, pictures=pictures)


def _data_url(image: Any) -> str:
    from PIL import Image, ImageOps

    enlarge = Image.Resampling.NEAREST if max(image.size) < _SHARP else Image.Resampling.LANCZOS
    small = ImageOps.fit(image.convert("RGB"), (_SHARP, _SHARP), enlarge)
    out = io.BytesIO()
    small.save(out, "JPEG", quality=88)
    return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode('ascii')}"


@cache
def thumbnail_schemes() -> tuple[str, ...]:
    """Return the schemes in the order of the picture; none if there is no picture."""
    from PIL import Image

    if not PICTURE.is_file():
        return ()
    with Image.open(PICTURE) as image:
        return tuple(str(image.info.get("schemes", "")).split())


def thumbnail_css() -> str:
    """Return the style of the thumbnails, with the picture in it: the page has it once."""
    if not thumbnail_schemes():
        return ""
    data = base64.b64encode(PICTURE.read_bytes()).decode("ascii")
    return (
        f".sq-thumb {{ float: right; width: {SIDE}px; height: {SIDE}px; margin-left: 10px; border-radius: 4px; "
        f"background: url(data:image/png;base64,{data}) 0 0 / {SIDE * len(thumbnail_schemes())}px {SIDE}px; }}\n"
    )


def thumbnail(scheme: str, name: str, compared: ComparedImages | None = None) -> str:
    """Format the thumbnail of a scheme; "" if there is none.

    Args:
        name: what the page calls the scheme. compared: the last comparison, if it was of the model at hand.
    """
    if compared is not None and scheme in compared.pictures:
        url, closeness = compared.pictures[scheme]
        words = f"{_quoted(compared.prompt)} as {name} draws it" + (f": {closeness}" if closeness else "")
        return _span(words, f"background:url({url}) center/cover", "sq-compared")
    if scheme not in thumbnail_schemes():
        return ""
    at = -SIDE * thumbnail_schemes().index(scheme)
    return _span(f"A seven as {name} draws it, by a small model", f"background-position:{at}px 0")


def _span(words: str, style: str, more: str = "") -> str:
    label = escape(words)
    classes = f"sq-thumb {more}".rstrip()
    return f'<span class="{classes}" role="img" title="{label}" style="{style}"></span>'


def pictures_note(compared: ComparedImages | None) -> str:
    """Say what the thumbnails of a table are."""
    if compared is None or not compared.pictures:
        return "Pictures: a seven by a small model; what you compare in the Compare tab takes its place."
    return (
        f"Pictures: {_quoted(compared.prompt)} from your last comparison; of other schemes, a seven by a small model."
    )


def _quoted(prompt: str) -> str:
    text = " ".join(prompt.split())
    return f"“{text if len(text) <= _SHOWN else text[: _SHOWN - 1] + '…'}”"
