"""A mix in the settings tab: quality against bytes with the chosen point, and a bar for each block by format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..planning import blocks_of, mix_blocks
from ..utils.byte_sizes import size
from . import quality_curve
from .html_components import escape, note

if TYPE_CHECKING:
    from ..planning import MixBlock, Plan


def mix_html(plan: Plan) -> str:
    """Format the mix of a plan; "" if it has none."""
    if plan.curve is None:
        return ""
    rows = blocks_of(plan)
    bits = mix_blocks.bits_of(plan)
    guess = note("Applying reads the weights once, which measures their errors, and chooses by them.")
    key = "".join(f'<span class="sq-bits" style="--tone:{_tone(bits, word)}">{escape(word)}</span>' for word in bits)
    return (
        f'<div class="sq-mix">{quality_curve.predicted(plan.curve)}{guess if plan.curve.how == "names" else ""}'
        f"{note(plan.why or '')}<details><summary>Formats, block by block</summary><p>{key}</p>"
        f"{''.join(_bar(row, bits, _most(rows)) for row in rows)}</details></div>"
    )


def _tone(bits: dict[str, float], word: str) -> str:
    return mix_blocks.colour_of(bits[word])


def _most(rows: list[MixBlock]) -> int:
    return max(sum(row.bytes.values()) for row in rows)


def _bar(row: MixBlock, bits: dict[str, float], most: int) -> str:
    whole = sum(row.bytes.values())
    parts = "".join(
        f'<span class="sq-part" style="--tone:{_tone(bits, word)};width:{100 * nbytes / most:.2f}%" '
        f'title="{escape(word)}: {size(nbytes)}"></span>'
        for word, nbytes in row.bytes.items()
    )
    return (
        f'<div class="sq-bar"><div class="sq-bar-head"><span>{escape(row.name)}</span>'
        f'<span>{row.bits:.1f} bits, {size(whole)}</span></div><div class="sq-parts">{parts}</div></div>'
    )
