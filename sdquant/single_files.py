"""Write a model as one safetensors file that Forge and ComfyUI read: `sdquant quantize MODEL model.safetensors -q nf4`.

Names are the authors', as in GGUF files. What stands for a weight X.weight, by scheme:

* nf4, fp4: bitsandbytes' own tensors (X.weight.absmax, ...) in blocks of 64, which Forge reads, and ComfyUI's loader
  for NF4.
* fp8: float8_e4m3fn with one scale for the weight, X.scale_weight, and one tensor `scaled_fp8` for the file. Forge
  knows no other spelling, and ComfyUI takes this one too; that the tensor has two numbers tells it to multiply in full
  precision, since only weights were quantized.
* qint8: ComfyUI's int8_tensorwise: int8 codes, X.weight_scale for each row, and the line of JSON X.comfy_quant.

Only linear layers are quantized, and not those at the ends of a model; other tools look at their shapes to tell which
model it is. `save` writes every scheme and every layer, under diffusers' names, for sdquant itself and diffusers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from . import authors, backends, planner
from .backends.base import QuantSpec
from .detection import detect
from .formats import gguf_conventions, reference, safetensors
from .formats.source import FORMAT_VERSION, METADATA_KEY, Source
from .request import NOT_QUANTIZED, request

if TYPE_CHECKING:
    from torch import Tensor

    from .formats.reference import Written

_LARGEST = 448.0  # of float8_e4m3fn
_BLOCK = 64
# Of these ComfyUI reads the model's sizes, which packed weights do not show.
_MEASURED = (".transformer_blocks.0.attn2.to_k.weight",)


def quantize_file(
    path: str | Path,
    quant: str,
    target: str | Path,
    *,
    components: tuple[str, ...] | list[str] | None = None,
    skip: tuple[str, ...] = (),
    overwrite: bool = False,
    allow_pickle: bool = False,
    progress: bool = True,
) -> Path:
    """Quantize one component, one weight at a time, and write it.

    Args:
        path: pipeline folder, component folder or file with float weights.
        quant: one of SCHEMES, without options.
        target: ends in `.safetensors`. components: the one to write; default the UNet or transformer.

    Returns:
        The target.

    Raises:
        ConflictError: the weights are quantized already. DiskSpaceError: there is no room. SdquantError: see `detect`.
    """
    from .saving import refuse_existing
    from .writing import require_space

    goal = Path(target)
    refuse_existing(goal, overwrite)
    spec = backends.parse(quant)
    asked = request(path, quant=quant, components=components, skip=skip)
    (src,) = authors.chosen(detect(path, allow_pickle=allow_pickle), asked.components, single=True).values()
    authors.refuse_quantized(src, spec)
    parts = list(_parts(src, spec, asked.skip))
    require_space(goal, sum(nbytes for _, _, nbytes in parts))  # before the work, not after it
    total = sum(info.nbytes for info in src.tensors.values())
    tensors: dict[str, Tensor] = {}
    files = src.open()
    try:
        with authors.bar(total, spec, progress) as tick:
            for part, quantized, _ in parts:
                tensor = authors.read(part, src, files)
                tick(tensor.numel() * tensor.itemsize)
                tensors |= SCHEMES[spec.scheme.name](part.name, tensor, spec) if quantized else {part.name: tensor}
        tensors |= _whole_file(spec)
        own = {"format": FORMAT_VERSION, "config": dict(src.config), "weights": {}}
        safetensors.write(goal, tensors, {"format": "pt", METADATA_KEY: json.dumps(own, sort_keys=True)})
    finally:
        for file in files.values():
            file.close()
    return goal


def suits(quant: str) -> bool:
    """Whether such a file can be written: the scheme is one of SCHEMES, as it is without options."""
    if quant.strip().lower() == NOT_QUANTIZED:
        return False
    spec = backends.parse(quant)
    return spec == QuantSpec(spec.scheme) and spec.scheme.name in SCHEMES


def _parts(src: Source, spec: QuantSpec, skip: tuple[str, ...]) -> Iterator[tuple[Written, bool, int]]:
    """The tensors to write, whether each is to be quantized, and about how many bytes it will take."""
    parts, row = authors.names(src, alone=True)
    kind = gguf_conventions.architecture(row)
    shapes = {key: info.shape for key, info in src.tensors.items()}
    typed = {key: (info.shape, info.dtype) for key, info in src.tensors.items()}
    fit = {weight.name: weight.bytes for weight in planner.select(typed, spec, "plain", skip)[0]}
    for part in parts:
        shape = reference.shape_of(part, shapes)
        packed = spec.scheme.name in ("nf4", "fp4")
        # Rows of a fused weight can be taken out of it only where blocks end with rows.
        loose = packed and len(part.sources) > 1 and shape[-1] % _BLOCK > 0
        stays = (
            len(shape) != 2
            or gguf_conventions.stays_float(part.name, shape, kind)
            or (packed and part.name.endswith(_MEASURED))
            or loose
        )
        quantized = not stays and all(source in fit for source in part.sources)
        yield part, quantized, sum(fit[key] if quantized else src.tensors[key].nbytes for key in part.sources)


def _bitsandbytes(name: str, tensor: Tensor, spec: QuantSpec) -> Mapping[str, Tensor]:
    from .encoding import encode

    return backends.get("bnb").write(name, encode(name, tensor, spec))


def _float8(name: str, tensor: Tensor, spec: QuantSpec) -> Mapping[str, Tensor]:
    import torch

    from .encoding import require_finite

    wide = tensor.float()
    scale = wide.abs().amax() / _LARGEST
    require_finite(name, scale, spec)
    if scale == 0:
        scale = torch.ones_like(scale)
    codes = (wide / scale).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return {name: codes, name.removesuffix("weight") + "scale_weight": scale}


def _int8(name: str, tensor: Tensor, spec: QuantSpec) -> Mapping[str, Tensor]:
    from .encoding import encode

    parts, stem = encode(name, tensor, spec).parts, name.removesuffix("weight")
    scale = parts["scale"].float().reshape(-1, 1)
    return {name: parts["data"], stem + "weight_scale": scale, stem + "comfy_quant": _line("int8_tensorwise")}


def _line(kind: str) -> Tensor:
    import torch

    return torch.tensor(list(json.dumps({"format": kind}).encode()), dtype=torch.uint8)


def _whole_file(spec: QuantSpec) -> Mapping[str, Tensor]:
    import torch

    return {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)} if spec.scheme.name == "fp8" else {}


# How a weight is written: its name, the float weight, the scheme -> the file's tensors.
SCHEMES: Mapping[str, Callable[[str, Tensor, QuantSpec], Mapping[str, Tensor]]] = {
    "nf4": _bitsandbytes, "fp4": _bitsandbytes, "fp8": _float8, "qint8": _int8,
}  # fmt: skip
