"""What rules cost after training, what training with quantization in the loop gets back, and static against dynamic.

    python -m bench.qat                              everything; hours on two cores
    python -m bench.qat --model digits-sd --only "int2 per tensor"

For each rule the shipped model draws 200 digits with the rule applied to its network and text encoders. Where digits
are lost, the network is then trained by `sdquant train`, its own float answers as the target, and draws again. Image i
shows digit i % 10 from noise of seed i. A static range is that of `sdquant calibrate` over the ten prompts. Results go
into one JSON file after each row, and a run that was cut off goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sdquant import demo
from sdquant.utils.atomic_write import whole_file

from .fidelity import HERE, digest, machine, one_step, versions

RESULTS = HERE / "results" / "qat.json"
IMAGES, BATCH, STEPS = 200, 50, 10


@dataclass(frozen=True, kw_only=True)
class Row:
    """A rule, and whether it is run with static ranges."""

    name: str
    rules: tuple[dict[str, Any], ...]
    static: bool = False


def _row(name: str, weight: str, act: str | None = None, *, whole: bool = False, **more: bool) -> Row:
    rule: dict[str, Any] = {"weight_qtype": weight}
    if act:
        rule["act_qtype"] = act
    if whole:
        rule["disable_channelwise_axes"] = True
    return Row(name=name, rules=(rule,), **more)


ROWS = (
    _row("w8a8", "int8", "int8"),
    _row("w8a8 static", "int8", "int8", static=True),
    _row("w4a8", "int4", "int8"),
    _row("w4a8 static", "int4", "int8", static=True),
    _row("int4", "int4"),
    _row("int4 per tensor", "int4", whole=True),
    _row("int3", "int3"),
    _row("int3 per tensor", "int3", whole=True),
    _row("int2", "int2"),
    _row("int2 per tensor", "int2", whole=True),
    _row("w4a4 per tensor", "int4", "int4", whole=True),
    _row("w3a3", "int3", "int3"),
)

# Keys of a training, by model.
TRAINING: dict[str, dict[str, Any]] = {
    "digits-sd": {"max_train_steps": 300, "per_device_batch_size": 16, "learning_rate": 3e-4},
    "digits-flux": {
        "max_train_steps": 200, "per_device_batch_size": 8, "learning_rate": 3e-4, "max_sequence_length": 32,
        "guidance_min": 1.0, "guidance_max": 4.0,
    },
}  # fmt: skip


def draw(model: str, path: Path, rules: list[dict[str, Any]] | None, statistics: Path | None = None) -> tuple[int, Any]:
    """Digits right of `IMAGES`, and what the network puts out at the first step."""
    from sdquant import load_model
    from sdquant.models.generate import draw as pictures_of
    from sdquant.training import digits

    pipe = load_model(path, dtype="float32", rules=rules, quant_stats=statistics, progress=False)
    wanted = [number % 10 for number in range(IMAGES)]
    made = pictures_of(pipe, [digits.prompt(d) for d in wanted], seeds=range(IMAGES), steps=STEPS, batch=BATCH)
    seen = digits.judge().read(made)
    return sum(a == b for a, b in zip(wanted, seen, strict=True)), one_step(pipe, model)


def snr(reference: Any, output: Any) -> float | None:
    """Signal to noise of one step's output, in dB; None where nothing differs."""
    noise = float(((output - reference) ** 2).mean())
    return None if noise == 0 else round(10 * math.log10(float((reference**2).mean()) / noise), 2)


def calibrated(model: str, rules: list[dict[str, Any]], work: Path) -> Path:
    """The file of static ranges."""
    from sdquant import cli
    from sdquant.training import digits

    target, file = work / "quant_stats.safetensors", work / "rules.json"
    file.write_text(json.dumps(rules))
    prompts = [word for d in range(10) for word in ("--prompt", digits.prompt(d))]
    words = ["calibrate", model, "--rules", str(file), *prompts, "--steps", str(STEPS), "-o", str(target)]
    if cli.main(words) != 0:
        raise SystemExit(f"calibration of {model} failed")
    return target


def trained(model: str, rules: list[dict[str, Any]], work: Path) -> tuple[Path, dict[str, Any]]:
    """The model trained with rules, and what came of it."""
    from sdquant.training import config
    from sdquant.training.run import train

    keys = {
        "pretrained_model_name_or_path": model, "device": "cpu", "dataset_name": "digits", "distillation": True,
        "use_qwix_quantization": True, "rules": rules, "output_dir": str(work), "run_name": "run",
        "checkpoint_every": 0, "checkpoints_to_keep": 1, "sample_prompts": ["a handwritten seven"], "sample_steps": 1,
        "dtype": "float32", **TRAINING[model],
    }  # fmt: skip
    file = work / "train.yml"
    file.write_text("".join(f"{name}: {_yaml(value)}\n" for name, value in keys.items()))
    done = train(config.load(file, command="train"), progress=True)
    return Path(done.model), {"first_loss": done.first_loss, "loss": done.loss, "seconds": done.seconds}


def _yaml(value: Any) -> str:
    from sdquant.training.config.value_types import format_value

    return format_value(value)


def measure(model: str, row: Row, reference: tuple[int, Any]) -> dict[str, Any]:
    """One row of the results."""
    begin, path, rules = time.perf_counter(), demo.path(model), [dict(rule) for rule in row.rules]
    made: dict[str, Any] = {"model": model, "rule": row.name, "rules": rules, "images": IMAGES, "steps": STEPS}
    made["float_right"] = reference[0]
    with tempfile.TemporaryDirectory(prefix="sdquant-qat-") as folder:
        statistics = None
        if row.static:
            rules = [{**rule, "act_static_scale": True} for rule in rules]
            statistics = calibrated(model, rules, Path(folder))
        right, output = draw(model, path, rules, statistics)
        made |= {"right": right, "snr": snr(reference[1], output)}
        if right < reference[0] and not row.static:  # there is something to get back
            after, told = trained(model, rules, Path(folder))
            right, output = draw(model, after, rules)
            made |= {"qat_right": right, "qat_snr": snr(reference[1], output), "training": {**TRAINING[model], **told}}
            made["recovered"] = round((right - made["right"]) / (reference[0] - made["right"]), 3)
    return {**made, "seconds": round(time.perf_counter() - begin, 1), "digest": digest(model), "versions": versions()}


def main(argv: list[str] | None = None) -> int:
    """Measure what is missing."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m bench.qat", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=demo.MODELS, action="append")
    parser.add_argument("--only", action="append", metavar="RULE")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    kept = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    done = {(row["model"], row["rule"]): row for row in kept if row["digest"] == digest(row["model"])}
    for model in args.model or demo.MODELS:
        rows = [row for row in ROWS if (not args.only or row.name in args.only) and (model, row.name) not in done]
        reference = draw(model, demo.path(model), None) if rows else (0, np.zeros(()))
        for row in rows:
            made = measure(model, row, reference)
            done[model, row.name] = made
            told = ("rule", "right", "snr", "qat_right", "qat_snr", "seconds")
            print(model, {name: made[name] for name in told if name in made}, flush=True)
            text = json.dumps({"machine": machine(), "rows": list(done.values())}, indent=1) + "\n"
            with whole_file(args.out) as file:
                file.write(text.encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
