"""The tables of docs/compute.md, from what bench.snr and bench.int8 kept in bench/results/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.linear_gates import INTEGER, OURS
from tools.tables import machine_of, markdown

FOLDER = Path("bench/results")
MODELS = ("digits-sd", "digits-flux")


def _kept(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return values


def snr(root: Path) -> str:
    """One linear layer, exact and in integers, on Gaussian numbers and with outliers."""
    file = root / FOLDER / "snr.json"
    if not file.exists():
        return "Not measured yet: `python -m bench.snr` does it."
    found = {(row["format"], row["who"], row["case"]): row["snr"] for row in _kept(file)["rows"]}
    formats = dict.fromkeys(name for name, who, _ in found if who == INTEGER)
    columns = [(who, case) for case in ("gaussian", "outliers") for who in (OURS, INTEGER)]
    lines = [[f"`{name}`", *(f"{found[name, who, case]:.1f}" for who, case in columns)] for name in formats]
    header = ("scheme", "exact", "`int8`", "exact, outliers", "`int8`, outliers")
    return markdown(header, lines)


def outliers(root: Path) -> str:
    """One linear layer whose weights and activations have outliers, exact, in integers, and in the libraries."""
    file = root / FOLDER / "outliers.json"
    if not file.exists():
        return "Not measured yet: `python -m bench.outliers` does it."
    found = {(row["format"], row["who"], row["case"]): row["snr"] for row in _kept(file)["rows"]}
    formats, cases = dict.fromkeys(name for name, _, _ in found), ("gauss", "heavy", "low")

    def cell(name: str, who: str) -> str:
        values = [found.get((name, who, case)) for case in cases]
        return " / ".join(f"{value:.1f}" for value in values if value is not None) or "-"

    def peer(name: str) -> str:
        others = dict.fromkeys(who for scheme, who, _ in found if scheme == name and who not in (OURS, INTEGER))
        return "; ".join(f"{who}: {cell(name, who)}" for who in others) or "-"

    lines = [[f"`{name}`", cell(name, OURS), cell(name, INTEGER), peer(name)] for name in formats]
    return markdown(("scheme", "exact", "`int8`", "in other libraries"), lines)


def errors(root: Path) -> str:
    """One step of the shipped models, and digits read right."""
    rows = {(row["name"], row["case"]): row for row in _kept(root / FOLDER / "int8.json")["rows"]}
    schemes = dict.fromkeys(name.split()[0] for name, _ in rows if name != "unquantized")

    def cell(name: str, model: str) -> str:
        row = rows[name, model]
        return f"{row['snr']:.1f} dB, {row['right']} of {row['of']}"

    lines = [
        [f"`{name}`", *(cell(way, model) for model in MODELS for way in (name, f"{name} compute=int8"))]
        for name in schemes
    ]
    return markdown(("scheme", *(f"{model}{way}" for model in MODELS for way in ("", ", `int8`"))), lines)


def step(root: Path) -> str:
    """A step of SDXL's UNet by parts, on each kind of machine that measured it."""
    parts = []
    for file in sorted((root / FOLDER).glob("int8-sdxl-*.json")):
        values = _kept(file)
        rows = [[row["name"], f"{row['share']:.2f}", f"{row['ratio']:.2f}"] for row in values["rows"]]
        parts.append(
            f"{machine_of(values)}:\n\n" + markdown(("part", "share of the bf16 step", "`int8_sym`, of bf16"), rows)
        )
    return "\n\n".join(parts)
