"""How near a step's output is to the float model's, for each number of bytes: with what calibration knows, and not.

    python -m bench.better_codes                      both digits models; bench/results/better_codes.json
    python -m bench.better_codes digits-flux -q int4,gptq -q q4_k -q auto

Inputs of the UNet or transformer are those of whole images. Calibration sees images of twenty prompts and seeds; what
is measured are the steps of images of other seeds, and for glyphs-flux of other prompts. "bits" are all bits of the
weights of linear and convolution layers for each number, of those as well that a format leaves as they are. A format of
another library is that library's own code wherever sdquant calls it to encode (libgguf, SDNQ, NNCF, bitsandbytes,
quanto). llama.cpp's mixes (`q4_k_m`) are files with what ComfyUI-GGUF's patch of llama.cpp keeps as floats: embedders
and last layers. NNCF calibrates in its own ways by `nncf.compress_weights`, AutoRound in its own where it is installed.
"auto" is `quant="auto"` with a size of so large a share of bf16; shares above 0.28 are there for others that take more.
LPIPS is not measured: no package has its network's weights.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sdquant
from bench._calibrated import AUTO, MEASURED, STEPS, load_mix, task, write_statistics
from bench._calibrated import COMPONENTS as MODELS
from bench._calibrating_peers import autoround, has_autoround, layers_of, nncf_ways
from bench._peer_pipelines import AUTOROUND, SIDES, calls_of
from bench._pictures import path
from bench._results import read, write
from sdquant import backends, demo
from sdquant.core import QuantSpec, Unfit, gguf_mixes, registry
from sdquant.models import main_part
from sdquant.nn import quantized
from sdquant.planning import mix
from sdquant.rules import with_statistics
from sdquant.saving.export_gguf import quantize_file
from sdquant.utils.metrics import decibels

RESULTS = Path(__file__).parent / "results" / "better_codes.json"
# By size; formats of others first, without and with calibration of their own, then those that calibration improves.
SCHEMES = (
    "q4_k", "q4_k,imatrix", "q4_1", "iq4_xs", "iq4_xs,imatrix", "nf4", "comfy:nvfp4", "int4", "int4,group_size=32",
    "sdnq-uint4", "sdnq-uint4,hadamard", "sdnq-uint4,svd", "sdnq-uint4,svd,hadamard", "sdnq-uint4,dynamic",
    "q4_k_m", "q4_k_m,imatrix", "q3_k_m", "q3_k_m,imatrix",
    "q3_k", "q3_k,imatrix", "iq3_s", "iq3_s,imatrix", "iq3_xxs,imatrix",
    "sdnq-uint3", "sdnq-uint3,svd", "sdnq-uint3,dynamic", "qint3", "q2_k", "q2_k,imatrix",
    "q4_k,gptq", "iq4_xs,gptq", "nf4,gptq", "comfy:nvfp4,gptq", "int4,gptq", "int4,group_size=32,gptq",
    "sdnq-uint4,gptq", "sdnq-uint4,hadamard,gptq", "q3_k,gptq", "sdnq-uint3,gptq", "qint3,gptq", "q2_k,gptq",
    "nf4,range", "comfy:nvfp4,range", "int4,range", "sdnq-uint4,hadamard,range", "qint3,range",
    "nf4,range,gptq", "comfy:nvfp4,range,gptq", "sdnq-uint4,hadamard,range,gptq",
    "auto", "NNCF", "AutoRound",
)  # fmt: skip
SHARES = (0.28, 0.2, 0.24, 0.32, 0.38, 0.46)  # of bf16, for "auto"
PEERS = ("NNCF", "AutoRound")  # which calibrate in ways of their own


def outputs(model: nn.Module, calls: list[dict[str, Any]]) -> Tensor:
    """Return the model's outputs, float32, one after another."""
    with torch.no_grad():
        return torch.cat([model(**call)[0].float().flatten() for call in calls])


def ours(model: nn.Module, stats: Path, component: str) -> Callable[[str], float]:
    """Return what puts a scheme's values into a float32 model, and returns its bits for each weight."""
    layers = layers_of(model)
    exact = {name: layer.weight.data.clone() for name, layer in layers.items()}
    total = sum(weight.numel() for weight in exact.values())

    def put(scheme: str) -> float:
        spec: QuantSpec = registry.parse(scheme)
        if spec.takes_statistics:
            spec = with_statistics(spec, str(stats), component)
        nbytes = 0
        for name, layer in layers.items():
            weight = exact[name].bfloat16()
            try:
                packed = backends.encode(weight, spec.of(f"{name}.weight", tuple(weight.shape)))
            except Unfit:
                layer.weight.data = exact[name]
                nbytes += 2 * weight.numel()
                continue
            layer.weight.data = spec.scheme.codec.decode(packed, torch.float32)
            nbytes += packed.nbytes
        return 8 * nbytes / total

    return put


