"""What the scripts of all hosts share: the two Pythons, the effect of a LoRA, and the table."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
SCHEMES = ("int8", "qint8", "fp8", "nf4", "int4")


def main(
    name: str,
    inside: Callable[[Path, Path, list[str]], list[dict[str, Any]]],
    write: Callable[[Path], Any] | None = None,
) -> None:
    """Make the files and run `inside(checkout, work, schemes)` with the host's Python; print its rows.

    Args:
        write: writes the files of the LoRAs into a folder; None for those of digits-sd.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tools.hosts.{name}")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--python", default=sys.executable, help="the one of the host's environment")
    parser.add_argument("--scheme", action="append", help=f"default: {', '.join(SCHEMES)}")
    parser.add_argument("--files", type=Path, help="folder of the LoRAs that an earlier run made")
    parser.add_argument("--extension", type=Path, help="checkout of somebody else's extension, where one is measured")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    schemes = args.scheme or list(SCHEMES)
    if args.inside:
        rows = inside(args.checkout, args.inside, schemes)
        (args.inside / "rows.json").write_text(json.dumps(rows))
        return
    with tempfile.TemporaryDirectory(prefix=f"sdquant-{name}-") as folder:
        work = Path(folder)
        loras = args.files or work / "made"  # not the folder that a host has them in
        if not args.files:
            from . import lora_files

            loras.mkdir()
            (write or lora_files.write)(loras)
        command = [args.python, "-m", f"tools.hosts.{name}", str(args.checkout.resolve()), "--inside", folder]
        command += [word for scheme in schemes for word in ("--scheme", scheme)]
        # besides: the folder of packages that the host would install, where its environment is to stay as it is
        paths = [str(ROOT), *filter(None, [os.environ.get("SDQUANT_PACKAGES")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SDQUANT_LORAS": str(loras.resolve())}
        if args.extension:
            environment["SDQUANT_EXTENSION"] = str(args.extension.resolve())
        subprocess.run(command, check=True, env=environment, cwd=args.checkout)
        print(table(json.loads((work / "rows.json").read_text())))


def loras() -> Path:
    """The folder with the LoRAs' files."""
    return Path(os.environ["SDQUANT_LORAS"])


def extension() -> Path:
    """The folder of somebody else's extension, which is measured."""
    if "SDQUANT_EXTENSION" not in os.environ:
        sys.exit("Say where that extension is: --extension FOLDER")
    return Path(os.environ["SDQUANT_EXTENSION"])


def ways(names: Iterable[str]) -> list[str]:
    """Those of a host's ways that are measured: all, or those in the variable SDQUANT_WAYS."""
    return os.environ.get("SDQUANT_WAYS", " ".join(names)).split()


def decoded(models: Iterable[Any]) -> list[dict[str, Any]]:
    """What the packed weights of networks stand for, by layer."""
    import torch

    from sdquant.nn import QuantizedLayer

    return [
        {
            path: layer.dequantize(torch.float32)
            for path, layer in model.named_modules()
            if isinstance(layer, QuantizedLayer)
        }
        for model in models
    ]


def put(models: Iterable[Any], weights: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write weights into float networks; returns those that were there."""
    before: list[dict[str, Any]] = []
    for model, values in zip(models, weights, strict=True):
        layers = {path: model.get_submodule(path).weight.data for path in values}
        before.append({path: layer.clone() for path, layer in layers.items()})
        for path, value in values.items():
            layers[path].copy_(value)
    return before


def row(feature: str, scheme: str, found: Tensor, expected: Tensor, **more: Any) -> dict[str, Any]:
    """How the effect of a LoRA on a quantized model is like that on the float one: [*], [*]."""
    ratio = found.double().norm() / expected.double().norm()
    return {
        "scheme": scheme, "feature": feature, "cosine": cosine(found, expected), "ratio": round(ratio.item(), 4), **more
    }  # fmt: skip


def cosine(found: Tensor, expected: Tensor) -> float:
    """The cosine of two effects: [*], [*]."""
    import torch

    one, other = found.flatten().double(), expected.flatten().double()
    cosine = torch.nn.functional.cosine_similarity(one, other, 0) if one.norm() > 0 else torch.zeros(())
    return round(cosine.item(), 5)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows, a line each."""
    return "\n".join("  ".join(f"{name}={value}" for name, value in row.items()) for row in rows)
