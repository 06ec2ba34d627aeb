"""Measure what `quant="auto"` with a size would gain if it chose from all schemes, instead of those of `planning.mix`.

    python -m bench.more_schemes                      both digits models; bench/results/more_schemes.json

All that quantize on the fly, and GGUF's types, of up to nine bits are added. The decibels are predicted ones, by the
weights alone: those that mixes are chosen by.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sdquant
from bench._calibrating_peers import layers_of
from bench._results import write
from sdquant import demo
from sdquant.core import Unfit, gguf_mixes, registry
from sdquant.models import main_part
from sdquant.planning import knapsack, mix, mix_errors
from sdquant.utils.metrics import decibels

if TYPE_CHECKING:
    from torch import Tensor

RESULTS = Path(__file__).parent / "results" / "more_schemes.json"
SHARES = (0.46, 0.28, 0.24, 0.2)  # of bf16
FLOAT = "none"


def schemes() -> tuple[str, ...]:
    """Return all schemes that there could be to choose from, those of a mix first."""
    rows = [
        row.name
        for row in registry.schemes()
        if (row.on_the_fly or row.backend == "gguf") and row.bits <= 9 and row.name not in (*gguf_mixes.BASES, "rules")
    ]
    turned = [f"{name},hadamard" for name in rows if "hadamard" in registry.parse(name).scheme.options]
    return tuple(dict.fromkeys([*mix.FAMILIES[mix.OWN], *rows, *turned]))


def sizes(weight: Tensor, names: Sequence[str]) -> dict[str, int]:
    """Return the bytes of a weight in each scheme that takes it."""
    found = {}
    for name in names:
        spec = registry.parse(name)
        try:
            parts = spec.scheme.codec.layout(spec, tuple(weight.shape), "bfloat16")
        except Unfit:
            continue
        found[name] = sum(part.nbytes for part in parts.values())
    return found


def best(
    nbytes: Mapping[str, Mapping[str, int]], errors: mix_errors.Errors, names: Sequence[str], size: int
) -> tuple[float, Counter[str]]:
    """Return the decibels of the best mix of these schemes, and how many weights get each."""
    words = [
        [*(name for name in names if name in nbytes[weight] and name in errors[weight]), FLOAT] for weight in nbytes
    ]
    items = [
        [knapsack.Cost(row[word], 0.0 if word == FLOAT else errors[weight][word]) for word in each]
        for (weight, row), each in zip(nbytes.items(), words, strict=True)
    ]
    picks = knapsack.within_bytes(items, size)
    noise = sum(row[pick].noise for row, pick in zip(items, picks, strict=True))
    return decibels(1.0, noise), Counter(row[pick] for row, pick in zip(words, picks, strict=True))


def measure(model: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each size."""
    layers = layers_of(main_part(sdquant.load_model(demo.path(model), progress=False)))
    weights = {f"{path}.weight": layer.weight.data for path, layer in sorted(layers.items())}
    nbytes = {name: sizes(weight, schemes()) for name, weight in weights.items()}
    errors = mix_errors.measure_errors(list(weights), weights.__getitem__, nbytes, None, lambda _: None)
    bf16 = {name: 2 * weight.numel() for name, weight in weights.items()}
    table = {name: {**row, FLOAT: bf16[name]} for name, row in nbytes.items()}
    own = mix.FAMILIES[mix.OWN]
    for share in SHARES:
        size = int(share * sum(bf16.values()))
        few, _ = best(table, errors, own, size)
        many, counts = best(table, errors, schemes(), size)
        others = [name for name, _ in counts.most_common() if name not in (*own, FLOAT)]
        yield {"name": f"{share:g} of bf16", "case": model, "snr": round(few, 2), "more": round(many - few, 2),
               "schemes": len(own), "others": len(schemes()) - len(own), "most": others[:2]}  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = []
    for model in demo.MODELS:
        for row in measure(model):
            print(row, flush=True)
            rows.append(row)
    write(args.json, "more_schemes", rows)


if __name__ == "__main__":
    main()
