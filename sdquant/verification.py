"""Look into a file's contents, not only its header: `sdquant.verify(path)`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import backends
from .backends.base import Found, Packed
from .detection import Detected, detect
from .errors import BadFileError, SdquantError

if TYPE_CHECKING:
    from torch import Tensor

    from .formats.source import Source


def verify(path: str | Path, *, progress: bool = False) -> Detected:
    """`detect`, and then read every weight: packed sizes, scales, and values that are not finite.

    Raises:
        BadFileError: the first fault, with the tensor's name.
    """
    from tqdm import tqdm

    seen = detect(path)
    total = sum(len(src.tensors) for src in seen.sources.values())
    with tqdm(total=total, desc="Verifying", disable=not progress, delay=2, leave=False, unit="tensor") as bar:
        for src in seen.sources.values():
            _verify(src, bar)
    return seen


def _verify(src: Source, bar: Any) -> None:
    files = src.open()
    try:
        for key in src.plain:
            _finite(src, key, files[src.home[key]].get(key))
            bar.update()
        for found in src.found.values():
            _weight(src, found, files)
            bar.update(len(found.keys) + len(found.extra))
    finally:
        for file in files.values():
            file.close()


def _weight(src: Source, found: Found, files: Any) -> None:
    import torch

    backend = backends.of_scheme(found.scheme)

    def get(key: str) -> Tensor:
        tensor: Tensor = files[src.home[key]].get(key)
        return tensor

    spec = src.specs.get(found.name)
    try:
        if spec is not None:
            packed = Packed(spec=spec, parts={part: get(key) for part, key in found.keys.items()})
        else:
            packed = backend.read(found, _shape(src, found), get)
        for part, tensor in packed.parts.items():
            if tensor.is_floating_point():
                _finite(src, found.keys[part], tensor)
        weight = backend.decode(packed, torch.float32)
    except SdquantError:
        raise
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
        raise _bad(src, found.name, f"its parts do not belong together: {error}") from error
    _finite(src, found.name, weight)


def _shape(src: Source, found: Found) -> tuple[int, ...]:
    """The float weight's shape as far as the file tells: that of the codes, if they are one each; (-1,) if unknown."""
    shape = found.details.get("shape")
    return tuple(shape) if shape else src.tensors[next(iter(found.keys.values()))].shape


def _finite(src: Source, name: str, tensor: Tensor) -> None:
    import torch

    if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
        raise _bad(src, name, "it has values that are not finite")


def _bad(src: Source, name: str, why: str) -> BadFileError:
    return BadFileError(f"Tensor {name!r} of {src.path} was verified", why, "Quantize or download the model again")
