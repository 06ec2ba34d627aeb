"""The same digit as each scheme draws it, which `python -m tools.thumbnails` made: one picture, a part for each."""

from __future__ import annotations

import base64
from functools import cache
from pathlib import Path

from .html_components import escape

PICTURE = Path(__file__).with_suffix(".png")
SIDE = 44  # pixels in the page


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


def thumbnail(scheme: str, name: str) -> str:
    """Format the thumbnail of a scheme; "" if there is none."""
    if scheme not in thumbnail_schemes():
        return ""
    at = -SIDE * thumbnail_schemes().index(scheme)
    words = escape(f"A seven as {name} draws it, by a small model")
    label = f'aria-label="{words}" title="{words}"'
    return f'<span class="sq-thumb" role="img" {label} style="background-position:{at}px 0"></span>'
