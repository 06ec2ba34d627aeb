"""Format values as parts of the page in HTML. All text from outside (names, metadata, tensor names) is escaped here."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..core import NO_OFFLOAD
from ..planning import needed_bytes
from ..utils.byte_sizes import size
from .page_words import in_page_words

if TYPE_CHECKING:
    from ..planning import ComponentPlan, Plan
    from .model_folders import Roots
    from .model_manager import GeneratedImage, Progress


MAX_TEXT = 2000  # characters

# Marks that turn the direction of what follows, which can make a name read as another one.
_TURNS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def escape(value: object, limit: int = MAX_TEXT) -> str:
    """Return a value as HTML text, safe between tags and in a quoted attribute.

    `<`, `>`, `&` and both quotes become entities, as do backticks and braces, which templates may read. Control
    characters and marks that turn the direction of the text are shown as \\x.. and \\u...., and a text longer than
    `limit` is cut.
    """
    text = str(value)
    text = text if len(text) <= limit else text[: limit - 3] + "..."
    shown = "".join(_shown(letter) for letter in text)
    return html.escape(shown).replace("`", "&#96;").replace("{", "&#123;").replace("}", "&#125;")


def _shown(letter: str) -> str:
    hidden = unicodedata.category(letter) in ("Cc", "Cs") and letter not in "\n\t"
    return letter.encode("unicode_escape").decode("ascii") if hidden or letter in _TURNS else letter


SIGNS = {"works": "✓", "slow": "◔", "untested": "?", "breaks": "✕"}
_STAGES = {"waiting": "Waiting for another job", "drawing": "Generating", "reading": "Reading every tensor"}


def card(kind: str, title: str, *body: str) -> str:
    """Format a box. `kind`: "ok", "slow", "untested", "breaks", "info"; `title` and `body` are HTML."""
    role = 'role="alert"' if kind == "breaks" else 'role="status"'
    return f'<div class="sq-card sq-{kind}" {role}><div class="sq-title">{title}</div>{"".join(body)}</div>'


def paragraph(text: str) -> str:
    """Format a text as a paragraph."""
    return f"<p>{escape(text)}</p>"


def refusal(error: BaseException, roots: Roots, fixes: Sequence[str] = (), *, at: str = "Together with") -> str:
    """Format an error as a box: what, why and fix. Paths outside the model folders are not shown.

    Args:
        fixes: the labels of buttons that fix it, which then stand for what the error says.
        at: the label of the widget that takes a config.
    """
    parts = [getattr(error, name, "") for name in ("what", "why", "fix")]
    if not parts[0]:
        parts = ["Something went wrong", f"{type(error).__name__}: {error}", "See the server's log for the full error"]
    if fixes:
        parts[2] = listed(fixes)
    what, why, fix = (escape(in_page_words(roots.clean(str(part)), at).rstrip(".")) for part in parts)
    return card("breaks", f"{SIGNS['breaks']} {what}:", f"<p>{why}.</p>", f"<p><b>What to do:</b> {fix}.</p>")


def listed(ways: Sequence[str]) -> str:
    """Return ways out as one sentence, without its period."""
    return ", or ".join((ways[0][:1].upper() + ways[0][1:], *(text[:1].lower() + text[1:] for text in ways[1:])))


def progress(at: Progress) -> str:
    """Format the progress of a job as a bar."""
    share = min(1.0, at.done / at.total) if at.total else 0.0
    label = _STAGES.get(at.stage, at.stage if ":" in at.stage else at.stage.capitalize())  # "nf4: loading"
    if at.stage == "drawing":
        label += f", step {at.done} of {at.total}"
    elif at.total:
        label += f", {share:.0%}"
    return (
        f'<div class="sq-progress" role="progressbar" aria-live="off" aria-valuemin="0" aria-valuemax="100" '
        f'aria-valuenow="{share * 100:.0f}" aria-label="{escape(label)}"><div class="sq-label">{escape(label)}</div>'
        f'<div class="sq-track"><div class="sq-fill" style="width:{share * 100:.1f}%"></div></div></div>'
    )


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table; the cells are texts, and the first of a row names it."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    inside = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="sq-scroll"><table class="sq-table">{inside}</table></div>'


def _cells(row: Sequence[str]) -> str:
    first, *others = map(escape, row)
    return f'<th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in others)


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Format pairs of name and value, one below the other; both are texts."""
    body = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows)
    return f'<dl class="sq-facts">{body}</dl>'


