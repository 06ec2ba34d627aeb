"""Write a model as one safetensors file for Forge and ComfyUI: `sdquant quantize MODEL model.safetensors -q nf4`.

Tensor names are the original authors', as in GGUF files. The tensors for a weight X.weight, by scheme:

* nf4, fp4: bitsandbytes' own tensors (X.weight.absmax, ...) in blocks of 64, which Forge reads, and ComfyUI's loader
  for NF4.
* fp8: float8_e4m3fn with one scale for the weight, X.scale_weight, and one tensor `scaled_fp8` for the file. Forge
  reads only this spelling, and ComfyUI accepts it too; that the tensor has two elements tells it to multiply in full
  precision, since only weights are quantized.
* int8_convrot, int8_row, int8_tensor: ComfyUI's int8_tensorwise: int8 codes, X.weight_scale with one scale, or one per
  row, and the JSON X.comfy_quant, which the metadata repeats (`_quantization_metadata`).
* w4a4, w4a8, w6a8: ComfyUI's convrot_w4a4 and asym_w4a8_int8, of the rotated weight; and the same JSON.
* svdquant_w4a4: comfy-kitchen's, in natural order, for activations that are not shifted; and the same JSON.
* mxfp8, comfy:nvfp4: ComfyUI's, with scales in the order of tensor cores, padded; and the same JSON.
* qint8: the same as int8_row, with scales in the model's dtype.

Only linear layers are quantized, except the first and last ones of a model, by whose shapes other tools recognise it.
`save` writes every scheme and every layer, under diffusers' names, for sdquant itself and diffusers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends import COMFY_METADATA, comfy, comfy_details, comfy_entry, gguf
from ..core import LONE, Packed, PackedSpec, QuantSpec, TensorSpec, dtype_name, dtype_named, registry
from ..formats import FORMAT_VERSION, METADATA_KEY, Checkpoint, closing_files, gguf_conventions, safetensors_writer
from ..models import RoundingLoss, detect, original_names
from ..planning import NOT_QUANTIZED, make_request, planner
from ..rules import require_magnitudes, unweighed
from ..utils.progress import byte_bar
from . import original_layout

if TYPE_CHECKING:
    from torch import Tensor

    from ..formats import Given, TensorFile
    from ..models import OutputTensor

_LARGEST = 448.0  # of float8_e4m3fn
_BLOCK = 64
# ComfyUI reads the model's sizes from the shapes of these, which packed weights do not show.
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
    quant_stats: str | Path | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
    config: Given | None = None,
) -> Path:
    """Quantize one component, one weight at a time, and write it.

    Args:
        path: pipeline folder, component folder or file. Weights that are quantized already are dequantized, with a
            warning.
        quant: one of SCHEMES, without options but gptq and the rank of svdquant_w4a4. quant_stats: see `load_model`.
        target: ends in `.safetensors`. components: the one to write; default the UNet or transformer.
        on_bytes: called with the bytes read and the total; what it raises ends the writing, and nothing is left.
        config: see `load_model`.

    Returns:
        The target.

    Raises:
        DiskSpaceError: the disk is full. SdquantError: see `detect`.
    """
    from .model_files import refuse_existing

    goal = Path(target)
    refuse_existing(goal, overwrite)
    options = make_request(path, quant=quant, components=components, skip=skip, quant_stats=quant_stats, config=config)
    detected = detect(path, allow_pickle=allow_pickle, config=config)
    sources = original_layout.floats_to_quantize(detected, options, single=True, floats=floats_of)
    ((component, src),) = sources.items()
    choice = options.specs["*"]
    assert choice is not None
    spec = choice.of_component("" if component == LONE else component)
    rows = list(rows_of(src, spec, options.skip))
    if not options.skip:
        original_layout.refuse_unchanged(src, spec, any(row.spec for row in rows))
    weights = [(row.part.sources[0], row.shape) for row in rows if row.spec is not None]
    require_magnitudes(spec, weights)
    original_layout.warn_of(*unweighed(spec, weights))
    return write_rows(goal, src, rows, str(spec), options.skip, progress, on_bytes, _whole_file(spec))


def write_rows(
    goal: Path,
    src: Checkpoint,
    rows: list[FileTensor],
    what: str,
    skip: tuple[str, ...],
    progress: bool,
    on_bytes: Callable[[int, int], None] | None,
    markers: Mapping[str, TensorSpec] | None = None,
) -> Path:
    """Quantize the tensors of a file as `rows` say, one at a time, and write it; return its path.

    Args:
        what: is written, for the progress bar. markers: tensors of zeros that the file has besides.
    """
    loss, extra = RoundingLoss(), markers or {}
    parts = {key: part for row in rows for key, part in row.made.items()} | dict(extra)
    total = sum(info.nbytes for info in src.tensors.values())
    own = {"format": FORMAT_VERSION, "config": dict(src.config), "weights": {}}
    with closing_files(src.open()) as files, byte_bar(f"Writing {what}", total, progress, on_bytes) as tick:
        metadata = {"format": "pt", METADATA_KEY: json.dumps(own, sort_keys=True), **_layers(rows)}
        tensors = _tensors(rows, src, files, skip, tick, loss, extra)
        safetensors_writer.write_parts(goal, parts, tensors, metadata)
    original_layout.warn_of(loss)
    return goal


def floats_of(src: Checkpoint) -> Checkpoint:
    """Return a component as it is read before it is quantized."""
    # In GGUF files all small tensors are float32, whatever the model is.
    return original_layout.as_floats(src, (src.recorded_dtype or gguf.READ_DTYPE) if src.container == "gguf" else None)


def suits(quant: str) -> bool:
    """Return whether such a file can be written: the scheme is one of SCHEMES, without options of its format."""
    if quant.strip().lower() == NOT_QUANTIZED:
        return False
    spec = registry.parse(quant)
    of_format = [name for name, _ in spec.options if not spec.scheme.options[name].keeps_format]
    is_bare = not spec.embeddings and (not of_format or spec.scheme.calibrated)
    return is_bare and spec.scheme.name in SCHEMES


def tensors_of(rows: Mapping[str, Packed]) -> dict[str, Tensor] | None:
    """Return the file's tensors for packed weights by name, or None if one is packed differently."""
    from ..core import packed_reader

    tensors: dict[str, Tensor] = {}
    for name, packed in rows.items():
        scheme = SCHEMES.get(packed.spec.scheme.name)
        spec = QuantSpec(packed.spec.scheme)
        if scheme is None or len(packed.spec.shape) != 2 or hidden(name, spec) or _whole_file(spec):
            return None
        if spec.scheme.options:
            is_such = packed_reader.has_layout(packed)
        else:
            layout = scheme.layout(spec, packed.spec.shape, packed.spec.dtype)
            is_such = packed_reader.forms(packed) == {part: (row.dtype, row.shape) for part, row in layout.items()}
        if not is_such:
            return None
        tensors |= scheme.write(name, packed)
    return tensors


