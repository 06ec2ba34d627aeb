"""What the options of schemes that cost no byte bring, each and together, in the output of a small model.

    python -m bench.code_options                      the three small models; bench/results/code_options.json

"range" is by the weights alone, "range, statistics" by what calibration found, as "bias" and "gptq" are. Decibels are
those of bench.better_codes, with every third of its calls.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sdquant
from bench._calibrated import COMPONENTS as MODELS
from bench._calibrated import write_statistics
from bench._calibrating_peers import layers_of
from bench._peer_pipelines import calls_of
from bench._pictures import path
from bench._results import read, write
from bench.better_codes import outputs
from sdquant import backends
from sdquant.core import Unfit, registry
from sdquant.models import quantize_weight
from sdquant.rules import with_statistics
from sdquant.utils.metrics import decibels

RESULTS = Path(__file__).parent / "results" / "code_options.json"
SCHEMES = ("int4", "nf4", "qint4", "comfy:nvfp4", "sdnq-uint4", "sdnq-uint4,hadamard", "sdnq-uint3", "qint3")
STATISTICS = "statistics"
WAYS = ("", "range", f"range, {STATISTICS}", "bias", "range, bias", "gptq", "range, gptq")


def measure(name: str, component: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each scheme and each way."""
    pipe = sdquant.load_model(path(name), progress=False)
    calls = calls_of(name, pipe, getattr(pipe, component), 1000)[::3]
    model = getattr(sdquant.load_model(path(name), progress=False), component).float()
    exact, layers = outputs(model, calls), layers_of(model)
    weights = {where: layer.weight.data.clone() for where, layer in layers.items()}
    biases = {where: layer.bias.data.clone() for where, layer in layers.items() if layer.bias is not None}
    case = name if component in MODELS.values() else f"{name}, {component}"
    with tempfile.TemporaryDirectory() as folder:
        stats = write_statistics(name, Path(folder) / "stats.safetensors")
        for scheme in SCHEMES:
            for way in WAYS:
                words = [word for word in way.split(", ") if word and word != STATISTICS]
                spec = registry.parse(",".join((scheme, *words)))
                if way not in ("", "range"):
                    spec = with_statistics(spec, str(stats), component)
                for where, layer in layers.items():
                    weight, key = weights[where].bfloat16(), f"{where}.weight"
                    layer.weight.data = weights[where]
                    if where in biases:
                        layer.bias.data = biases[where]
                    try:
                        packed = backends.encode(weight, spec.of(key, tuple(weight.shape)))
                    except Unfit:
                        continue
                    layer.weight.data = packed.spec.scheme.codec.decode(packed, weights[where].dtype)
                    change = quantize_weight.bias_change(key, weight, packed, spec)
                    if change is not None and where in biases:
                        layer.bias.data = biases[where] + change
                noise = (outputs(model, calls) - exact).square().sum()
                yield {
                    "name": f"{scheme}, {way}" if way else scheme, "case": case, "scheme": scheme, "way": way,
                    "snr": round(decibels(float(exact.square().sum()), float(noise)), 2),
                }  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=MODELS, help="default: all")
    parser.add_argument("--component", help="default: the transformer or UNet, and the CLIP text encoder")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file to keep; rows measured before stay in it")
    args = parser.parse_args()
    kept = {(row["name"], row["case"]): row for row in read(args.json)} if args.json.exists() else {}
    for name in (args.model,) if args.model else MODELS:
        for component in (args.component,) if args.component else (MODELS[name], "text_encoder"):
            for row in measure(name, component):
                print(f"{row['case']:26} {row['name']:38} {row['snr']:6.2f} dB", flush=True)
                kept[row["name"], row["case"]] = row
            write(args.json, "code_options", list(kept.values()))


if __name__ == "__main__":
    main()
