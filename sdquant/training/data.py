"""Pictures and their captions: a folder, or the digits that the shipped models were trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BackendUnavailableError, BadFileError, SettingsError
from ..utils.install import install_packages

if TYPE_CHECKING:
    from torch import Tensor

    from .settings import TrainingSettings

METADATA = "metadata.jsonl"  # the name that Hugging Face's datasets read in a folder of pictures
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


@dataclass(frozen=True, kw_only=True)
class Example:
    """A picture that is read when it is needed.

    Attributes:
        name: of the picture in errors.
        captions: one of them is chosen at random each time the picture is used.
        pixels: side in pixels -> float32 [3, side, side], -1 to 1.
    """

    name: str
    captions: tuple[str, ...]
    pixels: Callable[[int], Tensor]


def examples(settings: TrainingSettings) -> list[Example]:
    """Return the training examples.

    Raises:
        SettingsError: no folder, or no picture in it. BadFileError: a picture without a caption, or metadata that
            cannot be read. Pictures themselves are opened later.
        BackendUnavailableError: a package is missing.
    """
    _need("PIL", "pillow")
    _need("matplotlib", "matplotlib")
    if settings.dataset_name == "digits":
        _need("sklearn", "scikit-learn")
        return _digits()
    return folder(Path(settings.train_data_dir), settings.caption_column)


def _need(module: str, package: str) -> None:
    import importlib.util

    if importlib.util.find_spec(module) is None:
        raise BackendUnavailableError(
            "Cannot train", f"training needs {package}, which is not installed", f"Run: {install_packages(package)}"
        )


def folder(place: Path, column: str) -> list[Example]:
    """List the pictures below a folder. Captions are in metadata.jsonl, or each in a .txt next to its picture."""
    if not place.is_dir():
        raise SettingsError(f"Cannot train on {place}", "it is not a folder", "Use a folder of pictures")
    listed = place / METADATA
    pairs = _listed(listed, column) if listed.exists() else _beside(place)
    if not pairs:
        raise SettingsError(
            f"Cannot train on {place}",
            f"it contains no pictures ({', '.join(ENDINGS)})",
            f"Put pictures there, with {METADATA} or a .txt next to each",
        )
    return [Example(name=str(path), captions=(caption,), pixels=partial(_opened, path)) for path, caption in pairs]


def _listed(file: Path, column: str) -> list[tuple[Path, str]]:
    pairs = []
    fix = f'Write lines such as {{"file_name": "one.png", "{column}": "a caption"}}'
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise BadFileError(f"Cannot read {file}", f"it is not UTF-8: {error.reason}", fix) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        what = f"Cannot read line {number} of {file}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadFileError(what, f"it is not JSON: {error}", fix) from error
        if not isinstance(row, dict):
            raise BadFileError(what, "it is not a JSON object", fix)
        for key in ("file_name", column):
            if not isinstance(row.get(key), str):
                raise BadFileError(what, f"it has no string {key!r}; its keys are {', '.join(row) or 'none'}", fix)
        path = file.parent / row["file_name"]
        if not path.is_file():
            raise BadFileError(what, f"there is no file {path}", "Add that file, or remove the line")
        pairs.append((path, row[column]))
    return pairs


def _beside(place: Path) -> list[tuple[Path, str]]:
    pairs = []
    for path in sorted(place.rglob("*")):
        if path.suffix.lower() not in ENDINGS or not path.is_file():
            continue
        caption = path.with_suffix(".txt")
        if not caption.is_file():
            raise BadFileError(
                f"Cannot train on {path}",
                f"it has no caption: there is neither {caption.name} next to it nor {METADATA} in {place}",
                "Add one of them; an empty .txt is an empty caption",
            )
        try:
            pairs.append((path, caption.read_text(encoding="utf-8").strip()))
        except UnicodeDecodeError as error:
            raise BadFileError(f"Cannot read {caption}", "it is not UTF-8", "Save it as UTF-8") from error
    return pairs


def _opened(path: Path, side: int) -> Tensor:
    """Read a picture, scale its shorter side to `side` pixels and crop the centre: float32 [3, side, side], -1 to 1.

    Raises:
        BadFileError: it cannot be decoded.
    """
    from PIL import Image, ImageOps

    from ..utils.picture_files import as_seen

    try:
        with Image.open(path) as file:
            picture = as_seen(file)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadFileError(
            f"Cannot train on {path}", f"it cannot be read as a picture: {error}", "Replace or remove it"
        ) from error
    return _values(ImageOps.fit(picture, (side, side), Image.Resampling.LANCZOS))


def _values(picture: Any) -> Tensor:
    import numpy as np
    import torch

    levels = torch.from_numpy(np.array(picture, dtype=np.float32))
    return levels.permute(2, 0, 1) / 127.5 - 1


def _digits() -> list[Example]:
    """Return half B of scikit-learn's digits, scaled as in `tools.digits_models.train`, with all prompts for each."""
    import torch

    from . import digits

    half = digits.halves()[1]
    pixels = torch.tensor(half.pixels, dtype=torch.float32, device="cpu").reshape(-1, 1, 8, 8) / 16
    return [
        Example(
            name=f"digits/{number}",
            captions=tuple(digits.prompt(int(label), t) for t in range(len(digits.TEMPLATES))),
            pixels=partial(_enlarged, small),
        )
        for number, (small, label) in enumerate(zip(pixels, half.labels, strict=True))
    ]


def _enlarged(small: Tensor, side: int) -> Tensor:
    from torch.nn.functional import interpolate

    large = interpolate(small[None], size=(side, side), mode="bicubic", align_corners=False)[0].clamp(0, 1)
    return large.expand(3, -1, -1) * 2 - 1