def hidden(name: str, spec: QuantSpec) -> bool:
    """Return whether a packed weight of that name would hide the model's sizes from ComfyUI."""
    return spec.scheme.name in ("nf4", "fp4") and name.endswith(_MEASURED)


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the model in the file.

    Attributes:
        part: of which tensors it is made, of this shape. spec: what it is quantized to; None for floats.
        made: the tensors that it becomes in the file.
        entry: what ComfyUI's metadata says of its layer; {} for nothing.
    """

    part: OutputTensor
    shape: tuple[int, ...]
    spec: QuantSpec | None
    made: Mapping[str, TensorSpec]
    entry: Mapping[str, Any] = field(default_factory=dict)


def float_rows(src: Checkpoint) -> Iterator[FileTensor]:
    """Yield the tensors of the file with none of them quantized."""
    shapes = {key: info.shape for key, info in src.tensors.items()}
    for part in original_layout.names(src, alone=True)[0]:
        shape, dtype = original_names.shape_of(part, shapes), original_layout.dtype_of(part, src)
        yield FileTensor(part, shape, None, {part.name: TensorSpec(dtype=dtype, shape=shape)})


def rows_of(src: Checkpoint, spec: QuantSpec, skip: tuple[str, ...]) -> Iterator[FileTensor]:
    """Yield the tensors of the file, those quantized that fit the scheme."""
    parts, row = original_layout.names(src, alone=True)
    kind = gguf_conventions.architecture(row)
    shapes = {key: info.shape for key, info in src.tensors.items()}
    typed = {key: (info.shape, info.dtype) for key, info in src.tensors.items()}
    fit = {weight.name for weight in planner.select(typed, spec, "plain", skip)[0]}
    for part in parts:
        shape, dtype = original_names.shape_of(part, shapes), original_layout.dtype_of(part, src)
        packed = spec.scheme.name in ("nf4", "fp4")
        # Rows of a fused weight can be taken out of it only where blocks end with rows.
        loose = packed and len(part.sources) > 1 and shape[-1] % _BLOCK > 0
        stays = (
            len(shape) != 2 or gguf_conventions.stays_float(part.name, shape, kind) or hidden(part.name, spec) or loose
        )
        if stays or any(source not in fit for source in part.sources):
            yield FileTensor(part, shape, None, {part.name: TensorSpec(dtype=dtype, shape=shape)})
        else:
            is_comfy = spec.scheme.backend == "comfy"
            details = comfy_details(spec.scheme.name, shape[1]) if is_comfy else {"block_size": _BLOCK}
            described = PackedSpec(scheme=spec.scheme, shape=shape, dtype=dtype, details=details)
            yield FileTensor(
                part, shape, spec, _made(part.name, described, spec), comfy_entry(described) if is_comfy else {}
            )


def _made(name: str, described: PackedSpec, spec: QuantSpec) -> dict[str, TensorSpec]:
    """Return the file's tensors for a quantized weight, from its description alone."""
    import torch

    row = SCHEMES[spec.scheme.name]
    parts = {
        part: torch.empty(form.shape, dtype=dtype_named(form.dtype), device="meta")
        for part, form in row.layout(spec, described.shape, described.dtype).items()
    }
    tensors = row.write(name, Packed(spec=described, parts=parts))
    return {key: safetensors_writer.part_of(tensor) for key, tensor in tensors.items()}


