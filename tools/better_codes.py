"""The tables of docs/mixes.md and mixes-measured.md, from what benches have kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.tables import markdown

FILE = Path("bench/results/better_codes.json")
MIXED = Path("bench/results/mixes.json")
SIZES = Path("bench/results/size.json")
WIDE = Path("bench/results/full_width.json")
OPTIONS = Path("bench/results/code_options.json")
MORE = Path("bench/results/more_schemes.json")
MODELS = ("digits-flux", "digits-sd", "glyphs-flux")
UNMEASURED = "Not measured yet: `python -m bench.better_codes` does it."
# What sdquant makes by itself; all other rows are formats as other projects make them.
OURS = (",gptq", ",range", "auto, ")
CALIBRATED = (",gptq", ",range", "statistics", ",imatrix", "NNCF", "AutoRound")
FOLDER = "folder"  # the case of bench.size that is written
WHOLE = 24_000_000_000  # bytes of FLUX.1's transformer in bf16, for an example
LARGE = 4.55  # bits; other formats that take more are compared with mixes of as many
# What of ours has to be so many dB above what of the others', and the most bits of each.
GOALS = (
    ("calibrated, over 4.5 bits without calibration", 4.0, (4.55, True), (4.55, False)),
    ("calibrated, over 4.5 bits with their own calibration", 2.0, (4.55, True), (4.55, True)),
    ("calibrated, 0.2 of bf16, over 3 bits", 4.0, (3.25, True), (3.55, None)),
    ("weights alone, over 4.5 bits without calibration", 1.5, (4.55, False), (4.55, False)),
)


def _rows(root: Path, file: Path = FILE) -> list[dict[str, Any]]:
    kept = root / file
    rows: list[dict[str, Any]] = json.loads(kept.read_text(encoding="utf-8"))["rows"] if kept.exists() else []
    return [row for row in rows if "error" not in row]


def table(root: Path) -> str:
    """Every format and mix by its bits on the first model: bits and decibels on each."""
    rows = {(row["name"], row["case"]): row for row in _rows(root)}
    if not rows:
        return UNMEASURED

    def cells(name: str, model: str) -> list[str]:
        row: dict[str, Any] = rows.get((name, model), {})
        return [f"{row['bits']:.2f}", f"{row['snr']:.1f}"] if row else ["-", "-"]

    def order(name: str) -> tuple[float, float]:
        row = next(rows[name, model] for model in MODELS if (name, model) in rows)
        return -row["bits"], -row["snr"]

    names = dict.fromkeys(name for name, model in rows if model in MODELS)
    lines = [
        [f"`{name}`", *(cell for model in MODELS for cell in cells(name, model))] for name in sorted(names, key=order)
    ]
    header = ("scheme", *(f"{what}, {model}" for model in MODELS for what in ("bits", "dB")))
    return markdown(header, lines)


def advice(root: Path) -> str:
    """What to write for a card, a file or a quality; sizes of cards and shares are those of the presets."""
    from sdquant.planning import mix_presets
    from sdquant.planning.estimate import activation_allowance
    from sdquant.utils.byte_sizes import budget_text, parse_size

    def share(part: float) -> str:
        example = f"of a model of {WHOLE / 1e9:g} GB, `size={budget_text(int(part * WHOLE))}`"
        return f"{part:g} of its bytes as bf16: {example}"

    def room(memory: str) -> str:
        return budget_text(parse_size(memory, "A preset") - activation_allowance.MOST)

    cards = [
        [f"a card of {row.memory.removesuffix('GB')} GB",
         f'`size={room(row.memory)}`, which leaves room for images; on the page the preset "{row.label}"']
        for row in mix_presets.MIXES
    ]  # fmt: skip
    smallest = min(float(row["name"].split(", ")[1]) for row in _rows(root) if row["name"].startswith("auto, "))
    lines = [
        *cards,
        ["a folder or file of at most 4 GB",
         "`sdquant quantize MODEL OUT -q auto,size=4GB`; OUT is a folder, `x.gguf`, or `x.safetensors` for ComfyUI"],
        ["images that nobody tells from the original's", f"{share(mix_presets.MOST)}; or `quality=40`"],
        ["the usual bargain, what `nf4` and `q4_k` take", share(mix_presets.ENOUGH)],
        ["as small as is usable", share(smallest)],
        ["what every tool knows by name", "one scheme for all layers: [README](../README.md#which-scheme), "
         "[schemes](schemes.md)"],
    ]  # fmt: skip
    return markdown(("you have, or want", "write"), lines, left=2)


def by_size(root: Path) -> str:
    """What mixes of each share of bf16's bytes bring, and the best of others' formats that take no more, if any do."""
    rows = _rows(root)
    mixes = {(row["name"], row["case"]): row for row in rows if row["name"].startswith("auto, ")}
    if not mixes:
        return UNMEASURED

    def cell(share: str, model: str) -> str:
        alone, known = mixes.get((f"auto, {share}", model)), mixes.get((f"auto, {share}, statistics", model))
        bits = max((row["bits"] for row in (alone, known) if row is not None), default=0.0) + 0.03
        fit = (row for row in rows if row["case"] == model and row["bits"] <= bits)
        others = [row for row in fit if not any(word in row["name"] for word in OURS)]
        best = max(others, key=lambda row: row["snr"], default=None)
        told = [f"{row['snr']:.0f}" if row is not None else "-" for row in (alone, known, best)]
        return " / ".join(told) + (f" (`{best['name']}`)" if best is not None else "")

    shares = sorted({name.split(", ")[1] for name, _ in mixes}, key=float, reverse=True)
    lines = [
        [f"{share} of bf16", f"{16 * float(share):.1f}", *(cell(share, model) for model in MODELS)] for share in shares
    ]
    return markdown(("size", "bits", *MODELS), lines, left=1)


def goals(root: Path) -> str:
    """How far the best of ours is above the best of the others, for each goal, on each model."""
    rows = _rows(root)
    if not rows:
        return UNMEASURED

    def best(model: str, ours: bool, bits: float, calibrated: bool | None) -> dict[str, Any] | None:
        def counts(name: str) -> bool:
            known = any(word in name for word in CALIBRATED)
            return any(word in name for word in OURS) == ours and calibrated in (None, known)

        fit = [row for row in rows if row["case"] == model and row["bits"] <= bits and counts(row["name"])]
        return max(fit, key=lambda row: row["snr"], default=None)

    def cell(model: str, goal: float, mine: tuple[float, bool], others: tuple[float, bool | None]) -> str:
        one, other = best(model, True, *mine), best(model, False, *others)
        if one is None or other is None:
            return "-"
        above = round(one["snr"] - other["snr"], 1)
        return f"{above:+.1f} dB, {'met' if above >= goal else 'missed'} (`{one['name']}`, `{other['name']}`)"

    lines = [
        [title, f"{goal:.1f} dB", *(cell(model, goal, *sides) for model in MODELS)] for title, goal, *sides in GOALS
    ]
    return markdown(("ours over the others' best", "goal", *MODELS), lines)


def larger(root: Path) -> str:
    """Formats of others that take more than 4.5 bits, beside the best mix of no more bytes."""
    rows, lines = _rows(root), []

    def mix(model: str, bits: float, known: bool) -> dict[str, Any] | None:
        fit = [
            row
            for row in rows
            if row["case"] == model and row["name"].startswith("auto, ") and row["bits"] <= bits + 0.005
            and ("statistics" in row["name"]) == known
        ]  # fmt: skip
        return max(fit, key=lambda row: row["snr"], default=None)

    def cell(row: dict[str, Any] | None) -> str:
        return "-" if row is None else f"{row['snr']:.1f} in {row['bits']:.2f}"

    for row in rows:
        is_ours = any(word in row["name"] for word in OURS)
        if not is_ours and LARGE < row["bits"] < 16 and row["case"] in MODELS:
            mixes = (cell(mix(row["case"], row["bits"], known)) for known in (True, False))
            lines.append([f"`{row['name']}`", row["case"], f"{row['snr']:.1f} in {row['bits']:.2f}", *mixes])
    lines.sort(key=lambda line: (MODELS.index(line[1]), line[0]))
    header = ("format", "model", "dB in bits", "`auto` with statistics", "`auto`, weights alone")
    return markdown(header, lines, left=2) if lines else UNMEASURED


def predicted(root: Path) -> str:
    """How near predictions of random mixes come to what is measured."""
    lines = [
        [row["case"], row["name"], *(f"{value:.1f}" for value in row["measured"]), f"{row['rank correlation']:.3f}",
         f"{row['median miss']:+.1f} dB", f"{row['missed']:.1f} dB"]
        for row in _rows(root, MIXED)
    ]  # fmt: skip
    header = ("model", "known", "least dB", "most dB", "rank correlation", "median miss", "worst miss")
    return markdown(header, lines, left=2) if lines else "Not measured yet: `python -m bench.mixes` does it."


def sizes(root: Path) -> str:
    """Which share of the size that was asked for a plan takes, at full size."""
    rows = [row for row in _rows(root, SIZES) if row["case"] != FOLDER]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    shares = {(row["name"], row["case"]): row["bytes"] / row["asked"] for row in rows}
    asked = {row["name"]: row["asked"] for row in rows}

    def share(name: str, case: str) -> str:
        return f"{shares[name, case]:.2%}" if (name, case) in shares else "-"

    lines = [[name, f"{size / 1e6:.0f} MB", *(share(name, case) for case in cases)] for name, size in asked.items()]
    header = ("asked for", "size", *(f"taken, {case}" for case in cases))
    return markdown(header, lines) if rows else "Not measured yet: `python -m bench.size` does it."


def folders(root: Path) -> str:
    """Return the share of the size that all files of a small model's folder take."""
    rows = [row for row in _rows(root, SIZES) if row["case"] == FOLDER]
    lines = [
        [row["name"], f"{row['asked']:,}", f"{row['bytes']:,}", f"{row['bytes'] / row['asked']:.2%}"] for row in rows
    ]
    header = ("folder", "bytes asked for", "bytes written", "taken")
    return markdown(header, lines) if rows else "Not measured yet: `python -m bench.size MODELS --case folder` does it."


