"""Draw sdquant/ui/thumbnails.png: the same digit by every scheme that can be made on the fly, for the page's table.

    python -m tools.thumbnails

One image after the other in a row, gray; their schemes are in its text, in that order.
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

import sdquant
from sdquant.core import registry
from sdquant.models import draw
from sdquant.planning import NOT_QUANTIZED, RULES

TARGET = Path(sdquant.__file__).parent / "ui" / "thumbnails.png"
MODEL, PROMPT, SEED, STEPS = "digits-sd", "a handwritten seven", 5, 12


def main() -> None:
    """Draw, and write the picture."""
    made: dict[str, Image.Image] = {}
    for name in (NOT_QUANTIZED, *(row.name for row in registry.schemes() if row.on_the_fly and row.name != RULES)):
        try:
            pipe = sdquant.load_model(
                sdquant.demo.path(MODEL), None if name == NOT_QUANTIZED else name, dtype="float32", progress=False
            )
        except sdquant.SdquantError as error:
            print(f"{name}: {error.why}")
            continue
        made[name] = draw(pipe, [PROMPT], seeds=[SEED], steps=STEPS)[0].convert("L")
        print(name, flush=True)
    first = next(iter(made.values()))
    sheet = Image.new("L", (first.width * len(made), first.height))
    for n, image in enumerate(made.values()):
        sheet.paste(image, (n * first.width, 0))
    names = PngInfo()
    names.add_text("schemes", " ".join(made))
    sheet.quantize(32).save(TARGET, pnginfo=names, optimize=True)
    print(f"{len(made)} schemes, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
