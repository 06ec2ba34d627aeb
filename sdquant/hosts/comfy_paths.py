"""ComfyUI's folders of models, with `.gguf` among the extensions."""

from __future__ import annotations

from functools import partial

from ..errors import MissingComponentError

# By our name of a kind of folder, ComfyUI's: today's, and that of older versions.
FOLDERS = {
    "sdquant_diffusion_models": ("diffusion_models", "unet"),
    "sdquant_text_encoders": ("text_encoders", "clip"),
}
EXTENSIONS = frozenset({".safetensors", ".sft", ".gguf"})


def register_folders() -> None:
    """Register ComfyUI's folders under other names, with `.gguf` among the extensions."""
    import folder_paths  # type: ignore[import-not-found]

    known = folder_paths.folder_names_and_paths
    for ours, (today, before) in FOLDERS.items():
        paths = known[today if today in known else before][0]
        known[ours] = (paths, set(EXTENSIONS))  # the same list: folders that are added later are in it


def _files(folder: str) -> list[str]:
    import folder_paths

    return list(folder_paths.get_filename_list(folder))


def _path(folder: str, name: str) -> str:
    import folder_paths

    path = folder_paths.get_full_path(folder, name)
    if path is None:
        raise MissingComponentError(
            f"Cannot load {name!r}",
            f"it is in none of ComfyUI's {FOLDERS[folder][0]} folders",
            "Put it there, and refresh",
        )
    return str(path)


diffusion_models = partial(_files, "sdquant_diffusion_models")
text_encoders = partial(_files, "sdquant_text_encoders")
diffusion_model = partial(_path, "sdquant_diffusion_models")
text_encoder = partial(_path, "sdquant_text_encoders")