def plan_bars(plan: Plan, capacity: int | None) -> str:
    """Format the size of each component as a bar against the memory of the device, with its size in bf16.

    Args:
        capacity: bytes free on the device for weights, or the budget; None if unknown.
    """
    whole = sum(part.bytes_bf16 for part in plan.components)
    widest = max((max(part.bytes, part.bytes_bf16) for part in plan.components), default=0)
    lines = [bar(part.name, _done(part), part.bytes, part.bytes_bf16, widest) for part in plan.components]
    if capacity is not None:
        name = "the budget" if plan.budget is not None else f"the free {memory_name(plan.device)}"
        over = is_too_large(plan, capacity)
        share = f"{_percent(plan.bytes / capacity)} of {name}, {size(capacity)}" if capacity else name
        if plan.bytes > capacity and not over:
            share = f"in turns, in {size(capacity)}: {name}"
        lines.append(bar("Total", share, plan.bytes, whole, max(capacity, plan.bytes), over=over))
    key = '<p class="sq-note">Striped: what the same takes in bf16.</p>' if whole != plan.bytes else ""
    if plan.is_least:
        key += '<p class="sq-note">At least: SDNQ\'s dynamic selection gives some weights more bits.</p>'
    return f'<div class="sq-bars">{"".join(lines)}</div>{key}{"".join(note(line) for line in plan.warnings)}'


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else "less than 1 %"


def is_too_large(plan: Plan, capacity: int | None) -> bool:
    """Return whether the weights that have to be on the device at once are more than it has room for."""
    if capacity is None or plan.bytes <= capacity:
        return False
    least = needed_bytes(plan)
    return least is not None and least > capacity


def memory_name(device: str) -> str:
    """Return what people call the memory of a device."""
    return "RAM" if device.partition(":")[0] in ("cpu", "mps") else "VRAM"


def bar(name: str, done: str, nbytes: int, as_bf16: int, full: int, *, over: bool = False) -> str:
    """Format bytes as a bar relative to `full`, with those of bf16 as its shadow. `over`: it does not fit."""
    width, ghost = (min(100.0, 100 * n / full) if full else 0.0 for n in (nbytes, as_bf16))
    return (
        f'<div class="sq-bar" data-name="{escape(name)}" data-bytes="{nbytes}"><div class="sq-bar-head">'
        f"<span><b>{escape(name)}</b> {escape(done)}</span><span>{size(nbytes)}</span></div>"
        f'<div class="sq-track"><div class="sq-ghost" style="width:{ghost:.2f}%" title="bf16: {size(as_bf16)}"></div>'
        f'<div class="sq-fill{" sq-over" if over else ""}" style="width:{width:.2f}%"></div></div></div>'
    )


def _done(part: ComponentPlan) -> str:
    """Describe in a few words how a component is quantized."""
    if part.action == "keep":
        return "as it is"
    if part.action == "found":
        return f"{', '.join(part.formats)}, as in the file, {_runs(part)}"
    return f"{part.spec}, quantized {'while' if part.mode == 'pre' else 'after'} loading, {_runs(part)}"


def _runs(part: ComponentPlan) -> str:
    return f"{part.runtime} runtime" + (f", {part.compute} products" if part.compute else "")


def drawn(result: GeneratedImage, roots: Roots, resident: int) -> str:
    """Format the facts about an image: the model, its settings, and the memory and time that it took.

    Args:
        resident: resident memory of the process in bytes.
    """
    plan, model = result.held.plan, result.held
    whole = sum(part.bytes_bf16 for part in plan.components)
    budget = f", budget {size(plan.budget)}" if plan.budget is not None else ""
    rows = [("Model", roots.shown(plan.path))]
    memory = memory_name(plan.device)
    rows += [(part.name, _done(part)) for part in plan.components]
    if result.drawing.loras:
        rows.append(("LoRA", ", ".join(f"{one.path.stem} {one.strength:g}" for one in result.drawing.loras)))
    rows += [
        ("Offload", f"{plan.offload}{budget}, on {plan.device}"),
        ("Weights", f"{size(model.bytes)}, which as bf16 would be {size(whole)}"),
        (f"{memory} for weights, at most", size(result.peak)),
        ("RAM of the server", size(resident)),
        ("Generated in", f"{result.seconds:.1f} s, {result.drawing.steps} steps, seed {result.drawing.seed}"),
        ("Loaded in", f"{model.seconds:.1f} s" + ("" if result.switched else ", for an earlier image")),
    ]
    return f'<div data-weights="{model.bytes}" data-peak="{result.peak}">{facts(rows)}</div>'


def chip(shown: str, how: str) -> str:
    """Format the line about the model in memory in the head of the page."""
    return f'<div class="sq-chip" role="status"><b>{escape(shown)}</b> {escape(how)}</div>'


def scheme_words(plan: Plan) -> str:
    """Describe the schemes of a plan in a few words: "nf4, balanced offload"."""
    names = list(dict.fromkeys(str(part.spec or part.scheme) for part in plan.components if part.action != "keep"))
    return f"{' and '.join(names) or 'original'}, {plan.offload if plan.offload != NO_OFFLOAD else 'no'} offload"


def note(text: str) -> str:
    """Format a text as a small note; return "" for an empty text."""
    return f'<p class="sq-note">{escape(text)}</p>' if text else ""
