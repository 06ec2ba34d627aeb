"""The tables of docs/speed.md, from what the benchmarks kept in bench/results/."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.linear_gates import INTEGER, OURS, PLAIN, judge
from bench.pairs import PAIRS
from tools.tables import machine_of, markdown

FOLDER = Path("bench/results")
LINEAR = "linear-*.json"  # one for each set of instructions
RULES = "rules-*.json"
CONVOLUTION = "convolution-*.json"
PAIR = "pairs-*.json"
ROWS = (1, 8, 77, 256, 1024, 4608)
MISSING = "Not measured yet: `python -m bench.linear` does it."
WORDS = {
    "G1": 'int8 products (`compute="int8"`), 1024 rows',
    "G2": 'int8 products (`compute="int8"`), 77 rows',
    "G3": "8-bit and 4-bit weights, one row",
    "G4": "8-bit weights, exact, 77 and 1024 rows",
    "G5": "nf4, 1, 77 and 1024 rows",
    "G6": "GGUF `q8_0`, `q4_0`, `q4_k`, 1, 77 and 1024 rows",
    "G7": "4-bit weights in int8 products, 1024 rows",
    "G8": "every format and number of rows, against the best that runs the same format",
    "G9": "int8 products with float32 activations, 77 rows",
    "G24": "a call that computes next to nothing, µs",
}

CARDS = "gpu-*.json"  # one for each card, by bench.gpu_all
NOT_ON_A_CARD = "Not measured yet: `python -m bench.gpu_all --json bench/results/gpu-NAME.json` does it."
EIGHT = tuple(
    f"{name}, 3072x12288 bf16 M=4608"
    for name in ("int8_sym · sdquant compute=int8", "fp8,packing=float8 · float8 by Triton")
)
# Goals on cards: what it is about, the limit, the rows of a step of Flux that are held to it, and the number in them.
GOALS = (
    ("G20", "a step of Flux in `nf4`, of bf16's", 1.06, ("nf4",), "ratio"),
    ("G20", "a step of Flux with 8-bit weights, of bf16's", 1.10, ("int8_sym",), "ratio"),
    ("G20", "a step of Flux in GGUF's types, of bf16's", 1.25, ("q8_0", "q4_k"), "ratio"),
    ("G21", "int8 and float8 products, 4608 rows, 3072x12288, of bf16's", 0.625, EIGHT, "ratio"),
    ("G22", "balanced offload, of the larger of computing and bytes / bandwidth", 1.05, ("bf16, budget 50%",), "ratio"),
    ("G23", "`nf4` with balanced offload, of `nf4` all on the card", 1.10, ("nf4, budget 50%",), "against"),
)  # fmt: skip


def _measured(root: Path, files: str = LINEAR) -> list[tuple[str, list[dict[str, Any]]]]:
    """What each kind of machine measured: its title, and its rows."""
    made = []
    for file in sorted((root / FOLDER).glob(files)):
        values = json.loads(file.read_text(encoding="utf-8"))
        made.append((machine_of(values), values["rows"]))
    return made


def _each(root: Path, table: Callable[[list[dict[str, Any]]], str]) -> str:
    return "\n\n".join(f"{title}:\n\n{table(rows)}" for title, rows in _measured(root)) or MISSING


def goals(root: Path) -> str:
    """Each goal: how many of its cases hold, and the worst of them."""
    return _each(root, _goals)


def cards(root: Path) -> str:
    """Of each card the goals, and a step of Flux in every format."""
    parts = []
    for title, rows in _measured(root, CARDS):
        device = next(row for row in rows if row["name"] == "device")
        found = {row["name"]: row for row in rows if row["case"].startswith("Flux") and not row.get("error")}
        layers = {f"{row['name']}, {row['case']}": row for row in rows if row.get("phase") == "layers"}
        goals = [
            [goal, what, f"{limit:g}", *_held(found | layers, limit, names, field)]
            for goal, what, limit, names, field in GOALS
        ]
        steps = [
            [f"`{name}`", f"{row['seconds'] * 1e3:.0f}", f"{row['ratio']:.2f}", f"{row['bytes'] / 2**30:.1f}"]
            for name, row in found.items() if "bytes" in row
        ]  # fmt: skip
        parts += [
            f"{device['text']}; {title}:", markdown(("goal", "what", "at most", "measured", ""), goals, left=2),
            "A step of Flux (12 billion random weights, 1024 x 1024):",
            markdown(("weights", "ms", "of bf16", "GiB"), steps, left=1),
        ]  # fmt: skip
    return "\n\n".join(parts) or NOT_ON_A_CARD


def _held(found: dict[str, dict[str, Any]], limit: float, names: tuple[str, ...], field: str) -> tuple[str, str]:
    """The numbers of a goal, and whether it holds."""
    numbers = [found[name][field] for name in names if name in found]
    if not numbers:
        return "not measured", ""
    return ", ".join(f"{number:.2f}" for number in numbers), "met" if max(numbers) <= limit else "missed"


def _goals(rows: list[dict[str, Any]]) -> str:
    verdicts = judge(rows)
    lines = []
    for goal, words in WORDS.items():
        some = [v for v in verdicts if v.goal == goal and v.value is not None]
        if not some:
            lines.append([goal, words, "-", "-", "not measured"])
            continue
        worst = max(some, key=lambda v: v.value / v.gate)  # type: ignore[operator]
        gates = sorted({v.gate for v in some})
        shown = f"{gates[0]:g}" if len(gates) == 1 else f"{gates[0]:g} to {gates[-1]:g}"
        held = sum(bool(v.met) for v in some)
        lines.append([goal, words, shown, f"{held} of {len(some)}", f"{worst.value:.2f} ({worst.case})"])
    return markdown(("goal", "what", "at most", "hold", "nearest to its limit, or beyond"), lines, left=2)


def linear(root: Path) -> str:
    """Ratios of every format to the plain layer, with the best of the others that run it."""
    return _each(root, _linear)


def rules(root: Path) -> str:
    """The same of types by rules."""
    return "\n\n".join(f"{title}:\n\n{_linear(rows)}" for title, rows in _measured(root, RULES)) or MISSING


def _linear(rows: list[dict[str, Any]]) -> str:
    parts = []
    for shape in ("3072x3072", "3072x12288"):
        found = {
            (row["format"], row["who"], row["rows"]): row["ratio"]
            for row in rows
            if row["shape"] == shape and row["dtype"] == "bf16"
        }
        formats = list(dict.fromkeys(name for name, _, _ in found))
        if not formats:
            continue
        lines = [[f"`{name}`", *(_cell(found, name, count) for count in ROWS)] for name in formats]
        header = ("format", *(f"{count} row{'s' if count > 1 else ''}" for count in ROWS))
        inputs, outputs = shape.split("x")
        parts.append(f"{inputs} inputs, {outputs} outputs:\n\n" + markdown(header, lines))
    return "\n\n".join(parts)


def convolutions(root: Path) -> str:
    """Ratios of every format to the unquantized 3 x 3 convolution, by channels and outputs."""
    parts = [f"{title}:\n\n{_convolutions(rows)}" for title, rows in _measured(root, CONVOLUTION)]
    return "\n\n".join(parts) or "Not measured yet: `python -m bench.convolutions` does it."


def _convolutions(rows: list[dict[str, Any]]) -> str:
    cases = sorted({(int(row["shape"].split("x")[0]), row["rows"]) for row in rows})
    cases = [case for case in cases if case[0] > 32]  # a call that computes next to nothing
    found = {
        (row["format"], row["who"], int(row["shape"].split("x")[0]), row["rows"]): row["ratio"]
        for row in rows
        if row["ratio"] is not None and row["dtype"] == "bf16"
    }

    def cell(name: str, case: tuple[int, int]) -> str:
        ours, integer = found.get((name, OURS, *case)), found.get((name, INTEGER, *case))
        return "-" if ours is None else f"**{ours:.2g}**" + (f" int8 {integer:.2g}" if integer else "")

    lines = [
        [f"`{name}`", *(cell(name, case) for case in cases)] for name in dict.fromkeys(row["format"] for row in rows)
    ]
    return markdown(("format", *(f"{channels} ch., {count}" for channels, count in cases)), lines)


def pairs(root: Path) -> str:
    """What a rotation and a branch cost, for each dtype that was measured."""
    parts = [f"{title}:\n\n{_pairs(rows)}" for title, rows in _measured(root, PAIR)]
    return "\n\n".join(parts) or "Not measured yet: `python -m bench.pairs` does it."


def _pairs(rows: list[dict[str, Any]]) -> str:
    counts = sorted({row["rows"] for row in rows})
    found = {(row["name"], row["dtype"], row["rows"]): row["ratio"] for row in rows}
    lines = []
    for pair in PAIRS:
        for dtype in dict.fromkeys(row["dtype"] for row in rows if row["name"] == pair.name):
            cells = (found.get((pair.name, dtype, count)) for count in counts)
            shown = (f"{cell:.2f}" if cell else "-" for cell in cells)
            lines.append([f"`{pair.one}`", f"`{pair.other}`", dtype, f"{pair.limit:g}", *shown])
    header = ("layer", "against", "dtype", "at most", *(f"{count} row{'s' if count > 1 else ''}" for count in counts))
    return markdown(header, lines, left=3)


SUMMARY = ("nf4", "fp8", "int8", "qint8", "bnb-int8", "qint4", "int4", "q8_0", "q4_k", "sdnq-int8", "sdnq-uint4")


def side_by_side(root: Path) -> str:
    """The README's: some formats, 3072 inputs and 12288 outputs, ours beside the libraries' own layers; of machines on
    which all numbers of rows were measured."""
    whole = [(title, rows) for title, rows in _measured(root) if {row["rows"] for row in rows} >= set(ROWS)]
    return "\n\n".join(f"{title}:\n\n{_side_by_side(rows)}" for title, rows in whole) or MISSING


def _side_by_side(rows: list[dict[str, Any]]) -> str:
    rows = [row for row in rows if row["shape"] == "3072x12288" and row["dtype"] == "bf16"]
    found = {(row["format"], row["who"], row["rows"]): row["ratio"] for row in rows}
    lines = []
    for name in SUMMARY:
        for who in dict.fromkeys(who for scheme, who, _ in found if scheme == name and who != PLAIN):
            cells = [found.get((name, who, count)) for count in ROWS]
            shown = [f"{cell:.2f}" if cell else "-" for cell in cells]
            mark = "**" if who == OURS else ""
            lines.append([f"`{name}`", f"{mark}{who}{mark}", *shown])
    return markdown(("format", "run by", *(f"{count} row{'s' if count > 1 else ''}" for count in ROWS)), lines, left=2)


def _cell(found: dict[tuple[str, str, int], float | None], name: str, rows: int) -> str:
    ours = found.get((name, OURS, rows))
    if ours is None:
        return "-"
    others = {
        who: ratio
        for (scheme, who, count), ratio in found.items()
        if scheme == name and count == rows and ratio and who not in (OURS, PLAIN, INTEGER)
    }
    best = min(others, key=others.__getitem__) if others else None
    integer = found.get((name, INTEGER, rows))
    return (
        f"**{ours:.2f}**"
        + (f" int8 {integer:.2f}" if integer else "")
        + (f" · {best} {others[best]:.2f}" if best else "")
    )
