"""What loading costs: CPU time and peak anonymous memory of a Flux-shaped model, against the libraries' own ways.

    python -m bench.load                            all rows, three fresh processes each, in turns
    python -m bench.load --only nf4 --only diffusers-bnb-nf4 --rounds 1
    python -m bench.load --size 12b --only nf4 --rounds 1

The model has random bfloat16 weights at FLUX.1's widths (hidden 3072): `1.2b` is 2 double and 3 single blocks, 1.17
billion parameters; `12b` is all of FLUX.1, 24 GB. It is generated into `--models` (default: the temporary folder) and
kept there. Each row is a fresh process with one thread: CPU seconds (user and system) from after the imports until the
model is there, and anonymous memory over what the imports took, sampled by the parent every 4 ms.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench._full_size_statistics import statistics
from bench._memory import anonymous, touch
from bench.fidelity import machine, versions
from bench.models import folder as make_folder
from sdquant import backends
from sdquant.rules import statistics_file

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "load.json"
SIZES = {"1.2b": 5, "12b": 12}  # of the model in bench.models, and how many files it is in
TOUCHED = 4 << 30  # bytes: more than any row takes
# At most so many times the CPU time of another row of the same run; and of each row that quantizes, the peak over the
# model's packed size plus its largest tensor, and the largest statistics of a layer where there are any.
TIMES = {"int8_convrot": ("int8", 2.0)}
PEAK = 1.1
CALIBRATED = "bf16 and statistics"  # what is loaded
MIX = 0.28  # of bf16's bytes


@dataclass(frozen=True)
class Row:
    """One way to load: what it makes, who does it, and how.

    Attributes:
        name: what `--only` takes.
        makes: the format; rows of the same format are compared.
        peer: whether it is a library's own way.
        files: what is loaded: "bf16" for the float model, CALIBRATED for that with statistics, else the scheme in
            which sdquant saved it before.
        load: runs in the fresh process, with everything imported; returns the model.
        prepare: imports, before the clock starts.
    """

    name: str
    makes: str
    peer: bool
    files: str
    load: Callable[[Path], Any]
    prepare: Callable[[], Any]


def _ours(scheme: str | None, mode: str = "pre") -> Callable[[Path], Any]:
    def load(path: Path) -> Any:
        import sdquant

        return sdquant.load_model(path, scheme, mode=mode, runtime="plain" if scheme else None, progress=False)

    return load


def _calibrated(scheme: str) -> Callable[[Path], Any]:
    def load(path: Path) -> Any:
        import sdquant

        return sdquant.load_model(path, scheme, runtime="plain", quant_stats=statistics(path), progress=False)

    return load


def _mixed(share: float, calibrated: bool) -> Callable[[Path], Any]:
    """Return what chooses a mix of so large a share of bf16, with nothing known from before, and loads it."""

    def load(path: Path) -> Any:
        import sdquant

        size = int(share * sdquant.plan(path).bytes)
        known = statistics(path) if calibrated else None
        with tempfile.TemporaryDirectory() as cache:
            os.environ["XDG_CACHE_HOME"] = cache
            return sdquant.load_model(path, "auto", size=size, quant_stats=known, progress=False)

    return load


def _import_ours() -> None:
    import diffusers  # noqa: F401
    import torch
    from diffusers import FluxTransformer2DModel  # noqa: F401  # diffusers imports it when it is first asked for

    import sdquant
    from sdquant.loading import loader, quantizer  # noqa: F401

    assert sdquant.load_model
    for name in backends.names():
        backends.get(name)
    # The first quantization of a process imports the library: that is not loading.
    for name in ("nf4", "qint8", "int8", "sdnq-int8"):
        backend = backends.of_scheme(name)
        backend.encode(torch.ones(64, 64, dtype=torch.bfloat16), backends.parse(name))


def _diffusers(make: Callable[[], Any]) -> Callable[[Path], Any]:
    def load(path: Path) -> Any:
        import torch
        from diffusers import FluxTransformer2DModel

        return FluxTransformer2DModel.from_pretrained(
            path, torch_dtype=torch.bfloat16, quantization_config=make(), device_map={"": "cpu"}
        )

    return load


def _import_diffusers() -> None:
    import bitsandbytes  # noqa: F401
    import sdnq  # noqa: F401
    from diffusers import FluxTransformer2DModel, quantizers  # noqa: F401
    from diffusers.quantizers.bitsandbytes import bnb_quantizer
    from optimum import quanto  # noqa: F401

    # diffusers 0.42 says that there is no GPU, and would otherwise do it.
    for cls in (bnb_quantizer.BnB4BitDiffusersQuantizer, bnb_quantizer.BnB8BitDiffusersQuantizer):
        cls.validate_environment = lambda self, *args, **kwargs: None
        cls.update_device_map = lambda self, device_map: device_map


def _bnb4() -> Any:
    import torch
    from diffusers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def _bnb8() -> Any:
    from diffusers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True)


def _quanto() -> Any:
    import warnings

    from diffusers import QuantoConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in diffusers, which says so each time
        return QuantoConfig(weights_dtype="int8")


def _sdnq() -> Any:
    from sdnq import SDNQConfig

    return SDNQConfig(weights_dtype="int8")


def _nncf(path: Path) -> Any:
    import nncf
    import torch
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel.from_pretrained(path, torch_dtype=torch.bfloat16)
    floats = {"dtype": torch.bfloat16}
    example = {  # NNCF traces the model before it compresses it
        "hidden_states": torch.zeros(1, 4, 64, **floats), "encoder_hidden_states": torch.zeros(1, 4, 4096, **floats),
        "pooled_projections": torch.zeros(1, 768, **floats), "timestep": torch.ones(1, **floats),
        "guidance": torch.ones(1, **floats), "img_ids": torch.zeros(4, 3), "txt_ids": torch.zeros(4, 3),
    }  # fmt: skip
    return nncf.compress_weights(
        model, mode=nncf.CompressWeightsMode.INT8_ASYM, dataset=nncf.Dataset([example], lambda item: item)
    )


def _import_nncf() -> None:
    import nncf  # noqa: F401
    from diffusers import FluxTransformer2DModel  # noqa: F401


def _gguf(path: Path) -> Any:
    import torch
    from diffusers import FluxTransformer2DModel, GGUFQuantizationConfig

    return FluxTransformer2DModel.from_single_file(
        path, config=str(path.parent), quantization_config=GGUFQuantizationConfig(compute_dtype=torch.bfloat16),
        torch_dtype=torch.bfloat16,
    )  # fmt: skip


def rows() -> list[Row]:
    """All ways."""
    return [
        Row("bf16", "bf16", False, "bf16", _ours(None), _import_ours),
        *(
            Row(row.name, row.name, False, "bf16", _ours(row.name), _import_ours)
            for row in backends.schemes()
            if row.on_the_fly
        ),
        *(
            Row(f"{name},gptq", f"{name},gptq", False, CALIBRATED, _calibrated(f"{name},gptq"), _import_ours)
            for name in ("int4", "nf4", "sdnq-uint4,hadamard")
        ),
        *(
            Row(f"{name},range", f"{name},range", False, "bf16", _ours(f"{name},range"), _import_ours)
            for name in ("nf4", "comfy:nvfp4")
        ),
        Row("auto", "auto, 0.28", False, "bf16", _mixed(MIX, calibrated=False), _import_ours),
        Row("auto,statistics", "auto, 0.28", False, CALIBRATED, _mixed(MIX, calibrated=True), _import_ours),
        *(Row(f"post-{name}", name, False, "bf16", _ours(name, "post"), _import_ours) for name in ("nf4", "qint8")),
        *(
            Row(f"saved-{name}", name, False, name, _ours(None), _import_ours)
            for name in ("nf4", "qint8", "int8", "q8_0", "q4_0")
        ),
        Row("diffusers-bnb-nf4", "nf4", True, "bf16", _diffusers(_bnb4), _import_diffusers),
        Row("diffusers-bnb-int8", "bnb-int8", True, "bf16", _diffusers(_bnb8), _import_diffusers),
        Row("diffusers-quanto-int8", "qint8", True, "bf16", _diffusers(_quanto), _import_diffusers),
        Row("diffusers-sdnq-int8", "sdnq-int8", True, "bf16", _diffusers(_sdnq), _import_diffusers),
        Row("nncf-int8", "int8", True, "bf16", _nncf, _import_nncf),
        Row("diffusers-gguf-q8_0", "q8_0", True, "q8_0", _gguf, _import_diffusers),
    ]


# The model.


def folder(size: str, models: Path) -> Path:
    """The model's folder, generated if it is not there."""
    return make_folder(f"flux-{size}", models, files=SIZES[size])


