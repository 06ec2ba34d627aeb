"""Write a quantized model of ComfyUI as one safetensors file with the original tensor names.

If ComfyUI or Forge support the format of every packed weight (nf4, fp4, qint8), the file is written as by
`export_single_file`, so that their own loaders read it; otherwise as by `model_files`. sdquant reads both without loss.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConflictError, SettingsError
from ..formats import FORMAT_VERSION, METADATA_KEY, safetensors_writer
from ..nn import plain, quantized
from ..saving import export_single_file, model_files, next_steps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

log = logging.getLogger(__name__)

_FORBIDDEN = frozenset('<>:"|?*\\') | {chr(code) for code in range(32)} | {chr(127)}


def save(patcher: Any, prefix: str) -> Path:
    """Write the model below ComfyUI's output folder, under the next free number.

    Args:
        patcher: a model returned by `comfy_load.load`.
        prefix: beginning of the file's name, with folders, such as "diffusion_models/mine".

    Returns:
        The new file.

    Raises:
        SettingsError: the name is not valid, or the model has no packed weights.
        ConflictError: a LoRA is on the model.
    """
    import comfy.model_management  # type: ignore[import-not-found]

    from .comfy_patcher import packed_layers

    if not packed_layers(patcher.model):
        raise SettingsError(
            "Cannot save the model",
            "it has no weights that sdquant packed",
            "Load it with 'Load Diffusion Model (sdquant)', or use ComfyUI's own node for a float model",
        )
    if patcher.patches:
        raise ConflictError(
            "Cannot save a model with a LoRA on it",
            "merging the LoRA would mean quantizing the packed weights again",
            "Connect the model from before the LoRA, or keep the LoRA's own file with it",
        )
    target = target_path(prefix)
    comfy.model_management.load_models_gpu([patcher])  # with no other clone's patches on the shared weights
    tensors, metadata = contents(patcher.model.diffusion_model)
    _write(target, {**tensors, **_prediction(patcher)}, {"format": "pt", **metadata})
    log.info("%s written", target)
    return target


def _write(target: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write the file, and show on the node how far it is."""
    import comfy.utils  # type: ignore[import-not-found]

    bar = comfy.utils.ProgressBar(sum(tensor.nbytes for tensor in tensors.values()))

    def one_by_one() -> Iterator[dict[str, Tensor]]:
        for key, tensor in tensors.items():
            yield {key: tensor}
            bar.update(tensor.nbytes)

    parts = {key: safetensors_writer.part_of(tensor) for key, tensor in tensors.items()}
    safetensors_writer.write_parts(target, parts, one_by_one(), metadata)


def target_path(prefix: str) -> Path:
    """Return a new path in the output folder for a prefix.

    Raises:
        SettingsError: the prefix is outside the output folder, or is not a valid file name.
    """
    import folder_paths  # type: ignore[import-not-found]

    what = f"Cannot use the file name {prefix!r}"
    words = prefix.replace("/", " ").split()
    if not words or _FORBIDDEN & set(prefix) or ".." in prefix.split("/") or prefix.endswith("/"):
        raise SettingsError(
            what, "it is not a valid file name on every system", "Use letters, digits, '-', '_' and '/'"
        )
    output = folder_paths.get_output_directory()
    if os.path.isabs(prefix) or not _inside(output, os.path.join(output, prefix)):
        raise SettingsError(what, "it is outside ComfyUI's output folder", "Use a name inside it")
    folder, name, counter, _, _ = folder_paths.get_save_image_path(prefix, output)
    while (target := Path(folder, f"{name}_{counter:05}_.safetensors")).exists():
        counter += 1
    return target


def _inside(folder: str, path: str) -> bool:
    home = os.path.realpath(folder)
    return os.path.commonpath((home, os.path.realpath(path))) == home


def comfyui_reads(patcher: Any) -> bool:
    """Return whether ComfyUI's own loader reads the file of this model."""
    rows = dict(quantized(patcher.model.diffusion_model))
    known = all(next_steps.comfyui_reads(packed.spec.scheme.name) for packed in rows.values())
    return known and export_single_file.tensors_of(rows) is not None


def contents(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the contents of the file: tensors by key, and metadata."""
    rows, floats = dict(quantized(model)), plain(model)
    theirs = export_single_file.tensors_of(rows)
    if theirs is None:
        return model_files.written(rows.items(), floats, {})
    own = {"format": FORMAT_VERSION, "config": {}, "weights": {}}
    return {**theirs, **floats}, {METADATA_KEY: json.dumps(own, sort_keys=True)}


def _prediction(patcher: Any) -> dict[str, Tensor]:
    """Return the tensors, see `comfy_state.PREDICTIONS`, from which ComfyUI reads that a model predicts velocities."""
    import torch

    kind = getattr(getattr(patcher.model, "model_type", None), "name", None)
    if kind not in ("V_PREDICTION", "V_PREDICTION_EDM"):
        return {}
    sampling = patcher.get_model_object("model_sampling")
    if kind == "V_PREDICTION_EDM":
        return {
            f"edm_vpred.{name}": torch.tensor(float(getattr(sampling, name)), dtype=torch.float32, device="cpu")
            for name in ("sigma_max", "sigma_min")
        }
    names = ("v_pred", "ztsnr") if getattr(sampling, "zsnr", False) else ("v_pred",)
    return {name: torch.empty(0, dtype=torch.float32, device="cpu") for name in names}
