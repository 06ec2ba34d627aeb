"""What a LoRA does to every scheme's model, held against what it does to the unquantized one.

    python -m bench.lora                       every scheme, on both models
    python -m bench.lora --only nf4 --model digits-sd

A LoRA is trained on the unquantized model for a minute: asked for a seven, draw a three. Its file is loaded onto the
model in each scheme by `pipe.load_lora_weights`. With d = output with the LoRA - output without it, of the UNet or
transformer, at the inputs of whole drawings, float32:
    cosine   of d in the scheme and d unquantized     ratio   of their lengths
    threes   of the images asked to be sevens, how many the judge reads as threes, without and with the LoRA
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from sdquant import backends, demo, load_model, lora
from sdquant.models.components import quiet
from sdquant.models.pipelines import main_part

from .fidelity import machine, schemes, versions

RESULTS = Path(__file__).parent / "results" / "lora.json"
ASKED, DRAWN = 7, 3
SEEDS, STEPS = range(4), 8


@dataclass(frozen=True)
class Call:
    """One call of the UNet or transformer: its inputs, which are latents, and the rest, which comes from the prompt."""

    latents: Any
    rest: dict[str, Any]

    def run(self, model: Any, rest: dict[str, Any] | None = None) -> Any:
        """The output; `rest`: another prompt's."""
        return model(self.latents, **(rest or self.rest), return_dict=False)[0]