def saved(scheme: str, source: Path) -> Path:
    """What to load: the float model, or a copy that sdquant quantized and saved beside it."""
    if scheme == CALIBRATED:
        statistics(source)
    if scheme in ("bf16", CALIBRATED):
        return source
    place = source.with_name(f"{source.name}-{scheme}")
    gguf = not backends.parse(scheme).scheme.on_the_fly
    target = place / "model.gguf" if gguf else place
    if not target.exists():
        if gguf:
            place.mkdir(exist_ok=True)
            (place / "config.json").write_text((source / "config.json").read_text())
        words = [sys.executable, "-m", "sdquant", "quantize", str(source), str(target), "--quant", scheme]
        subprocess.run(words, cwd=HERE.parent, check=True)
    return target


# One row, in its own process.


def measure(row: Row, path: Path) -> dict[str, float]:
    """CPU and wall seconds of one load. The parent reads the memory, between the two lines that this prints."""
    import torch

    torch.set_num_threads(1)
    row.prepare()
    gc.collect()
    print("ready", flush=True)
    sys.stdin.readline()
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    model = row.load(path)
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    from sdquant.models.pipelines import weight_bytes

    made = {"cpu": user + system, "system": system, "wall": wall}
    if not row.peer:
        packed = [weight for part in model.sdquant.plan.components for weight in part.weights]
        largest = max((p.numel() * 2 for p in _shapes(row, path)), default=0)
        made |= {"bytes": weight_bytes(model), "largest": largest, "quantized": len(packed)}
        if row.files == CALIBRATED:
            made["statistics"] = max(info.nbytes for info in statistics_file.names_in(statistics(path)).values())
    return made


