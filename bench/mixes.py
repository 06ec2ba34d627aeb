"""Predicted against measured noise of random mixes: `python -m bench.mixes --json bench/results/mixes.json`.

For each digits model, and for glyphs-flux where it is asked for (`python -m bench.mixes glyphs-flux`), mixes that give
every weight of the UNet or transformer a random scheme are made, and one step is taken with the inputs that the float
model gets. Predicted is the sum of `planning.mix_errors`, by calibration, with codes chosen by GPTQ, or from the
weights alone. Reported: Spearman's rank correlation, the worst and the median miss in dB.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sdquant
import sdquant.demo
from bench import _pictures
from bench._calibrated import COMPONENTS
from bench._results import read, write
from sdquant.core import GPTQ, Unfit, registry
from sdquant.models import quantize_weight
from sdquant.planning import mix_errors
from sdquant.rules import ComponentStatistics, statistics_file, with_statistics
from sdquant.training import Calibration, calibrate

SCHEMES = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0", "q4_0", "sdnq-uint4", "sdnq-uint4,hadamard",
           "sdnq-int6", "int8_row")  # fmt: skip
DIGITS = (1, 4, 6, 8)  # that calibration draws


def main() -> None:
    """Measure both models, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", choices=COMPONENTS, help="default: both digits models")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--json", type=Path, help="the file to keep; rows measured before stay in it")
    args = parser.parse_args()
    is_kept = args.json is not None and args.json.exists()
    kept = {(row["name"], row["case"]): row for row in read(args.json)} if is_kept else {}
    for name in (args.model,) if args.model else sdquant.demo.MODELS:
        rows = of_model(name, COMPONENTS[name], args.count)
        print(json.dumps(rows, indent=1), flush=True)
        kept |= {(row["name"], row["case"]): row for row in rows}
        if args.json is not None:
            write(args.json, "mixes", list(kept.values()))


def of_model(name: str, component: str, count: int) -> list[dict[str, Any]]:
    """Return the correlation and the misses of one model, with statistics and by the weights alone."""
    with tempfile.TemporaryDirectory() as folder:
        stats = Path(folder) / "stats.safetensors"
        things = _pictures.wanted(name, 4) if name == "glyphs-flux" else DIGITS
        prompts = tuple(_pictures.prompt(thing) for thing in things)
        task = Calibration(model=name, rules=(), prompts=prompts, steps=4, components=(component,))
        found = calibrate(sdquant.load_model(_pictures.path(name), progress=False), task)
        statistics_file.write_statistics(stats, found, {})
        pipe = sdquant.load_model(_pictures.path(name), progress=False)
        model = getattr(pipe, component)
        layers = ComponentStatistics(str(stats), component)
        weights = {f"{path}.weight": model.get_submodule(path).weight.data for path in layers}
        schemes = {key: [word for word in SCHEMES if _fits(word, weight)] for key, weight in weights.items()}
        weights = {key: weight for key, weight in weights.items() if schemes[key]}
        tables = {
            "calibrated": mix_errors.measure_errors(list(weights), weights.get, schemes, layers, _ignore),
            "weights alone": mix_errors.measure_errors(list(weights), weights.get, schemes, None, _ignore),
        }
        decoded = {
            table: {
                (key, word): _decoded(key, weights[key], word, str(stats) if table == "calibrated" else "", component)
                for key in weights
                for word in schemes[key]
            }
            for table in tables
        }
    inputs: list[tuple[Any, Any]] = []
    hook = model.register_forward_pre_hook(lambda _, a, k: inputs.append(copy.deepcopy((a, k))), with_kwargs=True)
    _pictures.draw(name, pipe, _pictures.wanted(name, 4, 7)[3:], [7], 2)
    hook.remove()
    before, chance = _outputs(model, inputs), random.Random(0)
    measured: dict[str, list[float]] = {table: [] for table in tables}
    predicted: dict[str, list[float]] = {table: [] for table in tables}
    for _ in range(count):
        coarse = chance.random()  # mixes of few and of many bits
        words = {key: _pick(schemes[key], coarse, chance) for key in weights}
        for table, rows in tables.items():
            for key, word in words.items():
                model.get_submodule(key.removesuffix(".weight")).weight.data = decoded[table][key, word]
            measured[table].append(_decibels(_noise(before, _outputs(model, inputs))))
            predicted[table].append(_decibels(sum(rows[key][word] for key, word in words.items())))
    return [
        {"name": table, "case": name, "mixes": count, "measured": _range(measured[table]),
         **_compared(row, measured[table])}
        for table, row in predicted.items()
    ]  # fmt: skip


def _ignore(_: int) -> None:
    """Show no progress."""


def _fits(word: str, weight: Tensor) -> bool:
    spec = registry.parse(word)
    try:
        spec.scheme.codec.layout(spec, tuple(weight.shape), "bfloat16")
    except Unfit:
        return False
    return True


def _decoded(key: str, weight: Tensor, word: str, stats: str, component: str) -> Tensor:
    """Return a weight after a scheme, by GPTQ where there are statistics and the scheme has it."""
    spec = registry.parse(word)
    if stats and GPTQ in spec.scheme.options:
        spec = with_statistics(registry.parse(f"{word},{GPTQ}"), stats, component).of(key, tuple(weight.shape))
    packed = quantize_weight.encode(key, weight, spec)
    return packed.spec.scheme.codec.decode(packed, weight.dtype)


def _pick(words: list[str], coarse: float, chance: random.Random) -> str:
    ranked = sorted(words, key=lambda word: registry.parse(word).scheme.bits)
    place = min(len(ranked) - 1, max(0, round(chance.gauss(coarse * len(ranked), 1.5))))
    return ranked[place]


@torch.no_grad()
def _outputs(model: Any, inputs: list[tuple[Any, Any]]) -> list[Tensor]:
    results = [model(*args, **values) for args, values in inputs]
    return [(one[0] if isinstance(one, tuple) else one.sample).float() for one in results]


def _noise(before: list[Tensor], after: list[Tensor]) -> float:
    ratios = [float((b - a).square().sum() / b.square().sum()) for b, a in zip(before, after, strict=True)]
    return sum(ratios) / len(ratios)


def _decibels(noise: float) -> float:
    return float(-10 * torch.tensor(noise).log10())


def _range(values: list[float]) -> list[float]:
    return [round(min(values), 1), round(max(values), 1)]


def _compared(predicted: list[float], measured: list[float]) -> dict[str, float]:
    misses = torch.tensor(predicted) - torch.tensor(measured)
    ranks = [torch.tensor(values).argsort().argsort().float() for values in (predicted, measured)]
    return {
        "rank correlation": round(float(torch.corrcoef(torch.stack(ranks))[0, 1]), 3),
        "median miss": round(float(misses.median()), 2),
        "missed": round(float(misses.abs().max()), 2),
    }


if __name__ == "__main__":
    main()
