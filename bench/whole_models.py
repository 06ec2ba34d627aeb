"""Whole UNets and transformers at real width, random weights: every scheme and peer, by `sdquant bench`.

    python -m bench.whole_models                     all models; results in bench/results/whole-*.json
    python -m bench.whole_models sd15 --quant nf4    one model, one scheme: printed, and written with --out
    python -m bench.whole_models sdxl -q iq1_m --repeat 64     a type of GGUF that takes hours to encode whole

Models are generated into `--models` and kept there only with `--keep`; the largest takes 5 GB. On a CPU one thread and
its CPU time are what is measured, so that other work on the machine counts little, at the sizes in `bench.models`.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from bench.models import MODELS, folder
from bench.repeated import blocks, repeated, without_outputs
from sdquant import demo

HERE = Path(__file__).parent
RESULTS = HERE / "results"
# Each of the formats that somebody else has too, in the default runtime, and fp8.
SCHEMES = ("nf4", "fp8", "bnb-int8", "qint8", "qint4", "int8", "sdnq-int8", "q8_0", "q4_0")
SHIPPED = {"digits-sd": "a handwritten seven", "digits-flux": "a handwritten seven"}
DEFAULT = ("sd15", "sdxl", "flux-1.2b", *SHIPPED)


def measure(
    name: str, models: Path, schemes: tuple[str, ...], rounds: int, side: int | None, **values: Any
) -> dict[str, Any]:
    """The numbers of one model."""
    from tqdm import tqdm

    from sdquant.evaluation.benchmark import bench

    if name in SHIPPED:
        path: Path = demo.path(name)
        more: dict[str, Any] = {"prompt": SHIPPED[name], "steps": 20}
    else:
        path = folder(name, models)
        more = {"size": (side or MODELS[name].side,) * 2}
    with tqdm(desc=name, unit="turn", disable=None) as bar:

        def on_progress(done: int, total: int, text: str) -> None:
            bar.total = total or None
            bar.set_postfix_str(text, refresh=False)
            bar.update(done - bar.n)
            bar.refresh()

        made = bench(path, schemes, rounds=rounds, on_progress=on_progress, **more, **values)
    print(_table(made))
    weights = "trained" if name in SHIPPED else "random"
    return made.to_dict() | {"model": name, "weights": weights}


def _table(made: Any) -> str:
    from sdquant.cli.commands.bench import render

    return render(made)


@contextmanager
def place(models: Path | None) -> Iterator[Path]:
    """The folder for models: the one named, or a temporary one."""
    if models is not None:
        models.mkdir(parents=True, exist_ok=True)
        yield models
        return
    with tempfile.TemporaryDirectory(prefix="sdquant-whole-") as made:
        yield Path(made)


def main() -> None:
    """Measure the models one after the other, and write each one's file when it is done."""
    from bench import _results

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*MODELS, *SHIPPED]
    parser.add_argument(
        "model", nargs="*", metavar="MODEL", help=f"of {', '.join(known)} (default: all but flux-12b)"
    )  # fmt: skip
    parser.add_argument("-q", "--quant", action="append", help="only this scheme (repeat)")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument(
        "--side", type=int, help="pixels (default: the model's in bench.models); it is part of the files' names"
    )
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="cpu", help="default: %(default)s")
    parser.add_argument(
        "--load", action="append", default=[], metavar="NAME=VALUE",
        help="another argument of load_model, such as runtime=plain (repeat); it is part of the files' names",
    )  # fmt: skip
    parser.add_argument(
        "--repeat", type=blocks, metavar="BLOCKS",
        help="encode so many blocks of each weight of a GGUF file, again and again: see bench.repeated",
    )  # fmt: skip
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--models", type=Path, help="where models are generated (default: a temporary folder)")
    parser.add_argument("--keep", action="store_true", help="with --models: keep them for the next time")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the files (default: %(default)s)")
    args = parser.parse_args()
    unknown = sorted(set(args.model) - set(known))
    if unknown:
        parser.error(f"there is no model called {', '.join(unknown)}; there are {', '.join(known)}")
    more = dict(word.split("=", 1) for word in args.load)
    values = {"threads": args.threads, "clock": args.clock, "peers": args.peers} | more
    with place(args.models) as models:
        for name in args.model or DEFAULT:
            with repeated(args.repeat) if args.repeat else nullcontext():
                made = measure(name, models, tuple(args.quant or SCHEMES), args.rounds, args.side, **values)
            rows, bench, machine = (made.pop(key) for key in ("rows", "bench", "machine"))
            if args.repeat:
                rows = without_outputs(rows, args.repeat)
                made["weights"] += " and, in GGUF files, repeated"
            size = [] if args.side is None else [f"side-{args.side}"]
            kind = ["repeated"] if args.repeat else []
            file = "-".join(["whole", name, *(f"{key}-{value}" for key, value in sorted(more.items())), *size, *kind])
            _results.write(args.out / f"{file}.json", bench, rows, machine=machine, **made)
            if not args.keep and name in MODELS:
                shutil.rmtree(models / f"sdquant-bench-{name}", ignore_errors=True)


if __name__ == "__main__":
    main()