def _tensors(
    rows: list[FileTensor],
    src: Checkpoint,
    files: Mapping[Path, TensorFile],
    skip: tuple[str, ...],
    tick: Callable[[int], Any],
    loss: RoundingLoss,
    markers: Mapping[str, TensorSpec],
) -> Iterator[Mapping[str, Tensor]]:
    """Yield the file's tensors, those of one model tensor at a time."""
    import torch

    from ..models import refuse_not_finite
    from ..utils.malloc_trim import Trimmer

    trimmer = Trimmer()
    some = next((row.spec for row in rows if row.spec is not None), None)  # for messages
    for each in rows:
        tensor = original_layout.read(each.part, src, files)
        name, nbytes = each.part.name, tensor.numel() * tensor.itemsize
        if each.spec is not None:
            row = SCHEMES[each.spec.scheme.name]
            # Layers that are one here get the same inputs, and so the same magnitudes.
            mine = each.spec.of(each.part.sources[0], each.shape)
            packed = row.encode(original_layout.describe_component(each.part), tensor, mine)
            if src.origins.keys() & set(each.part.sources):
                loss.add(original_layout.read(each.part, src, files, exact=True), packed)
            yield row.write(name, packed)
            del packed
        else:
            if some is not None:
                refuse_not_finite(original_layout.describe_component(each.part), tensor, some, skip)
            yield {name: tensor}
        del tensor
        trimmer.add(nbytes)
        tick(nbytes)
    yield {
        key: torch.zeros(part.shape, dtype=getattr(torch, part.dtype), device="cpu") for key, part in markers.items()
    }


