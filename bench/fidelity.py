"""How well every scheme draws: images read right, PSNR and one-step SNR against the unquantized model, bytes, memory.

    python -m bench.fidelity                        every scheme on both digits models, 200 images each
    python -m bench.fidelity --model glyphs-flux --only q4_k
    python -m bench.fidelity --images 10 --only nf4

Each scheme runs in a process of its own, so that its peak memory is its own, with one thread; `--jobs` run at a time.
Image i shows digit i % 10, or one of the glyphs, and starts from noise of seed i, at the pipeline's default sequence
length. Results go into one JSON file after each scheme. A run that was cut off goes on where it stopped: a row is done
if the model's weights, the steps, the images and the packages are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import _peer_pipelines, _pictures
from bench._calibrated import AUTO, COMPONENTS, MEASURED, is_mix, load_mix, quantized_components, write_statistics
from bench._calibrating_peers import layers_of
from bench._peer_pipelines import PEERS
from bench._pictures import MODELS, path
from sdquant import __version__, backends, demo

if TYPE_CHECKING:
    from bench._calibrating_peers import Compressed

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "fidelity.json"
GLYPHS = HERE / "results" / "fidelity-glyphs.json"  # of that model alone
CACHE = HERE / "results" / ".cache"  # the unquantized model's images and outputs, which the schemes are held to
# Beside all schemes: mixes, what calibration improves, and what other libraries calibrate (PEERS); SDNQ's best formats
# and llama.cpp's without calibration are among the schemes.
MIXES = tuple(title.format(share=share) for share in (0.28, 0.2) for title in (AUTO, MEASURED))
CALIBRATED = ("int4,gptq", "q4_k,imatrix", "q3_k,imatrix", "q4_k_m,imatrix")
BATCH = 50
LONG = 28  # steps of the second unquantized row
PACKAGES = (
    "torch", "diffusers", "transformers", "accelerate", "bitsandbytes", "optimum-quanto", "nncf", "sdnq", "libgguf",
    "scikit-learn",
)  # fmt: skip


def schemes() -> list[str]:
    """All schemes that are made but plain floats, and nf4 and fp4 with double quantization."""
    made = [row for row in backends.schemes() if row.on_the_fly or row.backend == "gguf"]
    names = [row.name for row in made if row.bits < 16]
    names += [f"{row.name},double_quant" for row in backends.schemes() if "double_quant" in row.options]
    return names


def row_names() -> list[str]:
    """What is measured: schemes, those that calibration improves, mixes, and what other libraries calibrate."""
    return [*schemes(), *CALIBRATED, *MIXES, *PEERS]


def digest(model: str) -> str:
    """A short hash of the model's weights and configs: results of another training are not results of this."""
    total = hashlib.sha256()
    folder = path(model)
    for file in sorted(one for one in folder.rglob("*") if one.is_file()):
        total.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
    return total.hexdigest()[:16]


def versions() -> dict[str, str]:
    """The packages that the numbers depend on."""
    from importlib import metadata

    return {"sdquant": __version__} | {name: metadata.version(name) for name in PACKAGES}


def machine() -> dict[str, Any]:
    """Where the times were taken."""
    from sdquant.compat.hardware import probe

    here = probe()
    return {
        "platform": platform.platform(),
        "python": here.python,
        "device": here.best.name,
        "cores": os.cpu_count(),
        "threads": 1,
    }


# One scheme, in its own process.


def measure(model: str, quant: str | None, steps: int, images: int, progress: bool) -> dict[str, Any]:
    """Load, draw, judge, compare: one row. The unquantized model's arrays are kept for the others to be held to."""
    import numpy as np
    from tqdm import tqdm

    imported = _peak()
    with tempfile.TemporaryDirectory(prefix="sdquant-fidelity-") as work:
        networks, begin = None, time.perf_counter()
        if quant in PEERS:
            peer = _peer_pipelines.load_peer(model, quant)
            pipe, networks = peer.pipe, peer.networks
        elif quant is not None and is_mix(quant):
            parts, whole = quantized_components(model), load(path(model), None)
            layers = [layer for part in parts for layer in layers_of(getattr(whole, part)).values()]
            weights = sum(layer.weight.numel() for layer in layers)
            pipe = load_mix(model, quant, statistics(model), weights, parts)
        else:
            source, scheme = _source(model, quant, Path(work))
            begin = time.perf_counter()
            pipe = load(source, scheme, statistics(model) if scheme in CALIBRATED else None)
        load_seconds = time.perf_counter() - begin
    wanted = _pictures.wanted(model, images)
    pictures: list[Any] = []
    begin = time.perf_counter()
    for start in tqdm(range(0, images, BATCH), desc=f"{model} {quant}", unit="batch", disable=not progress):
        part = range(start, min(start + BATCH, images))
        pictures += _pictures.draw(model, pipe, [wanted[i] for i in part], part, steps, BATCH)
    image_seconds = (time.perf_counter() - begin) / images
    pixels = np.stack([np.asarray(picture.convert("RGB")) for picture in pictures])
    output = one_step(pipe, model)
    row: dict[str, Any] = {
        "model": model,
        "scheme": quant,
        "steps": steps,
        "images": images,
        "right": _pictures.right(model, wanted, pictures),
        "judge": _pictures.judge(model).accuracy,
        **(_bytes(pipe) if networks is None else _bytes_of_peer(pipe, networks)),
        "load_seconds": round(load_seconds, 3),
        "image_seconds": round(image_seconds, 4),
        "peak_rss": _peak(),
        "peak_rss_before_loading": imported,
        "psnr": None,
        "snr": None,
    }
    if quant is None:
        if steps != LONG:
            CACHE.mkdir(parents=True, exist_ok=True)
            np.savez(reference_file(model, steps, images), pixels=pixels, output=output)
        return row
    with np.load(reference_file(model, steps, images)) as reference:
        row["psnr"] = _finite(_db(255.0**2, ((pixels.astype(float) - reference["pixels"]) ** 2).mean()))
        noise = ((output - reference["output"]) ** 2).mean()
        row["snr"] = _finite(_db(float((reference["output"] ** 2).mean()), noise))
    return row


