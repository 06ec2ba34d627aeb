"""What was tried for better codes in the same bytes, and is no option of any scheme since it makes outputs no better.

    python -m bench.left_out                          both digits models; bench/results/left_out.json

* Range search: each group of weights is clipped, before its scale is found, to the share of its range that leaves the
  least squared error, all inputs alike ("clipped") or weighed by their mean squares ("clipped by inputs"). What is
  clipped always errs to the same side, and such errors add up in a sum over many columns while others cancel.
* Bias correction: what the error of a weight makes of the mean input is taken off the layer's bias ("bias"). GPTQ has
  the mean in its second moments, so that little is left to correct.

Decibels are those of bench.better_codes, with every third of its calls.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sdquant
from bench._calibrated import COMPONENTS as MODELS
from bench._calibrated import write_statistics
from bench._calibrating_peers import layers_of
from bench._peer_pipelines import calls_of
from bench._pictures import path
from bench._results import read, write
from bench.better_codes import outputs
from sdquant import backends, demo
from sdquant.backends import _gptq
from sdquant.core import GPTQ, Packed, QuantSpec, Unfit, registry
from sdquant.models import main_part
from sdquant.rules import with_statistics
from sdquant.utils.metrics import decibels

RESULTS = Path(__file__).parent / "results" / "left_out.json"
SCHEMES = ("int4", "nf4", "qint4", "comfy:nvfp4", "sdnq-uint4", "sdnq-uint3", "qint3")
SHARES = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7, 0.6)  # of a group's range


def clipped(weight: Tensor, spec: QuantSpec, is_weighed: bool) -> Tensor | None:
    """Return the weight with each group clipped to the best of SHARES; None if its groups are not known."""
    codec = spec.scheme.codec
    form = codec.form(codec.encode(weight, spec))
    if form is None or weight.numel() % form.group:
        return None
    flat = weight.float().reshape(-1, form.group)
    moments = spec.second_moments(weight[0].numel()) if is_weighed else None
    squares = torch.ones(weight[0].numel())
    if moments is not None:
        squares = moments.diagonal(dim1=1, dim2=2).flatten()[: len(squares)]
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    least, best = torch.full((len(flat),), torch.inf), flat
    for share in SHARES:
        some = flat.clamp(low * share, high * share)
        values = codec.decode(codec.encode(some.to(weight.dtype).view(weight.shape), spec), torch.float32)
        errors = (values.reshape(len(weight), -1) - weight.float().reshape(len(weight), -1)).square() * squares
        loss = errors.reshape(-1, form.group).sum(1)
        best = torch.where((loss < least).unsqueeze(1), some, best)
        least = torch.minimum(loss, least)
    return best.to(weight.dtype).view(weight.shape)


def mean_inputs(model: nn.Module, calls: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the mean of what each row of a layer's `weight.flatten(1)` is multiplied with, over all calls."""
    sums: dict[str, list[Tensor]] = {}

    def hook(name: str) -> Any:
        def add(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs = args[0].detach()
            if isinstance(layer, nn.Conv2d):
                size, stride, padding = layer.kernel_size, layer.stride, layer.padding
                inputs = nn.functional.unfold(inputs, size, stride=stride, padding=padding).transpose(1, 2)  # type: ignore[arg-type]
            sums.setdefault(name, []).append(inputs.flatten(0, -2).mean(0))

        return add

    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers_of(model).items()]
    outputs(model, calls)
    for handle in handles:
        handle.remove()
    return {name: torch.stack(means).mean(0) for name, means in sums.items()}


def measure(name: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each scheme and each way."""
    component = MODELS[name]
    pipe = sdquant.load_model(path(name), progress=False)
    calls = calls_of(name, pipe, main_part(pipe), 1000)[::3]
    model = main_part(sdquant.load_model(path(name), progress=False)).float()
    exact, layers = outputs(model, calls), layers_of(model)
    means = mean_inputs(model, calls_of(name, pipe, main_part(pipe), 0)[::3])
    weights = {where: layer.weight.data.clone() for where, layer in layers.items()}
    biases = {where: layer.bias.data.clone() for where, layer in layers.items() if layer.bias is not None}

    def snr() -> float:
        return round(decibels(float(exact.square().sum()), float((outputs(model, calls) - exact).square().sum())), 2)

    def put(spec: QuantSpec, way: str) -> None:
        for where, layer in layers.items():
            weight = weights[where].bfloat16()
            one = spec.of(f"{where}.weight", tuple(weight.shape))
            try:
                packed = _encoded(weight, one, way)
            except Unfit:
                layer.weight.data = weights[where]
                continue
            layer.weight.data = spec.scheme.codec.decode(packed, torch.float32)
            if where in biases:
                missing = (weights[where] - layer.weight.data).flatten(1)
                layer.bias.data = biases[where] + (missing @ means[where] if way == "bias" and where in means else 0)

    with tempfile.TemporaryDirectory() as folder:
        stats = write_statistics(name, Path(folder) / "stats.safetensors")
        for scheme in (f"{scheme}{option}" for scheme in SCHEMES for option in ("", ",gptq")):
            spec = with_statistics(registry.parse(scheme), str(stats), component)
            for way in ("", "clipped", "clipped by inputs", "bias"):
                put(spec, way)
                yield {"name": f"{scheme}, {way}" if way else scheme, "case": name, "snr": snr()}


def _encoded(weight: Tensor, spec: QuantSpec, way: str) -> Packed:
    """Return the packed weight, with the scales of the clipped one where that is the way."""
    found = clipped(weight, spec, way == "clipped by inputs") if way.startswith("clipped") else None
    if found is None:
        return backends.encode(weight, spec)
    packed = spec.scheme.codec.encode(found, spec)
    form, moments = spec.scheme.codec.form(packed), spec.second_moments(weight[0].numel())
    if form is None or moments is None or moments.shape[1] == 1 or not spec[GPTQ]:
        return packed
    rows, factors = weight.flatten(1).float(), _gptq._factors(moments, form.columns)
    return _gptq._rounded(packed, form, lambda start, stop: rows[start:stop], factors)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=MODELS, help="default: both digits models")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file to keep; rows measured before stay in it")
    args = parser.parse_args()
    kept = {(row["name"], row["case"]): row for row in read(args.json)} if args.json.exists() else {}
    for name in (args.model,) if args.model else demo.MODELS:
        for row in measure(name):
            print(f"{name:12} {row['name']:36} {row['snr']:6.2f} dB", flush=True)
            kept[row["name"], name] = row
        write(args.json, "left_out", list(kept.values()))


if __name__ == "__main__":
    main()
