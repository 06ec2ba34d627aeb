"""The verdict in the settings tab: support for a choice of settings, the reasons, and the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..compat import hardware
from ..planning import VERDICTS, fields
from . import html_components, mix_view
from .html_components import escape
from .page_words import in_page_words
from .plan_preview import capacity_for

if TYPE_CHECKING:
    from ..planning import Plan
    from .model_folders import Roots
    from .plan_preview import Review

_TITLES = {
    "works": "✓ This works",
    "slow": "◔ This works, and is slow",
    "untested": "? Nobody has tried this",
}


def shown(review: Review, values: Mapping[str, Any], roots: Roots) -> str:
    """Format the verdict as a box, and the plan as bars below it."""
    if review.error is not None or review.plan is None:
        return html_components.refusal(
            review.error or RuntimeError("there is no plan"), roots, [fix.text for fix in review.fixes]
        )
    free = capacity(review)
    if html_components.is_too_large(review.plan, free):
        return _too_large(review, review.plan) + html_components.plan_bars(review.plan, free)
    worst = max((_chosen(review, values)), key=lambda row: VERDICTS.index(row[0]), default=("works", ""))
    verdict = "untested" if worst[0] == "breaks" else worst[0]  # the plan was made: it was insisted on
    reason = html_components.paragraph(in_page_words(worst[1]) + ".") if verdict != "works" and worst[1] else ""
    card = html_components.card(verdict, escape(_TITLES[verdict]), reason)
    return card + html_components.plan_bars(review.plan, free) + mix_view.mix_html(review.plan)


def _too_large(review: Review, plan: Plan) -> str:
    memory = "the budget" if plan.budget is not None else f"the free {html_components.memory_name(plan.device)}"
    ways = [fix.text for fix in review.fixes] + ["use a preset above, which finds what fits", "choose a smaller scheme"]
    return html_components.card(
        "untested",
        f"? Too large for {memory}",
        html_components.paragraph("It may end with an error, or take very long."),
        f"<p><b>What to do:</b> {escape(html_components.listed(ways))}.</p>",
    )


def _chosen(review: Review, values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return verdict and reason of the choice in each field that the matrix covers."""
    marks = []
    for row in fields():
        mark = review.marks.get(row.name, {}).get(str(row.shown(values[row.name])))
        if mark is not None:
            marks.append((mark.verdict, mark.why))
    return marks


def capacity(review: Review) -> int | None:
    """Return the bytes available for weights on the plan's device."""
    return None if review.plan is None else capacity_for(review.plan, hardware.probe())