def _bytes(pipe: Any) -> dict[str, Any]:
    """Of a pipeline that sdquant loaded: what is quantized, and its bytes."""
    from sdquant.models.pipelines import weight_bytes

    parts = pipe.sdquant.plan.components
    weights = [weight for part in parts for weight in part.weights]
    packed, packed_bf16 = sum(weight.bytes for weight in weights), sum(weight.bytes_bf16 for weight in weights)
    return {
        "components": sorted(part.name for part in parts if part.weights),
        "packed_bytes": packed,
        "packed_bytes_bf16": packed_bf16,
        "ratio": round(packed / packed_bf16, 4) if packed_bf16 else None,
        "quantized_weights": len(weights),
        "bytes": weight_bytes(pipe),
        "bytes_bf16": sum(part.bytes_bf16 for part in parts),
    }


def _bytes_of_peer(pipe: Any, networks: Mapping[str, Compressed]) -> dict[str, Any]:
    """The same of another library's: bytes as its files have them, not as it computes."""
    packed = round(sum(made.nbytes for made in networks.values()))
    packed_bf16 = 2 * sum(made.values for made in networks.values())
    whole = sum(part.bytes_bf16 for part in pipe.sdquant.plan.components)
    return {
        "components": sorted(name for name, made in networks.items() if made.layers),
        "packed_bytes": packed,
        "packed_bytes_bf16": packed_bf16,
        "ratio": round(packed / packed_bf16, 4),
        "quantized_weights": sum(made.layers for made in networks.values()),
        "bytes": whole - packed_bf16 + packed,
        "bytes_bf16": whole,
    }


def _source(model: str, quant: str | None, work: Path) -> tuple[Path, str | None]:
    """What to load, and as what: a GGUF scheme is written to files first, and those are loaded as found."""
    if quant is None or backends.parse(quant).scheme.on_the_fly:
        return path(model), quant
    from sdquant.saving.export_gguf import quantize_file

    stats = statistics(model) if quant in CALIBRATED else None
    return quantize_file(path(model), quant, work / "gguf", quant_stats=stats, progress=False), None


def statistics(model: str) -> Path:
    """What calibration finds of all that is quantized, kept beside the unquantized model's arrays."""
    file = CACHE / f"{model}-{digest(model)}-statistics.safetensors"
    if not file.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        write_statistics(model, file.with_suffix(".tmp")).replace(file)
    return file


def load(source: Path, scheme: str | None, stats: Path | None = None) -> Any:
    """The pipeline."""
    from sdquant import load_model

    return load_model(source, scheme, quant_stats=stats, progress=False)


def one_step(pipe: Any, model: str) -> Any:
    """What the UNet or transformer puts out at the first step, float64 [...], for ten prompts and fixed noise."""
    import numpy as np

    from sdquant.models.pipelines import main_part

    caught: list[Any] = []

    def keep(_: Any, __: Any, result: Any) -> None:
        caught.append((result[0] if isinstance(result, tuple) else result.sample).detach().float().cpu().numpy())

    handle = main_part(pipe).register_forward_hook(keep)
    try:
        _pictures.draw(model, pipe, _pictures.wanted(model, 10), range(10), 1)
    finally:
        handle.remove()
    return caught[0].astype(np.float64)


def reference_file(model: str, steps: int, images: int) -> Path:
    """Where the unquantized model's arrays are kept."""
    return CACHE / f"{model}-{digest(model)}-{steps}-{images}.npz"


def _db(signal: float, noise: float) -> float:
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)


def _finite(value: float) -> float | None:
    """Rounded; None for infinity (nothing differs), which JSON cannot say."""
    return round(value, 2) if math.isfinite(value) else None