def mixes(name: str, model: nn.Module, stats: Path) -> Iterator[tuple[str, float]]:
    """Put the values of mixes of each size into a float32 model; yield their names and bits for each weight."""
    layers = layers_of(model)
    total = sum(layer.weight.numel() for layer in layers.values())
    exact = {path: layer.weight.data.clone() for path, layer in layers.items()}
    for title in (title.format(share=share) for share in SHARES for title in (AUTO, MEASURED)):
        yield title, _put(load_mix(name, title, stats, total, (MODELS[name],)), layers, exact)


def file_mixes(name: str, model: nn.Module, stats: Path, schemes: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    """The same of llama.cpp's mixes, which are files."""
    layers = layers_of(model)
    exact = {path: layer.weight.data.clone() for path, layer in layers.items()}
    for scheme in schemes:
        with tempfile.TemporaryDirectory() as folder:
            made = quantize_file(
                path(name), scheme, Path(folder) / "model", components=(MODELS[name],), progress=False,
                quant_stats=stats if registry.parse(scheme).takes_statistics else None,
            )  # fmt: skip
            yield scheme, _put(sdquant.load_model(made, progress=False), layers, exact)


def _put(pipe: Any, layers: Mapping[str, nn.Module], exact: Mapping[str, Tensor]) -> float:
    """Put a loaded model's values into layers; return its bits for each weight."""
    mixed, nbytes = dict(quantized(main_part(pipe))), 0
    for where, layer in layers.items():
        packed = mixed.get(f"{where}.weight")
        layer.weight.data = exact[where]
        nbytes += 2 * layer.weight.numel() if packed is None else packed.nbytes
        if packed is not None:
            layer.weight.data = packed.spec.scheme.codec.decode(packed, torch.float32)
    return 8 * nbytes / sum(weight.numel() for weight in exact.values())


def measure(name: str, schemes: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield a row for each scheme, and each way of the peers."""
    component = MODELS[name]
    pipe = sdquant.load_model(path(name), progress=False)
    calls = calls_of(name, pipe, main_part(pipe), 1000)[::2]
    with tempfile.TemporaryDirectory() as folder:
        stats = write_statistics(name, Path(folder) / "stats.safetensors")
        model = main_part(sdquant.load_model(path(name), progress=False)).float()
        exact = outputs(model, calls)
        put = ours(model, stats, component)

        def snr(of: nn.Module) -> float:
            return round(decibels(float(exact.square().sum()), float((outputs(of, calls) - exact).square().sum())), 2)

        if "auto" in schemes:
            mixed = main_part(sdquant.load_model(path(name), progress=False)).float()
            for title, bits in mixes(name, mixed, stats):
                yield {"name": title, "case": name, "bits": round(bits, 3), "snr": snr(mixed)}
        files = tuple(word for word in schemes if word.partition(",")[0] in gguf_mixes.BASES)
        mixed = main_part(sdquant.load_model(path(name), progress=False)).float()
        for title, bits in file_mixes(name, mixed, stats, files):
            yield {"name": title, "case": name, "bits": round(bits, 3), "snr": snr(mixed)}
        for scheme in (word for word in schemes if word not in ("auto", *PEERS, *files)):
            bits = put(scheme)
            yield {"name": scheme, "case": name, "bits": round(bits, 3), "snr": snr(model)}

    def fresh() -> nn.Module:
        return main_part(sdquant.load_model(path(name), progress=False)).float()

    peers: list[tuple[str, Any]] = []
    if "NNCF" in schemes:
        pipe = sdquant.load_model(path(name), progress=False)
        peers += nncf_ways(fresh, calls_of(name, pipe, main_part(pipe), 0))
    if "AutoRound" in schemes and has_autoround():
        peers.append((AUTOROUND, lambda: autoround(path(name), task(name).prompts, STEPS, SIDES[name])))
    for peer, make in peers:
        row: dict[str, Any] = {"name": peer, "case": name}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compressed = make()
            row |= {"bits": round(compressed.bits, 3), "snr": snr(compressed.model)}
        except Exception as error:  # another library's own failure is what there is to say of it
            row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        yield row


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=MODELS, help="default: both digits models")
    parser.add_argument("-q", dest="schemes", action="append", metavar="SCHEME", help="these alone (repeat)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file to keep; rows measured before stay in it")
    parser.add_argument(
        "--choose", action="append", default=[], metavar="SCHEME", help="let mixes choose it, too; keeps no row"
    )
    args = parser.parse_args()
    mix.FAMILIES = {**mix.FAMILIES, mix.OWN: (*mix.FAMILIES[mix.OWN], *args.choose)}
    kept = {(row["name"], row["case"]): row for row in read(args.json)} if args.json.exists() else {}
    for name in (args.model,) if args.model else demo.MODELS:
        for row in measure(name, tuple(args.schemes or SCHEMES)):
            found = row.get("error") or f"{row['bits']:5.2f} bits {row['snr']:6.2f} dB"
            print(f"{name:12} {row['name']:28} {found}", flush=True)
            if not args.choose:
                kept[row["name"], name] = row
                write(args.json, "better_codes", list(kept.values()))


if __name__ == "__main__":
    main()
