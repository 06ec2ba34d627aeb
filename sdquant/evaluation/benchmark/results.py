"""Results of a benchmark: a row for each way to run the model, and the values that all rows share. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BENCH = "sdquant bench"  # what its JSON says of itself, for bench/compare.py

# Which clock a step's ratio is of.
CLOCKS = ("wall", "cpu")

# Settings that make another case of a model, where they are given.
OF_A_CASE = ("offload", "budget", "mode", "runtime", "compute", "dtype")


@dataclass(frozen=True, kw_only=True)
class BenchmarkRow:
    """One way to run the model. Values that were not measured are None.

    Attributes:
        name: "nf4", "as found", "diffusers GGUF q8_0"; unique in a benchmark.
        by: "sdquant", or the name of the library whose own way it is.
        quant: the scheme, for a peer the sdquant scheme of its format; None for the model as found.
        dtype: of the weights that are not quantized.
        runtime: "library" or "plain" if sdquant runs it quantized.
        bytes: of all weights in memory, with scales and tables, counted alike for all rows.
        load_seconds, load_cpu_seconds: wall time and CPU time of all threads, after the imports.
        peak: the most memory over that before the load, in bytes, while loading and in the first step: anonymous memory
            on Linux, else resident; on a GPU what torch had allocated there.
        peak_resident: the same of all memory of the process, mapped files included.
        first_seconds: wall time of the first step, which may compile, repack and read what is mapped.
        step_seconds, step_cpu_seconds: medians over the rounds, of one step.
        step_spread: the shortest and the longest round's, by the benchmark's clock.
        ratio: a step's time against the reference's: the median over the rounds of the two in the same round.
        load_ratio: `load_cpu_seconds` against those of sdquant's row of the same scheme; for peers.
        snr: of one step's output, in dB, against the reference's; infinite where nothing differs.
        group: rows of the same number took turns. Each group has its own run of the reference.
        note: a remark on how it was run.
        error: the reason why there are no numbers, as sentences. kind: the error's class.
        trace: file of the profile.
    """

    name: str
    by: str
    quant: str | None = None
    dtype: str | None = None
    runtime: str | None = None
    bytes: int | None = None
    load_seconds: float | None = None
    load_cpu_seconds: float | None = None
    peak: int | None = None
    peak_resident: int | None = None
    first_seconds: float | None = None
    step_seconds: float | None = None
    step_cpu_seconds: float | None = None
    step_spread: tuple[float, float] | None = None
    ratio: float | None = None
    load_ratio: float | None = None
    snr: float | None = None
    group: int | None = None
    note: str | None = None
    error: str | None = None
    kind: str | None = None
    trace: str | None = None

    @property
    def identical(self) -> bool:
        """Return whether the output is equal to the reference's."""
        return self.snr == float("inf")

    def to_dict(self) -> dict[str, Any]:
        """As JSON values. JSON has no infinity: snr is null then, and `identical` is true."""
        return vars(self) | {
            "step_spread": None if self.step_spread is None else list(self.step_spread),
            "snr": None if self.identical else self.snr,
            "identical": self.identical,
        }


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """All rows, and what they have in common.

    Attributes:
        model: as named. class_name: of its UNet or transformer, which is what is measured.
        inputs: "pipeline" (what the pipeline gives it at its first step) or "random" (of the right shapes).
        size: width and height of the image, in pixels.
        batch: rows of the first tensor that it takes.
        steps: calls in one turn. rounds: turns of each row.
        threads: of the CPU, for torch.
        clock: what the ratios are of: "wall" time, or "cpu" time of all threads.
        memory: what `Row.peak` is: "RssAnon", "RSS" or "GPU".
        settings: the other arguments of `load_model` that were not left out, as JSON values.
        device: torch's name of the compute device.
        rows: the reference first.
        versions: of the installed packages. machine: names and sizes of what it has.
    """

    model: str
    class_name: str
    inputs: str
    size: tuple[int, int]
    batch: int
    seed: int
    steps: int
    rounds: int
    threads: int
    clock: str
    memory: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: str
    rows: tuple[BenchmarkRow, ...]
    versions: Mapping[str, str]
    machine: Mapping[str, Any]

    @property
    def reference(self) -> BenchmarkRow:
        """Return the row that the others are compared with."""
        return self.rows[0]

    @property
    def measured(self) -> tuple[BenchmarkRow, ...]:
        """Return the rows that have numbers, without the reference."""
        return tuple(row for row in self.rows[1:] if row.error is None)

    @property
    def case(self) -> str:
        """Describe the case in one line; rows of two benchmarks can be compared if it is the same."""
        width, height = self.size
        words = [self.class_name, f"{width}x{height}", f"batch {self.batch}", self.device.partition(":")[0]]
        return ", ".join([*words, *(f"{name} {self.settings[name]}" for name in OF_A_CASE if name in self.settings)])

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"bench": BENCH} | vars(self) | {
            "size": list(self.size),
            "settings": dict(self.settings),
            "versions": dict(self.versions),
            "machine": dict(self.machine),
            "rows": [{"case": self.case} | row.to_dict() for row in self.rows],
        }  # fmt: skip