def full_width(root: Path) -> str:
    """Decibels of each format on blocks of FLUX.1's width with random weights."""
    rows = _rows(root, WIDE)
    cases = list(dict.fromkeys(row["case"] for row in rows))
    found = {(row["name"], row["case"]): row for row in rows}
    bits = {row["name"]: row["bits"] for row in rows}
    lines = [
        [f"`{name}`", f"{bits[name]:.2f}",
         *(f"{found[name, case]['snr']:.1f}" if (name, case) in found else "-" for case in cases)]
        for name in sorted(bits, key=lambda name: (-bits[name], name))
    ]  # fmt: skip
    header = ("scheme", "bits", *(f"dB, {case}" for case in cases))
    return markdown(header, lines) if rows else "Not measured yet: `python -m bench.full_width` does it."


def more_schemes(root: Path) -> str:
    """What mixes would gain by a choice of all schemes."""
    rows = _rows(root, MORE)
    lines = [
        [
            row["case"],
            row["name"],
            f"{row['snr']:.1f}",
            f"{row['more']:+.1f}",
            ", ".join(f"`{one}`" for one in row["most"]),
        ]
        for row in rows
    ]
    header = (
        ("model", "size", f"dB of {rows[0]['schemes']} schemes", f"of {rows[0]['others']} more", "most often")
        if rows
        else ()
    )
    return markdown(header, lines, left=2) if rows else "Not measured yet: `python -m bench.more_schemes` does it."


def code_options(root: Path) -> str:
    """What each option that costs no byte adds to a scheme's decibels, on each model."""
    rows = _rows(root, OPTIONS)
    found = {(row["scheme"], row["case"], row["way"]): row["snr"] for row in rows}
    ways = list(dict.fromkeys(row["way"] for row in rows if row["way"]))
    lines = [
        [
            f"`{row['scheme']}`",
            row["case"],
            f"{row['snr']:.1f}",
            *(f"{found[row['scheme'], row['case'], way] - row['snr']:+.1f}" for way in ways),
        ]
        for row in rows
        if not row["way"]
    ]
    header = ("scheme", "model", "dB", *ways)
    return markdown(header, lines, left=2) if lines else "Not measured yet: `python -m bench.code_options` does it."
