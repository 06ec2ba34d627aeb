"""What better codes bring at a large model's width: a double and a single block of FLUX.1, of random weights.

    python -m bench.full_width                       both cases; bench/results/full_width.json
    python -m bench.full_width heavy -q int4,gptq -q q4_k

Weights are drawn as in bench.outliers, and stand between FLUX.1's embedders and its last layer, 3072 wide:

* heavy: from Student's distribution with 4 degrees of freedom;
* low: the same, and a part of rank 16 with as much energy as the rest.

In both, one channel in 200 of what the layers of the blocks get is 20 times as large, since modulation makes it so.
Decibels are of the output against that of the float model, for inputs that calibration has not seen, in float32; "bits"
are all of the layers' weights for each number. Random weights rank formats; they foretell no picture.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sdquant
from bench._calibrated import AUTO, MEASURED, is_mix
from bench._calibrating_peers import layers_of
from bench._results import read, write
from bench.models import MODELS
from sdquant import backends
from sdquant.core import QuantSpec, Unfit, registry
from sdquant.models import components
from sdquant.nn import quantized
from sdquant.rules import statistics_file, with_statistics
from sdquant.training.quality_statistics import QualityCollector
from sdquant.utils.metrics import decibels

RESULTS = Path(__file__).parent / "results" / "full_width.json"
CASES, RANK, LOUD, TIMES = ("heavy", "low"), 16, 200, 20
IMAGE, TEXT, CALLS, PROBES = (8, 12), 32, 16, 4  # tokens of a call, calls of the calibration
LIMIT = 4 * 10**8  # bytes of second moments
SCHEMES = (
    "nf4", "int4", "sdnq-uint4", "sdnq-uint4,svd", "sdnq-uint4,hadamard", "sdnq-uint4,svd,hadamard", "q4_k",
    "q4_k,imatrix", "q3_k", "q3_k,imatrix", "int4,gptq", "q4_k,gptq", "sdnq-uint4,hadamard,gptq",
    "sdnq-uint4,svd,hadamard,gptq",
    *(title.format(share=share) for share in (0.28, 0.2) for title in (AUTO, MEASURED)),
)  # fmt: skip


def build(case: str, folder: Path) -> nn.Module:
    """Write a model's folder; return it in float32."""
    config = {**MODELS["flux-1.2b"].config, "num_layers": 1, "num_single_layers": 1}
    torch.manual_seed(CASES.index(case) + 1)
    model = components.empty("diffusers", config["_class_name"], config).to_empty(device="cpu").float()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        parameter.copy_(_weight(parameter, case) if parameter.ndim > 1 else torch.full_like(parameter, "norm" in name))
    for name, layer in layers_of(model).items():
        if layer.bias is not None:
            layer.bias.zero_()
        if ".norm" in name:  # modulation: shift, scale, gate, and the same again in double blocks
            scales = layer.bias.view(-1, layer.in_features)[1::3]
            scales[:, torch.randperm(layer.in_features)[: layer.in_features // LOUD]] = TIMES - 1
    model.bfloat16().save_pretrained(folder)
    return model.float().eval()


def _weight(like: Tensor, case: str) -> Tensor:
    rows, columns = like.shape
    weight = torch.randn(rows, columns)
    weight /= (torch.randn(4, rows, columns).square_().sum(0) / 4).sqrt_()  # Student's, of variance 2
    if case == "low":
        low = torch.randn(rows, RANK) @ torch.randn(RANK, columns)
        weight += low * (weight.norm() / low.norm())
    return weight * (columns**-0.5 / weight.square().mean().sqrt())


def call(model: Any, seed: int) -> dict[str, Any]:
    """Return the arguments of one call."""
    some, (height, width) = torch.Generator().manual_seed(seed), IMAGE
    axes = [torch.arange(length, dtype=torch.float32) for length in (1, height, width)]
    places = torch.stack(torch.meshgrid(axes, indexing="ij"), -1)
    return {
        "hidden_states": torch.randn(1, height * width, model.config.in_channels, generator=some),
        "encoder_hidden_states": torch.randn(1, TEXT, model.config.joint_attention_dim, generator=some),
        "pooled_projections": torch.randn(1, model.config.pooled_projection_dim, generator=some),
        "timestep": torch.rand(1, generator=some), "guidance": torch.tensor([3.5]),
        "img_ids": places.reshape(-1, 3), "txt_ids": torch.zeros(TEXT, 3), "return_dict": False,
    }  # fmt: skip


def calibrate(model: nn.Module, target: Path) -> None:
    """Write what `sdquant calibrate` collects, of calls with random inputs."""
    collector = QualityCollector({"transformer": model}, LIMIT, CALLS, PROBES)

    def draw(calls: int) -> None:
        for seed in range(calls):
            model(**call(model, seed))

    with torch.no_grad(), collector.running():
        collector.begin(lambda: draw(1), None)
        collector.image("", 0, 0)
        draw(CALLS)
    statistics_file.write_statistics(target, collector.statistics(exact=False), {})


def measure(case: str, schemes: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield a row for each scheme."""
    with tempfile.TemporaryDirectory() as work:
        folder, stats = Path(work) / "transformer", Path(work) / "stats.safetensors"
        model = build(case, folder)
        calls = [call(model, 1000 + number) for number in range(2)]
        layers = layers_of(model)
        exact, floats = _outputs(model, calls), {name: layer.weight.data.bfloat16() for name, layer in layers.items()}
        calibrate(model, stats)
        total = sum(weight.numel() for weight in floats.values())
        for scheme in schemes:
            if is_mix(scheme):
                nbytes = _mixed(layers, floats, scheme, folder, stats)
            else:
                nbytes = sum(_encoded(name, layer, floats[name], scheme, stats) for name, layer in layers.items())
            noise = float((_outputs(model, calls) - exact).square().sum())
            snr = round(decibels(float(exact.square().sum()), noise), 2)
            yield {"name": scheme, "case": case, "bits": round(8 * nbytes / total, 3), "snr": snr}


def _encoded(name: str, layer: nn.Module, weight: Tensor, scheme: str, stats: Path) -> int:
    """Put a scheme's values into a layer; return their bytes."""
    spec: QuantSpec = registry.parse(scheme)
    spec = with_statistics(spec, str(stats), "transformer") if spec.takes_statistics else spec
    try:
        packed = backends.encode(weight, spec.of(f"{name}.weight", tuple(weight.shape)))
    except Unfit:
        layer.weight.data.copy_(weight)
        return 2 * weight.numel()
    layer.weight.data = packed.spec.scheme.codec.decode(packed, torch.float32)
    return packed.nbytes


def _mixed(layers: dict[str, nn.Module], floats: dict[str, Tensor], scheme: str, folder: Path, stats: Path) -> int:
    """Put a mix's values into the layers; return their bytes."""
    share, bf16 = float(scheme.split(",")[1]), sdquant.plan(folder).bytes
    size = int(bf16 - 2 * (1 - share) * sum(weight.numel() for weight in floats.values()))
    model = sdquant.load_model(
        folder, quant="auto", size=size, quant_stats=stats if "statistics" in scheme else None, progress=False
    )
    packs, nbytes = dict(quantized(model)), 0
    for name, layer in layers.items():
        packed = packs.get(f"{name}.weight")
        nbytes += 2 * floats[name].numel() if packed is None else packed.nbytes
        layer.weight.data = (
            floats[name].float() if packed is None else packed.spec.scheme.codec.decode(packed, torch.float32)
        )
    return nbytes


@torch.no_grad()
def _outputs(model: nn.Module, calls: list[dict[str, Any]]) -> Tensor:
    return torch.cat([model(**call)[0].flatten() for call in calls])


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", choices=CASES, help="default: both")
    parser.add_argument("-q", dest="schemes", action="append", metavar="SCHEME", help="these alone (repeat)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file to keep; rows measured before stay in it")
    args = parser.parse_args()
    kept = {(row["name"], row["case"]): row for row in read(args.json)} if args.json.exists() else {}
    for case in (args.case,) if args.case else CASES:
        for row in measure(case, tuple(args.schemes or SCHEMES)):
            print(json.dumps(row), flush=True)
            kept[row["name"], case] = row
            write(args.json, "full_width", list(kept.values()))


if __name__ == "__main__":
    main()
