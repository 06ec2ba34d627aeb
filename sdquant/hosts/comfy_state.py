"""Read a file into a state dict for ComfyUI: original tensor names, and a `PackedTensor` for each packed weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import FLOATS, LONE, Packed, TensorInfo, Unfit, dtype_name, dtype_named
from ..errors import BadFileError, UnsupportedFileError
from ..formats import Checkpoint, gguf_conventions, main_dtype, model_families
from ..models import OutputTensor, detection, original_names
from ..planning import planner
from ..saving import export_single_file, original_layout

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import QuantSpec
    from ..formats import Family, TensorFile
    from .comfy_ops import ComfyPackedTensor


# Tensors beside an SDXL's diffusion model by which ComfyUI knows what it predicts; two of them have no elements.
PREDICTIONS = ("v_pred", "ztsnr", "edm_vpred.sigma_max", "edm_vpred.sigma_min", "edm_mean", "edm_std")


@dataclass(frozen=True, kw_only=True)
class State:
    """A state dict for ComfyUI.

    Attributes:
        tensors: by their original names.
        packed: number of packed tensors.
        metadata: the file's, from which ComfyUI reads the sizes of some models.
    """

    tensors: dict[str, Tensor]
    packed: int
    metadata: Mapping[str, str] | None


def source(path: Path, component: str | None = None) -> Checkpoint:
    """Return the diffusion model of a file, which may be a checkpoint of several models, or another component of a file
    of its own.

    Raises:
        SdquantError: see `detect`. UnsupportedFileError: it is a LoRA or a folder, or no such component.
    """
    detected = detection.read_headers(path, find_classes=False)
    if set(detected.sources) != {LONE} or path.is_dir():
        raise UnsupportedFileError(f"Cannot load {path}", "it is a folder", "Pick one .safetensors or .gguf file")
    original_layout.chosen(detected, None, single=True)  # refuses a LoRA
    if component is not None and detected.component not in (component, None):
        raise UnsupportedFileError(
            f"Cannot load {path} as {component.replace('_', ' ')}",
            f"it is a {detected.component.replace('_', ' ')} ({detected.family})",
            "Pick another file, or load this one with the node that is for it",
        )
    whole = detected.sources[LONE]
    src = original_layout.main_only(whole)
    there = [key for key in PREDICTIONS if key in whole.tensors]
    src = replace(
        src,
        tensors={**src.tensors, **{key: whole.tensors[key] for key in there}},
        home={**src.home, **{key: whole.home[key] for key in there}},
    )
    weights = {name: row for name, row in src.prequantized.items() if set(row.keys.values()) <= set(src.tensors)}
    return replace(src, prequantized=weights)


def size(src: Checkpoint) -> int:
    """Return the total number of bytes that `read` reports to `tick`."""
    return sum(info.nbytes for info in src.plain.values()) + sum(
        src.prequantized_bytes(name) for name in src.prequantized
    )


def read(src: Checkpoint, spec: QuantSpec | None, device: Any, tick: Callable[[int], Any]) -> State:
    """Read the state dict of a diffusion model.

    Args:
        spec: to quantize its float weights to; None leaves all as found.
        device: to quantize on.
        tick: called with the bytes of each tensor; see `size`.

    Raises:
        ConflictError: the weights are quantized already. BadFileError, UnsupportedFileError: the file, or the weights.
    """
    from .comfy_ops import ComfyPackedTensor

    if spec is not None:
        original_layout.refuse_quantized(src, spec)
    files = src.open()
    try:
        packs = {name: _packed(src, files, name) for name in src.prequantized}
        whole = _logical(src, packs)
        parts, row = original_layout.names(whole, alone=True)
        to_quantize = _chosen(whole, parts, row, spec) if spec is not None else frozenset()
        tensors: dict[str, Tensor] = {}
        for part in parts:
            if any(source in packs for source in part.sources):
                tensors[part.name] = _shown(_joined(src, part, packs), src)
            elif part.name in to_quantize and spec is not None:
                tensors[part.name] = ComfyPackedTensor(
                    _encoded(part, original_layout.read(part, whole, files), spec, device)
                )
            else:
                tensors[part.name] = _plain(part, original_layout.read(part, whole, files), spec)
            tick(sum(whole.tensors[source].nbytes for source in part.sources))
    finally:
        for file in files.values():
            file.close()
    config = src.metadata.get("config")
    packed = sum(isinstance(tensor, ComfyPackedTensor) for tensor in tensors.values())
    return State(tensors=tensors, packed=packed, metadata={"config": config} if isinstance(config, str) else None)


def quantize_tensors(tensors: Mapping[str, Tensor], spec: QuantSpec, device: Any, tick: Callable[[int], Any]) -> State:
    """Quantize the float weights of a diffusion model that ComfyUI has loaded.

    Args:
        tensors: by ComfyUI's names, without the name of the model before them.
        device: to quantize on. tick: called with the bytes of each tensor.

    Raises:
        IncompatibleError: no weight fits the scheme. BadFileError: values that are no numbers.
    """
    from .comfy_ops import ComfyPackedTensor

    infos = {
        name: TensorInfo(dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), nbytes=tensor.nbytes)
        for name, tensor in tensors.items()
    }
    src = Checkpoint(path=Path("the model"), files=(), tensors=infos, home={}, prequantized={})
    parts = [OutputTensor(name, (name,)) for name in tensors]
    to_quantize = _chosen(src, parts, model_families.recognise(src.names), spec)
    done: dict[str, Tensor] = {}
    for part in parts:
        tensor = tensors[part.name]
        if part.name in to_quantize:
            done[part.name] = ComfyPackedTensor(_encoded(part, tensor, spec, device))
        else:
            done[part.name] = _plain(part, tensor, spec)
        tick(tensor.nbytes)
    return State(tensors=done, packed=len(to_quantize), metadata=None)


def _packed(src: Checkpoint, files: Mapping[Path, TensorFile], name: str) -> Packed:
    from ..core import read_weight, require_sound

    weight = src.prequantized[name]
    try:
        packed = read_weight(weight, src.specs.get(name), None, lambda key: src.read(files, key))
        require_sound(weight, packed)
    except BadFileError as error:
        raise BadFileError(f"Cannot load {src.path}: {error.inner}", error.why, error.fix) from error
    except (Unfit, NotImplementedError) as error:
        raise UnsupportedFileError(
            f"Cannot load {src.path}",
            f"weight {name!r} is quantized to {weight.scheme}, and the file does not record its shape: {error}",
            "Quantize the float model instead",
        ) from error
    return packed


def _logical(src: Checkpoint, packs: Mapping[str, Packed]) -> Checkpoint:
    """Return the source as if its weights were floats, to derive the original names from names and shapes."""
    infos = dict(src.plain)
    for name, packed in packs.items():
        infos[name] = TensorInfo(dtype=packed.spec.dtype, shape=packed.spec.shape, nbytes=packed.nbytes)
    home = {key: src.home.get(key, src.files[0]) for key in infos}
    return replace(src, tensors=infos, home=home, prequantized={}, specs={})


def _chosen(src: Checkpoint, parts: list[OutputTensor], row: Family | None, spec: QuantSpec) -> frozenset[str]:
    """Return the names of the weights to quantize: not those of the first and last layers, and not embeddings."""
    kind = gguf_conventions.architecture(row)
    shapes = {key: info.shape for key, info in src.tensors.items()}
    typed = {key: (info.shape, info.dtype) for key, info in src.tensors.items()}
    fit = {weight.name for weight in planner.select(typed, spec, "plain", ())[0]}

    def suits(part: OutputTensor) -> bool:
        shape = original_names.shape_of(part, shapes)
        stays = gguf_conventions.stays_float(part.name, shape, kind) or export_single_file.hidden(part.name, spec)
        return not stays and all(key in fit for key in part.sources)

    names = frozenset(part.name for part in parts if suits(part))
    original_layout.refuse_unchanged(src, spec, bool(names))
    return names


def _encoded(part: OutputTensor, tensor: Tensor, spec: QuantSpec, device: Any) -> Packed:
    from ..models import quantize_weight

    return quantize_weight.encode(original_layout.describe_component(part), tensor.to(device), spec).to(tensor.device)


def _plain(part: OutputTensor, tensor: Tensor, spec: QuantSpec | None) -> Tensor:
    import torch

    from ..models import refuse_not_finite

    if spec is not None:
        refuse_not_finite(original_layout.describe_component(part), tensor, spec, ())
    # Nothing computes in float8.
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def _joined(src: Checkpoint, part: OutputTensor, packs: Mapping[str, Packed]) -> Packed:
    """Return the packed weight of ComfyUI's model that corresponds to one or several weights of the file.

    Raises:
        UnsupportedFileError: packed weights of this scheme cannot be joined.
    """
    from ..core import packed_rows

    weights = [packs[source] for source in part.sources if source in packs]
    packed = packed_rows.join(weights) if len(weights) == len(part.sources) else None
    if packed is not None and part.swapped:
        packed = _swapped(packed)
    if packed is None or (part.shape is not None and packed.spec.shape != part.shape):
        raise UnsupportedFileError(
            f"Cannot load {src.path}",
            f"ComfyUI has one weight {part.name!r} for its {' and '.join(map(repr, part.sources))}, and packed weights "
            f"in {weights[0].spec.scheme} cannot be joined like that",
            "Load the float model and quantize it on load, or write it with `sdquant quantize`",
        )
    return packed


def _shown(packed: Packed, src: Checkpoint) -> ComfyPackedTensor:
    """Wrap a packed weight as a tensor, with the dtype that ComfyUI should compute in.

    ComfyUI chooses its compute dtype by the dtypes of the tensors. Some formats do not record that of the float weight
    (they say float32): then it is the dtype of most bytes of the unquantized tensors.
    """
    from .comfy_ops import ComfyPackedTensor

    dtype = packed.spec.dtype
    if dtype == "float32":
        dtype = main_dtype(src, dtypes=FLOATS) or dtype
    return ComfyPackedTensor(packed, dtype_named(dtype))


def _swapped(packed: Packed) -> Packed | None:
    """Swap the first and the second half of the rows; None if the scheme cannot slice rows."""
    from ..core import packed_rows

    backend = packed.spec.scheme.codec
    loose = backend.cuttable(packed)
    half, rows = packed.spec.shape[0] // 2, packed.spec.shape[0]
    return packed_rows.cut(loose, [(half, rows), (0, half)]) if backend.by_row(loose) else None
