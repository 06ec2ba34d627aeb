"""Measure load time, memory, speed and accuracy of a model's UNet or transformer in several schemes, and in peers."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ...evaluation import CLOCKS, INPUT_KINDS, PROMPT
from ...utils.byte_sizes import size
from ...utils.images import SUFFIXES, save
from ...utils.progress import report_bar
from .. import _common

if TYPE_CHECKING:
    from ...evaluation import Benchmark, BenchmarkRow

HEADER = ("", "weights", "load", "peak", "step", "ratio", "SNR")

_QUANT = (
    "scheme to measure (repeat; default: those of nf4, fp8, bnb-int8, qint8, int8 and sdnq-int8 that the matrix allows "
    "here); a GGUF type is written to a file first"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model's flags, those of the measurement, and the output files."""
    _common.add_request_flags(parser, without=("size", "quality"), helps={"quant": _QUANT})
    parser.add_argument("--steps", type=_common.positive, default=1, help="steps in a turn (default: %(default)s)")
    parser.add_argument("--rounds", type=_common.positive, default=5, help="turns of each (default: %(default)s)")
    parser.add_argument("--size", type=_size, dest="pixels", metavar="WxH", help="of the image (default: the model's)")
    parser.add_argument(
        "--batch", type=_common.positive, default=1,
        help="images of a component without a pipeline (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--threads", type=_common.positive, help="of the CPU (default: torch's own number)")
    parser.add_argument("--seed", type=_common.seed, default=0, help="of the inputs (default: %(default)s)")
    parser.add_argument("--prompt", default=PROMPT, help="of which the pipeline makes the inputs")
    parser.add_argument(
        "--inputs", choices=INPUT_KINDS, default=INPUT_KINDS[0],
        help="those that the pipeline gives, random ones, or the pipeline's where there is one (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--clock", choices=CLOCKS, default=CLOCKS[0],
        help="what ratios are of; cpu is the CPU time of all threads, for machines with other work "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--no-peers", dest="peers", action="store_false", help="leave other libraries' own ways out"
    )  # fmt: skip
    parser.add_argument(
        "--json", dest="json_file", type=Path, metavar="FILE", help="write the numbers into this file; - prints them"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="PICTURE.png", help="write them as a picture")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE",
        help="write what torch's profiler sees of one step, for Perfetto and TensorBoard: FILE-nf4.pt.trace.json and "
        "so on",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure, write, and print the table. Nothing is written before all is measured."""
    from ...evaluation import bench
    from ...utils.figure import require

    to_stdout = args.json_file is not None and str(args.json_file) == "-"
    for path, suffixes in ((args.output, SUFFIXES), (args.json_file, (".json",)), (args.profile, ())):
        if path is not None and not (path is args.json_file and to_stdout):
            _common.refuse_target(path, suffixes)
    if args.output is not None:
        require()
    request = _common.request_of(args, quant=None)
    values = {row.name: getattr(request, row.name) for row in dataclasses.fields(request)}
    for name in ("quant", "size", "quality"):  # schemes are named one by one, and the size is the image's
        del values[name]
    with report_bar("Measuring", "turn", args.progress) as on_progress:
        result = bench(
            values.pop("path"),
            args.quant,
            steps=args.steps,
            rounds=args.rounds,
            size=args.pixels,
            batch=args.batch,
            seed=args.seed,
            threads=args.threads,
            prompt=args.prompt,
            inputs=args.inputs,
            clock=args.clock,
            peers=args.peers,
            profile=args.profile,
            on_progress=on_progress,
            **values,
        )
    if args.output is not None:
        from ...evaluation import benchmark_figure

        save(benchmark_figure.sheet(result), args.output, optimize=True)
    if to_stdout:
        _common.print_json(result.to_dict())
    else:
        if args.json_file is not None:
            _write(args.json_file, result)
        print(render(result))
    return 0 if result.measured or len(result.rows) == 1 else 1


def _write(path: Path, result: Benchmark) -> None:
    from ...utils.atomic_write import whole_file

    raw = (json.dumps(result.to_dict(), indent=1) + "\n").encode()
    with whole_file(path, len(raw)) as file:
        file.write(raw)


def _size(text: str) -> tuple[int, int]:
    """Parse a size such as "512x768"."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})[xX]([1-9][0-9]{0,5})", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 512x512")
    return int(match[1]), int(match[2])


def render(result: Benchmark) -> str:
    """Format the table as text, with notes on rows and the reasons why rows have no numbers."""
    packages = [f"{name} {result.versions[name]}" for name in ("torch", "diffusers") if name in result.versions]
    lines = [
        f"{result.model}: {result.case}, {result.inputs} inputs",
        ", ".join(
            [result.machine["cpu"] if result.device == "cpu" else result.device, f"{result.threads} threads", *packages]
        ),
        f"peak is {result.memory}; ratio is of {result.clock} time against the first row, "
        f"median of {result.rounds} rounds",
        "",
        _common.table(HEADER, [_cells(row) for row in result.rows]),
    ]
    lines += [f"note: {row.name}: {row.note}" for row in result.rows if row.note is not None and row.error is None]
    lines += [f"not measured: {row.name}: {row.error}" for row in result.rows if row.error is not None]
    lines += [f"trace: {row.trace}" for row in result.rows if row.trace is not None]
    return "\n".join(lines)


def _cells(row: BenchmarkRow) -> tuple[str, ...]:
    from ...evaluation import benchmark_figure

    if row.error is not None:
        return (row.name, *("-",) * (len(HEADER) - 1))
    assert row.step_seconds is not None and row.load_seconds is not None
    return (
        row.name, size(row.bytes or 0), f"{row.load_seconds:.2f} s", size(row.peak or 0),
        benchmark_figure.seconds(row.step_seconds), f"{row.ratio:.2f}", benchmark_figure.decibels(row),
    )  # fmt: skip
