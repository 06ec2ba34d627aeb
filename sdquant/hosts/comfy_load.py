"""Load a diffusion model into ComfyUI, with its own model class and offload, but packed weights."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import compat
from ..compat import hardware, requirements
from ..core import registry
from ..errors import IncompatibleError, SdquantError, UnsupportedFileError
from ..planning import statistics_arguments
from . import comfy_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..core import QuantSpec, Scheme

log = logging.getLogger(__name__)

AS_FOUND = "as found"


def choices() -> list[str]:
    """Return the choices for quantizing on load: "as found", then the schemes that plain layers run and that can be
    made with the packages that are installed. Not `rules`, which there would be none of.
    """
    versions = hardware.versions()
    rows = (row for row in registry.schemes() if row.on_the_fly and "plain" in row.runtimes and row.name != "rules")
    return [AS_FOUND, *(row.name for row in rows if _is_there(row, versions))]


def scheme_problem(quant: str) -> str | None:
    """Return why a scheme, which may have options, cannot be made here, with a way out; None if it can."""
    if quant == AS_FOUND:
        return None
    import comfy.model_management  # type: ignore[import-not-found]

    try:
        checked(quant, comfy.model_management.get_torch_device())
    except SdquantError as error:
        return str(error)
    return None


def _is_there(row: Scheme, versions: Mapping[str, str]) -> bool:
    return row.name in requirements.PACKAGE_OPTIONAL or requirements.problem(row.codec, versions) is None


def _refuse_rules(spec: QuantSpec) -> None:
    if spec.scheme.name == "rules":
        raise IncompatibleError(
            "Cannot quantize to rules in ComfyUI",
            "a node has no list of rules",
            "Choose a scheme, or use sdquant quantize",
        )


def load(path: str, quant: str = AS_FOUND, disable_dynamic: bool = True) -> Any:
    """Load the diffusion model of a file, and return ComfyUI's ModelPatcher for it.

    Args:
        path: `.safetensors` or `.gguf` file, quantized or not, also a checkpoint that holds the VAE too.
        quant: one of `choices`, or a scheme with options ("nf4,double_quant").
        disable_dynamic: True; passed by ComfyUI when it loads the model again.

    Raises:
        SdquantError: the file cannot be loaded.
    """
    import comfy.model_management
    import comfy.utils  # type: ignore[import-not-found]

    device = comfy.model_management.get_torch_device()
    spec = None if quant == AS_FOUND else checked(quant, device)
    src = comfy_state.source(Path(path))
    for scheme in sorted({weight.scheme for weight in src.prequantized.values()}):
        check_scheme(scheme, "found", device)
    bar = comfy.utils.ProgressBar(comfy_state.size(src))
    state = comfy_state.read(src, spec, device, bar.update)
    log.info("%s: %d of %d tensors are packed (%s)", path, state.packed, len(state.tensors), spec or "as found")
    patcher = patcher_of(state, path, spec)
    patcher.cached_patcher_init = (load, (path, quant))
    return patcher


def checked(quant: str, device: Any) -> QuantSpec:
    """Return the scheme that a user chose, if it can be used here.

    Raises:
        SdquantError: it cannot.
    """
    spec = registry.parse(quant)
    _refuse_rules(spec)
    statistics_arguments.require_statistics(spec)
    check_scheme(str(spec), "pre", device)
    return spec


def patcher_of(state: comfy_state.State, what: str, spec: QuantSpec | None) -> Any:
    """Return ComfyUI's patcher of the model that it makes of a state dict.

    Args:
        what: the file or model, for messages. spec: what its weights were quantized to here, if they were.

    Raises:
        UnsupportedFileError: ComfyUI knows no such model, or would dequantize most of its weights.
    """
    import comfy.sd  # type: ignore[import-not-found]

    from .comfy_ops import operations
    from .comfy_patcher import packed_layers, patcher_class, refuse_to_save

    base_patcher = _made(comfy.sd.load_diffusion_model_state_dict, state, operations())
    if base_patcher is None:
        raise UnsupportedFileError(
            f"Cannot load {what}",
            "ComfyUI does not recognize a diffusion model by its tensor names and shapes",
            "Check with `sdquant inspect` that it is one, and update ComfyUI",
        )
    patcher = patcher_class()(base_patcher.model, base_patcher.load_device, base_patcher.offload_device)
    packed_count = len(packed_layers(patcher.model))
    _require_packed(what, state.packed, packed_count, spec)
    if packed_count:
        patcher.model.state_dict_for_saving = refuse_to_save
    return patcher


def check_scheme(scheme: str, mode: str, device: Any) -> None:
    """Check the matrix. ComfyUI does the offload itself, and moves packed tensors like any others."""
    compat.check(scheme, "none", mode=mode, runtime="plain", device=str(device), machine=hardware.probe())


def _made(function: Any, state: comfy_state.State, ops: type) -> Any:
    """Call ComfyUI's loader with the arguments that its version accepts."""
    # Its dynamic mover keeps one tensor per weight in a buffer of its own, where the parts of a packed one do not fit.
    options = known_options(function, metadata=state.metadata, disable_dynamic=True)
    return function(dict(state.tensors), model_options={"custom_operations": ops}, **options)


def known_options(function: Any, **options: Any) -> dict[str, Any]:
    """Return those of the options that a function of the running ComfyUI has."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in names}


def _require_packed(path: str, total: int, packed: int, spec: QuantSpec | None) -> None:
    """Warn if ComfyUI dequantized packed weights (it rewrites them, or has other layers), and raise if most are."""
    if packed < total:
        log.warning(
            "%s: %d of its %d packed weights were dequantized, because ComfyUI rewrites them",
            path,
            total - packed,
            total,
        )
    if total and 2 * packed < total:
        raise UnsupportedFileError(
            f"Cannot load {path}{f' in {spec}' if spec is not None else ''}",
            f"ComfyUI's model keeps only {packed} of {total} weights packed, and would dequantize the others",
            "Load it with ComfyUI's own loader",
        )
