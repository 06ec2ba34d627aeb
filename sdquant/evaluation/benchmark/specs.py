"""Data passed between the parts of a benchmark: the target, the job of each worker, and names of files. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...planning import Request

# Files in the benchmark's own folder.
INPUTS, WANTED = "inputs.pt", "wanted.pt"


@dataclass(frozen=True, kw_only=True)
class ModelUnderTest:
    """The component to measure.

    Attributes:
        asked: the request for the model as found; for its UNet or transformer alone if that has its own folder.
        pipeline: the request for the whole pipeline; None if there is only a component.
        class_name, config: of the UNet or transformer.
        dtype: torch's name of the dtype that the reference has.
        scheme: of the quantized weights in its files; None for floats.
        bytes: of the reference in memory.
        folder: the component's, with its config.json; None if there is none.
        device: torch's name of the compute device.
    """

    asked: Request
    pipeline: Request | None
    class_name: str
    config: Mapping[str, Any] = field(repr=False)
    dtype: str
    scheme: str | None
    bytes: int
    folder: Path | None
    device: str


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """Job of one worker: the model to load, with sdquant or with a peer.

    Attributes:
        asked: sdquant's request; for a peer, its path is what the peer loads.
        peer: the peer's name; None for sdquant.
        scheme: the scheme that the peer's format is.
        class_name, folder: of the component, see `ModelUnderTest`.
        dtype: torch's name of the dtype of what is not quantized.
        device: torch's name of the compute device.
        work: the benchmark's own folder, with the inputs.
        threads: of the CPU.
        prompt, size, seed: for the worker that asks the pipeline for the inputs.
    """

    asked: Request
    work: Path
    threads: int
    device: str
    class_name: str
    dtype: str
    folder: Path | None = None
    peer: str | None = None
    scheme: str | None = None
    prompt: str = ""
    size: tuple[int, int] | None = None
    seed: int = 0


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
