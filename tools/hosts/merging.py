"""Merging while a quantized model is loaded, by the function behind the web UIs' tabs, and of a quantized file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import sd_checkpoint

MODELS = ("digits", "other", "packed")
# what each web UI's function has besides, by name
_MORE = {
    "tertiary_model_name": "", "interp_method": "Weighted sum", "multiplier": 0.5, "save_as_half": False,
    "custom_name": "merged", "checkpoint_format": "safetensors", "config_source": 3, "bake_in_vae": "None",
    "discard_weights": "", "save_metadata": False, "add_merge_recipe": False, "copy_metadata_fields": False,
    "metadata_json": "{}",
}  # fmt: skip


def write(folder: Path) -> None:
    """Write a second checkpoint beside digits.safetensors, and one that is quantized."""
    from safetensors.torch import save_file

    from sdquant.saving import export_single_file

    (folder / "digits.safetensors").exists() or sd_checkpoint.write(folder / "digits.safetensors")
    save_file({key: 0.5 * value for key, value in sd_checkpoint.tensors().items()}, folder / "other.safetensors")
    export_single_file.quantize_file(
        folder / "digits.safetensors", "fp8", folder / "packed.safetensors", progress=False
    )


def row(folder: Path) -> dict[str, Any]:
    """Merge the first with each of the others: whether the result is right, and what is said of the quantized one."""
    import inspect

    import torch
    from modules import extras, sd_models  # type: ignore[import-not-found]
    from safetensors.torch import load_file

    sd_models.list_models()
    known = inspect.signature(inspect.unwrap(extras.run_modelmerger)).parameters
    more = {name: value for name, value in _MORE.items() if name in known}
    if "list" in str(known["config_source"].annotation):  # Forge Neo
        more |= {"config_source": [], "interp_method": "Weighted Sum"}

    def merged(other: str) -> Any:
        first, second = (
            next(title for title in sd_models.checkpoints_list if title.startswith(f"{name}.safetensors"))
            for name in ("digits", other)
        )
        return extras.run_modelmerger("", first, second, *(more[name] for name in known if name in more))[-1]

    said = merged("other")
    expected = {key: 0.5 * one + 0.25 * one for key, one in sd_checkpoint.tensors().items()}
    (file,) = [one for one in folder.glob("merged*.safetensors")]
    found = load_file(file)
    same = all(torch.allclose(found[key].float(), one.float(), rtol=1e-2) for key, one in expected.items())
    return {"merged": same, "said": said, "of a quantized file": merged("packed")}
