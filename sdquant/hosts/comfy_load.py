"""Load a diffusion model into ComfyUI, with its own model class and offload, but packed weights."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import compat
from ..compat import hardware
from ..core import registry
from ..errors import UnsupportedFileError
from . import comfy_state

if TYPE_CHECKING:
    from ..core import QuantSpec

log = logging.getLogger(__name__)

AS_FOUND = "as found"


def choices() -> list[str]:
    """Return the choices for quantizing on load: first "as found", then the schemes that plain layers run."""
    return [AS_FOUND, *(row.name for row in registry.schemes() if row.on_the_fly and "plain" in row.runtimes)]


def load(path: str, quant: str = AS_FOUND, disable_dynamic: bool = True) -> Any:
    """Load the diffusion model of a file, and return ComfyUI's ModelPatcher for it.

    Args:
        path: `.safetensors` or `.gguf` file, quantized or not, also a checkpoint that holds the VAE too.
        quant: one of `choices`, or a scheme with options ("nf4,double_quant").
        disable_dynamic: True; passed by ComfyUI when it loads the model again.

    Raises:
        SdquantError: the file cannot be loaded.
    """
    import comfy.model_management  # type: ignore[import-not-found]
    import comfy.sd  # type: ignore[import-not-found]
    import comfy.utils  # type: ignore[import-not-found]

    from .comfy_ops import operations
    from .comfy_patcher import packed_layers, patcher_class, refuse_to_save

    device = comfy.model_management.get_torch_device()
    spec = None if quant == AS_FOUND else registry.parse(quant)
    if spec is not None:
        _check(str(spec), "pre", device)
    src = comfy_state.source(Path(path))
    for scheme in sorted({weight.scheme for weight in src.prequantized.values()}):
        _check(scheme, "found", device)
    bar = comfy.utils.ProgressBar(comfy_state.size(src))
    state = comfy_state.read(src, spec, device, bar.update)
    log.info("%s: %d of %d tensors are packed (%s)", path, state.packed, len(state.tensors), spec or "as found")
    base_patcher = _made(comfy.sd.load_diffusion_model_state_dict, state, operations())
    if base_patcher is None:
        raise UnsupportedFileError(
            f"Cannot load {path}",
            "ComfyUI does not recognize a diffusion model by its tensor names and shapes",
            "Check with `sdquant inspect` that it is one, and update ComfyUI",
        )
    patcher = patcher_class()(base_patcher.model, base_patcher.load_device, base_patcher.offload_device)
    patcher.cached_patcher_init = (load, (path, quant))
    packed_count = len(packed_layers(patcher.model))
    _require_packed(path, state.packed, packed_count, spec)
    if packed_count:
        patcher.model.state_dict_for_saving = refuse_to_save
    return patcher


def _check(scheme: str, mode: str, device: Any) -> None:
    """Check the matrix. ComfyUI does the offload itself, and moves packed tensors like any others."""
    compat.check(scheme, "none", mode=mode, runtime="plain", device=str(device), machine=hardware.probe())


def _made(function: Any, state: comfy_state.State, ops: type) -> Any:
    """Call ComfyUI's loader with the arguments that its version accepts."""
    known = inspect.signature(function).parameters
    # Its dynamic mover keeps one tensor per weight in a buffer of its own, where the parts of a packed one do not fit.
    options = {"metadata": state.metadata, "disable_dynamic": True}
    return function(
        dict(state.tensors),
        model_options={"custom_operations": ops},
        **{name: value for name, value in options.items() if name in known},
    )


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