def _shapes(row: Row, path: Path) -> Iterable[Any]:
    from sdquant.models import components

    config = json.loads(((path if path.is_dir() else path.parent) / "config.json").read_text())
    return components.empty("diffusers", config["_class_name"], config).parameters()


def _in_process(row: Row, path: Path, size: str) -> dict[str, float]:
    touch(TOUCHED)
    child = subprocess.Popen(
        [sys.executable, "-m", "bench.load", "--one", row.name, str(path), "--size", size],
        cwd=HERE.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    while (line := child.stdout.readline()) and line != "ready\n":
        pass  # what libraries print while they are imported
    if not line:
        raise SystemExit(f"{row.name} failed:\n{child.communicate()[1][-4000:]}")
    before = peak = anonymous(child.pid)
    child.stdin.write("\n")
    child.stdin.flush()
    while child.poll() is None:
        peak = max(peak, anonymous(child.pid))
        time.sleep(0.004)
    out, err = child.communicate()
    if child.returncode:
        raise SystemExit(f"{row.name} failed:\n{err[-4000:]}")
    return {**json.loads(out.splitlines()[-1]), "peak": peak - before}


# All of them.


def run_all(args: argparse.Namespace) -> None:
    """Every row in turns, and the file after each load: a row with statistics takes minutes, and may be the last."""
    from tqdm import tqdm

    source = folder(args.size, args.models)
    wanted = [row for row in rows() if not args.only or row.name in args.only]
    if unknown := set(args.only or ()) - {row.name for row in wanted}:
        there = ", ".join(row.name for row in rows())
        raise SystemExit(f"No row is called {', '.join(sorted(unknown))}; there are: {there}")
    paths = {row.name: saved(row.files, source) for row in wanted}
    seen: dict[str, list[dict[str, float]]] = {row.name: [] for row in wanted}
    with tqdm(total=args.rounds * len(wanted), unit="load", desc="Loading", disable=None) as bar:
        for number in range(args.rounds):
            for row in wanted if number % 2 == 0 else reversed(wanted):
                seen[row.name].append(_in_process(row, paths[row.name], args.size))
                bar.update()
                if args.out:
                    _write(args, [_median(one, seen[one.name]) for one in wanted if seen[one.name]])
    report([_median(row, seen[row.name]) for row in wanted])


def _median(row: Row, runs: list[dict[str, float]]) -> dict[str, Any]:
    numbers = {name: round(median(run[name] for run in runs), 3) for name in runs[0]}
    return {"name": row.name, "makes": row.makes, "peer": row.peer, "files": row.files, "runs": len(runs), **numbers}


def _write(args: argparse.Namespace, made: list[dict[str, Any]]) -> None:
    kept = json.loads(args.out.read_text()).get("sizes", {}) if args.out.exists() else {}
    before = {row["name"]: row for row in kept.get(args.size, {}).get("rows", [])}
    rows_now = list((before | {row["name"]: row for row in made}).values())
    kept[args.size] = {"machine": machine(), "versions": versions(), "rows": rows_now}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    beside = args.out.with_name(f".{args.out.name}.tmp")
    beside.write_text(json.dumps({"sizes": kept}, indent=1) + "\n")
    beside.replace(args.out)


def report(made: list[dict[str, Any]]) -> None:
    """The rows as a table, and those above their limits."""
    print(f"{'row':24}{'CPU s':>8}{'system':>8}{'wall s':>8}{'peak MB':>9}{'model MB':>10}{'limit MB':>10}")
    for row in made:
        model = f"{row['bytes'] / 1e6:.0f}" if "bytes" in row else "-"
        limit = f"{_most(row) / 1e6:.0f}" if "bytes" in row else "-"
        print(
            f"{row['name']:24}{row['cpu']:8.2f}{row['system']:8.2f}{row['wall']:8.2f}{row['peak'] / 1e6:9.0f}"
            f"{model:>10}{limit:>10}"
        )
    print("\n".join(missed(made)) or "every limit holds")


def _most(row: dict[str, Any]) -> float:
    """Return the bytes that a row's peak may be."""
    most: float = PEAK * row["bytes"] + row["largest"] + row.get("statistics", 0)
    return most


def missed(made: list[dict[str, Any]]) -> list[str]:
    """Return a line for each row above its limit."""
    by_name = {row["name"]: row for row in made}
    slow = [
        f"{name}: more than {limit} times the CPU time of {other}"
        for name, (other, limit) in TIMES.items()
        if {name, other} <= by_name.keys() and by_name[name]["cpu"] > limit * by_name[other]["cpu"]
    ]
    quantized = [row for row in made if row["files"] in ("bf16", CALIBRATED) and row.get("quantized")]
    large = (row["name"] for row in quantized if row["peak"] > _most(row))
    return [*slow, *(f"{name}: its peak is above the limit" for name in large)]


def main() -> None:
    """Parse, and run one or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1.2b", help="default: %(default)s")
    parser.add_argument("--only", action="append", metavar="ROW", help="only this row (repeat for several)")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes a row (default: %(default)s)")
    place, kept = Path(tempfile.gettempdir()), RESULTS.relative_to(HERE.parent)
    parser.add_argument("--models", type=Path, default=place, help="where the model is kept (default: %(default)s)")
    parser.add_argument("--out", type=Path, help=f"write the medians into this file, e.g. {kept}")
    parser.add_argument("--one", nargs=2, metavar=("ROW", "PATH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, path = args.one
        print(json.dumps(measure(next(row for row in rows() if row.name == name), Path(path))))
        return
    run_all(args)


if __name__ == "__main__":
    main()
