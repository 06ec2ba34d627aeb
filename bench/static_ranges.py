"""What ranges of activations that are found beforehand cost against those found at run time.

    python -m bench.static_ranges                    both models, 200 images each
    python -m bench.static_ranges --images 20

For rules with quantized activations: digits right, PSNR of the images and SNR of one step against the unquantized
model, with dynamic and with static ranges. Calibration draws each digit once, with other seeds than the images.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import sdquant
from bench.fidelity import digest, machine, one_step, versions
from sdquant import demo
from sdquant.calibrating import Calibration, calibrate
from sdquant.demo import digits
from sdquant.drawing import draw
from sdquant.rules import QuantizationRule
from sdquant.rules.rule import to_dict
from sdquant.rules.statistics_file import write_statistics

RESULTS = Path(__file__).parent / "results" / "static_ranges.json"
STEPS, BATCH, SEED = 10, 50, 100_000

RULES = {
    "w8a8": QuantizationRule(weight_qtype="int8", act_qtype="int8"),
    "w8a8, minmax": QuantizationRule(weight_qtype="int8", act_qtype="int8", act_calibration_method="minmax"),
    "w4a8": QuantizationRule(weight_qtype="int4", act_qtype="int8"),
    "fp8": QuantizationRule(weight_qtype="float8_e4m3fn", act_qtype="float8_e4m3fn"),
}


def measure(pipe: Any, images: int, reference: tuple[Any, Any] | None) -> tuple[dict[str, Any], tuple[Any, Any]]:
    """A row, and the images [n, h, w, 3] and the output of one step."""
    wanted, pictures = [i % 10 for i in range(images)], []
    for start in range(0, images, BATCH):
        part = range(start, min(start + BATCH, images))
        pictures += draw(pipe, [digits.prompt(wanted[i]) for i in part], seeds=part, steps=STEPS, batch=BATCH)
    pixels = np.stack([np.asarray(picture.convert("RGB"), np.float64) for picture in pictures])
    output = np.asarray(one_step(pipe), np.float64)
    seen = digits.judge().read(pictures)
    row: dict[str, Any] = {"right": sum(a == b for a, b in zip(wanted, seen, strict=True)), "psnr": None, "snr": None}
    if reference is not None:
        row["psnr"] = round(10 * float(np.log10(255.0**2 / ((pixels - reference[0]) ** 2).mean())), 2)
        row["snr"] = round(10 * float(np.log10((reference[1] ** 2).mean() / ((output - reference[1]) ** 2).mean())), 2)
    return row, (pixels, output)


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = []
    for model in demo.MODELS:
        place = demo.path(model)
        row, reference = measure(sdquant.load_model(place, progress=False), args.images, None)
        rows.append({"model": model, "rule": None, "ranges": None, **row})
        for name, rule in RULES.items():
            static = replace(rule, act_static_scale=True)
            with tempfile.TemporaryDirectory(prefix="sdquant-static-") as work:
                file = Path(work) / "stats.safetensors"
                prompts = tuple(digits.prompt(digit) for digit in range(10))
                task = Calibration(model=model, rules=(static,), prompts=prompts, seed=SEED, steps=STEPS)
                write_statistics(file, calibrate(sdquant.load_model(place, progress=False), task), {})
                for kind, values in (
                    ("dynamic", {"rules": [rule]}),
                    ("static", {"rules": [static], "quant_stats": file}),
                ):
                    pipe = sdquant.load_model(place, progress=False, **values)
                    row, _ = measure(pipe, args.images, reference)
                    rows.append({"model": model, "rule": name, "fields": to_dict(rule), "ranges": kind, **row})
                    print(rows[-1], flush=True)
    made = {
        "images": args.images,
        "steps": STEPS,
        "versions": versions(),
        "machine": machine(),
        "models": {model: digest(model) for model in demo.MODELS},
        "rows": rows,
    }
    args.out.write_text(json.dumps(made, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
