"""Names of the profiler traces that a benchmark writes."""

from __future__ import annotations

from pathlib import Path

TRACE = ".pt.trace.json"  # how TensorBoard's profiler knows a trace


def trace_name(name: str) -> str:
    """Return the end of a trace's file name, such as "nf4.pt.trace.json"."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name) + TRACE


def trace_path(profile: str | Path, name: str) -> Path:
    """Return the path of a row's trace: "runs/step" gives "runs/step-nf4.pt.trace.json", as does "runs/step.json"."""
    place = Path(profile)
    stem = place.name
    for end in (".gz", ".json", ".trace", ".pt"):
        stem = stem.removesuffix(end)
    return place.with_name(f"{stem}-{trace_name(name)}")