def calls(pipe: Any, digit: int) -> list[Call]:
    """All calls that drawing a digit makes, one a step."""
    from sdquant.models.generate import draw
    from sdquant.training import digits

    names = ("hidden_states",) if hasattr(pipe, "transformer") else ("sample", "timestep")
    kept = ("timestep", "guidance", "pooled_projections", "encoder_hidden_states", "txt_ids", "img_ids")
    caught = []

    def keep(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        all_of = {**dict(zip(names, args, strict=False)), **given}
        rest = {name: all_of[name].clone() for name in kept if all_of.get(name) is not None}
        caught.append(Call(all_of[names[0]].clone(), rest))

    handle = main_part(pipe).register_forward_pre_hook(keep, with_kwargs=True)
    try:
        draw(pipe, [digits.prompt(digit)] * len(SEEDS), seeds=SEEDS, steps=STEPS)
    finally:
        handle.remove()
    return caught


def teach(pipe: Any, path: Path, steps: int = 80, rank: int = 4) -> list[float]:
    """Train the LoRA on a pipeline, quantized or not, and write it; the loss of each step. It stays on the pipeline."""
    import torch

    model = main_part(pipe)
    asked, drawn = calls(pipe, ASKED), calls(pipe, DRAWN)
    pairs = [(Call(at.latents, a.rest), d.rest) for a, d in zip(asked, drawn, strict=True) for at in (a, d)]
    with torch.no_grad():
        goals = [call.run(model, rest) for call, rest in pairs]
    torch.manual_seed(0)
    parameters = lora.add_lora(model, rank=rank)
    optimizer = torch.optim.AdamW(parameters, lr=5e-3, weight_decay=0.0)
    order = torch.randint(len(pairs), (steps,), generator=torch.Generator().manual_seed(0)).tolist()
    losses = []
    for index in order:
        loss = (pairs[index][0].run(model) - goals[index]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    lora.save_lora(pipe, path)
    return losses


def effect(pipe: Any, path: Path, at: list[Call]) -> Any:
    """Output with the LoRA - output without it, float32 [all of it]; the LoRA stays on."""
    import torch

    model = main_part(pipe)
    with torch.no_grad():
        before = torch.cat([call.run(model).flatten() for call in at])
        with quiet():
            pipe.load_lora_weights(str(path))
        return torch.cat([call.run(model).flatten() for call in at]) - before


def compare(one: Any, other: Any) -> tuple[float, float]:
    """Cosine of two effects, and the length of `one` over that of `other`."""
    import torch

    cosine = torch.nn.functional.cosine_similarity(one.double(), other.double(), 0)
    return float(cosine), float(one.norm() / other.norm())


def load(model: str, scheme: str | None, work: Path, runtime: str | None = None) -> Any:
    """The pipeline in float32 beside what is quantized; a GGUF scheme is written to files first."""
    if scheme is None or backends.parse(scheme).scheme.on_the_fly:
        return load_model(demo.path(model), scheme, runtime=runtime, dtype="float32", progress=False)
    from sdquant.saving.export_gguf import quantize_file

    source = quantize_file(demo.path(model), scheme, work / scheme, progress=False)
    return load_model(source, dtype="float32", progress=False)


def threes(pipe: Any, images: int) -> int:
    """How many of the images that are asked to be sevens show a three."""
    from sdquant.models.generate import draw
    from sdquant.training import digits

    seeds = range(100, 100 + images)
    return digits.judge().read(draw(pipe, [digits.prompt(ASKED)] * images, seeds=seeds, steps=10)).count(DRAWN)


def measure(model: str, wanted: list[str], images: int, work: Path) -> Iterator[dict[str, Any]]:
    """The rows of one model, that of the unquantized one first."""
    from tqdm import tqdm

    path = work / "lora.safetensors"
    pipe = load(model, None, work)
    at, losses = calls(pipe, ASKED), teach(pipe, path)
    reference = None
    for scheme in tqdm([None, *wanted], desc=model, unit="scheme", disable=None):
        pipe = load(model, scheme, work)
        without = threes(pipe, images)
        found = effect(pipe, path, at)
        reference = found if reference is None else reference
        cosine, ratio = compare(found, reference)
        row = {"model": model, "scheme": scheme, "cosine": round(cosine, 5), "ratio": round(ratio, 4)}
        row |= {"images": images, "threes_without": without, "threes_with": threes(pipe, images)}
        if scheme is None:
            row |= {"loss_first": losses[0], "loss_last": losses[-1], "file_bytes": path.stat().st_size}
        yield row


def main() -> None:
    """Parse, measure what the file does not have yet, write after each scheme, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20, help="images a scheme (default: %(default)s)")
    parser.add_argument("--only", action="append", metavar="SCHEME", help="only this scheme (repeat for several)")
    parser.add_argument("--model", choices=demo.MODELS, help="only this model")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: %(default)s")
    args = parser.parse_args()
    packages = versions() | {"peft": metadata.version("peft")}
    stored = json.loads(args.out.read_text()) if args.out.exists() else {"versions": packages, "rows": []}
    kept = stored["rows"] if stored["versions"] == packages else []
    rows = {(row["model"], row["scheme"]): row for row in kept if row["images"] == args.images}
    for model in [args.model] if args.model else list(demo.MODELS):
        with tempfile.TemporaryDirectory(prefix="sdquant-lora-") as work:
            wanted = [scheme for scheme in args.only or schemes() if (model, scheme) not in rows]
            for row in measure(model, wanted, args.images, Path(work)):
                rows[row["model"], row["scheme"]] = row
                write(args.out, rows, packages)
    for row in rows.values():
        told = f"{row['model']:12}{row['scheme'] or 'none':20}{row['cosine']:9.5f}{row['ratio']:8.3f}"
        print(f"{told}{row['threes_without']:6} -> {row['threes_with']} of {row['images']}")


def write(out: Path, rows: dict[tuple[str, str | None], dict[str, Any]], packages: dict[str, str]) -> None:
    """The file, the rows in the order of the schemes."""
    order = {name: number for number, name in enumerate([None, *schemes()])}
    rest = len(order)
    made = sorted(rows.values(), key=lambda row: (row["model"], order.get(row["scheme"], rest)))
    beside = out.with_name(f".{out.name}.tmp")
    beside.write_text(json.dumps({"machine": machine(), "versions": packages, "rows": made}, indent=1) + "\n")
    beside.replace(out)


if __name__ == "__main__":
    main()
