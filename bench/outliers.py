"""How exact a quantized linear layer is where weights and activations have outliers, beside the libraries' own layers.

    python -m bench.outliers                    every format; writes bench/results/outliers.json
    python -m bench.outliers --only w4a8

3072 inputs and outputs, 256 rows, bf16. The weights and activations are

* gauss: from normal distributions;
* heavy: from Student's with 4 degrees of freedom, and one input channel in 200 is 20 times as large;
* low: as heavy, and the weight has a part of rank 16 with as much energy as the rest.

SVDQuant is measured without smoothing, and with that of the magnitudes of every second row of the activations.

SNR of the output in dB, against the product of the same numbers in float64. Such matrices rank formats; they do not
foretell images, and differences below half a dB say nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench._results import read, write
from bench.linear import INTEGER, OURS
from bench.linear_peers import FAMILIES, Family, Run, comfy_kitchen_svdquant, packed, sdnq_layer, sdnq_matmul
from bench.snr import snr
from sdquant import backends
from sdquant.core.backend import Packed, QuantSpec
from sdquant.nn import quantized_layer

RESULTS = Path(__file__).parent / "results" / "outliers.json"
SIZE, ROWS, RANK = 3072, 256, 16
SMOOTHED = " smoothed"  # after the name of a scheme
_BY_NAME = {family.scheme: family for family in FAMILIES}
_SDNQ = {"sdnq": sdnq_layer, "sdnq int8 matmul": sdnq_matmul}
FORMATS: tuple[Family, ...] = (
    *(_BY_NAME[name] for name in (
        "int8_tensor", "int8_row", "int8_convrot", "mxfp8", "w6a8", "w4a8", "w4a4", "comfy:nvfp4", "nf4", "q4_k",
        "fp8", "q6_k", "q8_0",
    )),
    *(Family(name, _SDNQ) for name in (
        "sdnq-int8", "sdnq-int8,hadamard", "sdnq-uint4", "sdnq-uint4,hadamard", "sdnq-uint4,svd",
        "sdnq-uint4,hadamard,svd",
    )),
    Family("svdq-int4", {}), Family("svdq-int4" + SMOOTHED, {}),
    Family("svdq-nvfp4", {}), Family("svdq-nvfp4" + SMOOTHED, {}),
)  # fmt: skip


def layers() -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, weight [SIZE, SIZE] and activations [ROWS, SIZE] of each case, bf16."""
    torch.manual_seed(0)
    yield "gauss", (torch.randn(SIZE, SIZE) * 0.02).bfloat16(), torch.randn(ROWS, SIZE).bfloat16()
    torch.manual_seed(1)  # again, since SDNQ's SVD draws too
    student = torch.distributions.StudentT(4.0)
    weight, x = student.sample((SIZE, SIZE)) * 0.014, student.sample((ROWS, SIZE))
    x[:, torch.randperm(SIZE)[: SIZE // 200]] *= 20
    yield "heavy", weight.bfloat16(), x.bfloat16()
    torch.manual_seed(2)
    low = torch.randn(SIZE, RANK) @ torch.randn(RANK, SIZE)
    yield "low", (weight + low * (weight.norm() / low.norm())).bfloat16(), x.bfloat16()


@dataclass(frozen=True)
class _Calibrated(QuantSpec):
    """A scheme with the magnitudes of a layer's inputs."""

    found: Tensor | None = None

    def magnitudes(self, inputs: int) -> Tensor | None:
        return self.found


def _held(floats: nn.Linear, scheme: str, x: Tensor) -> Packed:
    if not scheme.endswith(SMOOTHED):
        return packed(floats, scheme)
    row = backends.scheme(scheme.removesuffix(SMOOTHED))
    return row.codec.encode(floats.weight.data, _Calibrated(row, found=x[::2].float().abs().amax(dim=0)))


def _runs(family: Family, floats: nn.Linear, x: Tensor) -> dict[str, Run]:
    held = _held(floats, family.scheme, x)
    runs = {OURS: quantized_layer(floats, held), INTEGER: quantized_layer(floats, held, compute="int8")}
    peers = {name: make(floats, family.scheme) for name, make in family.peers.items()}
    if held.spec.scheme.calibrated:
        peers["comfy-kitchen"] = comfy_kitchen_svdquant(held)
    return {**runs, **{name: run for name, run in peers.items() if run is not None}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="SCHEME", help="these formats alone (repeat)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file to keep; rows measured before stay in it")
    args = parser.parse_args()
    kept: dict[tuple[str, str], dict[str, Any]] = {}
    if args.json.exists():
        kept = {(row["name"], row["case"]): row for row in read(args.json)}
    for case, weight, x in layers():
        floats = nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16)
        floats.weight = nn.Parameter(weight, requires_grad=False)
        exact = x.double() @ weight.double().T
        for family in FORMATS:
            if args.only and family.scheme not in args.only:
                continue
            with torch.inference_mode():
                found = {who: snr(run(x), exact) for who, run in _runs(family, floats, x).items()}
            print(f"{family.scheme:26}{case:7}" + "  ".join(f"{who} {db:.1f}" for who, db in found.items()), flush=True)
            for who, db in found.items():
                name = f"{family.scheme} · {who}"
                kept[name, case] = {"name": name, "case": case, "ratio": None, "snr": db,
                                    "format": family.scheme, "who": who}  # fmt: skip
        write(args.json, "outliers", list(kept.values()))


if __name__ == "__main__":
    main()