def _peak() -> int:
    """The most memory this process has had resident so far, in bytes."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# All of them.


def todo(args: argparse.Namespace) -> list[tuple[str, str | None, int]]:
    """Model, scheme and steps of every row, references first."""
    models = [args.model] if args.model else list(demo.MODELS)
    wanted = args.only or row_names()
    rows: list[tuple[str, str | None, int]] = [(model, None, args.steps) for model in models]
    if not args.only:
        rows += [(model, None, LONG) for model in models if args.steps != LONG]
    return rows + [(model, scheme, args.steps) for scheme in wanted for model in models if _is_possible(scheme, model)]


def _is_possible(scheme: str, model: str) -> bool:
    """Whether it can be measured here: another library may be missing, or take no such network."""
    return scheme not in PEERS or _peer_pipelines.can_quantize(scheme, model)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row is about: one of each is kept."""
    return row["model"], row["scheme"], row["steps"]


def fresh(row: dict[str, Any], digests: dict[str, str], images: int, packages: dict[str, str]) -> bool:
    """Whether a stored row still holds."""
    scheme, model = row["scheme"], row["model"]
    parts = [] if scheme is None else sorted(quantized_components(model))
    if scheme == _peer_pipelines.AUTOROUND:
        parts = [COMPONENTS[model]]
    same = row["digest"] == digests[model] and row["components"] == parts
    return bool(same and row["images"] == images and row["versions"] == packages)


def run_all(args: argparse.Namespace) -> None:
    """Run what is missing, each in a process of its own, and write the file after each."""
    from tqdm import tqdm

    stored = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    models = {args.model} if args.model else set(demo.MODELS)
    packages, digests = versions(), {model: digest(model) for model in models | {row["model"] for row in stored}}
    done = {key(row): row for row in stored if fresh(row, digests, args.images, packages)}

    def missing(row: tuple[str, str | None, int]) -> bool:
        model, scheme, steps = row
        lost = scheme is None and steps == args.steps and not reference_file(model, steps, args.images).exists()
        return row not in done or lost

    rows = [row for row in todo(args) if missing(row)]
    lock = threading.Lock()

    def keep(row: tuple[str, str | None, int]) -> None:
        made = _in_process(*row, args.images)
        with lock:
            done[row] = made | {"digest": digests[row[0]], "device": machine()["device"], "versions": packages}
            _write(args.out, list(done.values()), args, packages)

    with tqdm(total=len(rows), unit="scheme", desc="Fidelity", disable=None) as bar:
        # References first: the others are compared with them.
        for stage in ([r for r in rows if r[1] is None], [r for r in rows if r[1] is not None]):
            pool = ThreadPoolExecutor(args.jobs)
            try:
                for future in as_completed({pool.submit(keep, row): row for row in stage}):
                    future.result()
                    bar.update()
            finally:
                pool.shutdown(cancel_futures=True)
    report(list(done.values()))


def _in_process(model: str, scheme: str | None, steps: int, images: int) -> dict[str, Any]:
    """`measure` in a fresh process with one thread."""
    words = ["--one", model, scheme or "none", "--steps", str(steps), "--images", str(images)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.fidelity", *words],
        cwd=HERE.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{model} {scheme} failed:\n{done.stderr[-4000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def _write(out: Path, rows: list[dict[str, Any]], args: argparse.Namespace, packages: dict[str, str]) -> None:
    order = {name: number for number, name in enumerate([None, *row_names()])}
    rows.sort(key=lambda row: (row["model"], order.get(row["scheme"], len(order)), row["steps"]))
    values = {
        "steps": args.steps,
        "images": args.images,
        "machine": machine(),
        "versions": packages,
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.name}.tmp")
    beside.write_text(json.dumps(values, indent=1) + "\n")
    beside.replace(out)


def report(rows: list[dict[str, Any]]) -> None:
    """The rows as a table."""
    print(f"{'model':12}{'scheme':20}{'steps':>6}{'right':>10}{'ratio':>8}{'PSNR dB':>9}{'SNR dB':>8}{'s/image':>9}")
    for row in rows:
        ratio, psnr, snr = ("-" if row[name] is None else f"{row[name]:.2f}" for name in ("ratio", "psnr", "snr"))
        right = f"{row['right']}/{row['images']}"
        print(
            f"{row['model']:12}{row['scheme'] or 'bf16':20}{row['steps']:6}{right:>10}{ratio:>8}{psnr:>9}{snr:>8}"
            f"{row['image_seconds']:9.3f}"
        )


def main() -> None:
    """Parse, and run one or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200, help="images a scheme (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps (default: %(default)s)")
    parser.add_argument("--only", action="append", metavar="SCHEME", help="only this scheme (repeat for several)")
    parser.add_argument("--model", choices=MODELS, help="only this model")
    parser.add_argument("--out", type=Path, help=f"default: {RESULTS.name} or {GLYPHS.name} in bench/results")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes at once (default: %(default)s)"
    )
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "SCHEME"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        model, scheme = args.one
        row = measure(model, None if scheme == "none" else scheme, args.steps, args.images, sys.stderr.isatty())
        print(json.dumps(row))
        return
    args.out = args.out or (GLYPHS if args.model == "glyphs-flux" else RESULTS)
    run_all(args)


if __name__ == "__main__":
    main()