def _layout(spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> Mapping[str, TensorSpec]:
    return spec.scheme.codec.layout(spec, shape, dtype)


def _encode(name: str, tensor: Tensor, spec: QuantSpec) -> Packed:
    from ..models import quantize_weight

    return quantize_weight.encode(name, tensor, spec)


def _by_backend(name: str, packed: Packed) -> Mapping[str, Tensor]:
    return packed.spec.scheme.codec.write(name, packed)


def _for_comfy(name: str, packed: Packed) -> Mapping[str, Tensor]:
    return comfy.BACKEND.export(name, packed)


def _float8_layout(spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> Mapping[str, TensorSpec]:
    return {"codes": TensorSpec(dtype="float8_e4m3fn", shape=shape), "scale": TensorSpec(dtype="float32", shape=(1, 1))}


def _float8_encode(name: str, tensor: Tensor, spec: QuantSpec) -> Packed:
    import torch

    from ..backends import by_rows
    from ..models import require_finite

    low, high = (bound.float() for bound in torch.aminmax(tensor))
    scale = torch.maximum(-low, high) / _LARGEST
    require_finite(name, scale, spec)
    if scale == 0:
        scale = torch.ones_like(scale)
    inverse = scale.reciprocal()  # as comfy-kitchen multiplies, of float32; infinite if the scale is very small

    def codes(rows: Tensor) -> dict[str, Tensor]:
        scaled = rows.float() * inverse if inverse.isfinite() else rows.float() / scale
        return {"codes": scaled.clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)}

    shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
    layout = {"codes": _float8_layout(spec, shape, dtype)["codes"]}
    described = PackedSpec(scheme=spec.scheme, shape=shape, dtype=dtype, details={"packing": "float8"})
    return Packed(spec=described, parts={**by_rows(tensor, layout, codes), "scale": scale.view(1, 1)})


def _float8(name: str, packed: Packed) -> Mapping[str, Tensor]:
    return {name: packed.parts["codes"], name.removesuffix("weight") + "scale_weight": packed.parts["scale"].view(())}


def _int8(name: str, packed: Packed) -> Mapping[str, Tensor]:
    parts, stem = packed.parts, name.removesuffix("weight")
    scale = parts["scale"].float().reshape(-1, 1)
    return {name: parts["data"], stem + "weight_scale": scale, stem + "comfy_quant": _line("int8_tensorwise")}


def _line(kind: str) -> Tensor:
    import torch

    return torch.tensor(list(json.dumps({"format": kind}).encode()), dtype=torch.uint8, device="cpu")


def _layers(rows: list[FileTensor]) -> dict[str, str]:
    """Return the metadata entry that says of ComfyUI's layers what their tensors say; {} if there are none."""
    layers = {row.part.name.removesuffix(".weight"): row.entry for row in rows if row.entry}
    return {COMFY_METADATA: json.dumps({"format_version": "1.0", "layers": layers})} if layers else {}


def _whole_file(spec: QuantSpec) -> dict[str, TensorSpec]:
    """Return the tensors that the file has besides the model's."""
    return {"scaled_fp8": TensorSpec(dtype="float8_e4m3fn", shape=(2,))} if spec.scheme.name == "fp8" else {}


@dataclass(frozen=True)
class _Scheme:
    """Functions that write the weights of one scheme.

    Attributes:
        layout: shapes and dtypes of a packed weight's parts, as `Backend.layout`.
        encode: quantizes a name (for errors), tensor and spec to a packed weight.
        write: the file's tensors for a name and a packed weight, which may be on the meta device.
    """

    layout: Callable[[QuantSpec, tuple[int, ...], str], Mapping[str, TensorSpec]]
    encode: Callable[[str, Tensor, QuantSpec], Packed]
    write: Callable[[str, Packed], Mapping[str, Tensor]]


SCHEMES: Mapping[str, _Scheme] = {
    "nf4": _Scheme(_layout, _encode, _by_backend),
    "fp4": _Scheme(_layout, _encode, _by_backend),
    "fp8": _Scheme(_float8_layout, _float8_encode, _float8),
    "qint8": _Scheme(_layout, _encode, _int8),
    **dict.fromkeys(
        (
            "int8_convrot",
            "int8_row",
            "int8_tensor",
            "w4a8",
            "w6a8",
            "w4a4",
            "mxfp8",
            "comfy:nvfp4",
            "svdquant_w4a4",
        ),
        _Scheme(_layout, _encode, _for_comfy),
    ),
}
