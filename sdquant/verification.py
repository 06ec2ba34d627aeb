"""Look into a file's contents, not only its header: `sdquant.verify(path)`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import backends
from .backends.base import Found, Packed, Unfit
from .detection import Detected, detect
from .errors import BadFileError, UnsupportedFileError
from .layouts import forms, has_layout

if TYPE_CHECKING:
    from torch import Tensor

    from .formats.base import TensorFile
    from .formats.source import Source

_CHUNK = 1 << 22  # values looked at together


def verify(path: str | Path, *, progress: bool = False) -> Detected:
    """`detect`, and then read every weight: packed sizes, scales, and values that are not finite.

    Returns:
        What `detect` does; its warnings also say what could not be checked.

    Raises:
        BadFileError: the first fault, with the names of tensor and file.
    """
    from tqdm import tqdm

    seen = detect(path)
    total = sum(len(src.tensors) for src in seen.sources.values())
    notes: dict[str, list[str]] = {}
    with tqdm(total=total, desc="Verifying", disable=not progress, delay=2, leave=False, unit="tensor") as bar:
        for name, src in seen.sources.items():
            notes[name] = _Contents(src).check(bar)
    parts = {name: replace(part, warnings=[*part.warnings, *notes[name]]) for name, part in seen.parts.items()}
    lines = [line if name == "." else f"{name}: {line}" for name, some in notes.items() for line in some]
    return replace(seen, warnings=[*seen.warnings, *lines], parts=parts)


class _Contents:
    """The weights of one component, opened."""

    def __init__(self, src: Source) -> None:
        self.src = src
        self.files: Mapping[Path, TensorFile] = {}

    @cached_property
    def shape_of(self) -> Callable[[str], tuple[int, ...] | None]:
        """See `_shapes`. Not before it is asked for: it imports diffusers."""
        return _shapes(self.src)

    def check(self, bar: Any) -> list[str]:
        """Read everything; what could not be checked, in sentences."""
        unknown: Counter[str] = Counter()
        self.files = self.src.open()
        try:
            for key in self.src.plain:
                self._finite(key, self._get(key))
                bar.update()
            for found in self.src.found.values():
                unknown.update(self._weight(found))
                bar.update(len(found.keys) + len(found.extra))
        finally:
            for file in self.files.values():
                file.close()
        return [
            f"{count} weights could be checked only in part, without a config.json: {why}"
            for why, count in unknown.items()
        ]

    def _get(self, key: str) -> Tensor:
        return self.files[self.src.home[key]].get(key)

    def _weight(self, found: Found) -> list[str]:
        """Read and decode one quantized weight; why that was not possible, if it is nobody's fault."""
        import torch

        try:
            packed = self._packed(found)
            for part, tensor in packed.parts.items():
                self._finite(found.keys[part], tensor)
            weight = backends.of_scheme(found.scheme).decode(packed, torch.float32)
        except BadFileError as error:
            raise BadFileError(f"{self._file(found.name)} was verified: {error.what}", error.why, error.fix) from error
        except Unfit as reason:
            for key in found.keys.values():
                self._finite(key, self._get(key))
            return [str(reason)]
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
            raise self._bad(found.name, f"its parts do not belong together: {error}") from error
        self._finite(found.name, weight)
        return []

    def _packed(self, found: Found) -> Packed:
        """The packed weight, with its parts held against each other and against what is known of its shape."""
        backend, spec = backends.of_scheme(found.scheme), self.src.specs.get(found.name)
        if spec is None:
            return backend.read(found, self.shape_of(found.name), self._get)
        # A file of ours is read as any reader of its format would, where the format has readers.
        told = replace(found, details={"dtype": spec.dtype, **found.details})
        packed = Packed(spec=spec, parts={part: self._get(key) for part, key in found.keys.items()})
        try:
            seen = backend.read(told, spec.shape, self._get)
        except NotImplementedError:
            sound = has_layout(packed)
        else:
            sound = forms(seen) == forms(packed)
            for name in spec.details.keys() & seen.spec.details.keys():
                said, shown = spec.details[name], seen.spec.details[name]
                if said != shown:
                    why = f"sdquant's metadata says {name}={said!r}, its tensors say {shown!r}"
                    raise self._bad(found.name, why)
        if not sound:
            parts = ", ".join(f"{part} {dtype} {list(shape)}" for part, (dtype, shape) in forms(packed).items())
            why = f"its parts ({parts}) are not those of a weight of {list(spec.shape)} in {spec.scheme}"
            raise self._bad(found.name, why)
        return packed

    def _finite(self, name: str, tensor: Tensor) -> None:
        import torch

        if not tensor.is_floating_point():
            return
        for chunk in torch.split(tensor.reshape(-1), _CHUNK):
            if not bool(torch.isfinite(chunk.float()).all()):
                raise self._bad(name, "it has values that are not finite")

    def _file(self, name: str) -> Path:
        found = self.src.found.get(name)
        return self.src.home[next(iter(found.keys.values())) if found is not None else name]

    def _bad(self, name: str, why: str) -> BadFileError:
        return BadFileError(
            f"Tensor {name!r} of {self._file(name)} was verified", why, "Quantize or download the model again"
        )


def _shapes(src: Source) -> Callable[[str], tuple[int, ...] | None]:
    """The float weight's shape by its name, from the model that the config describes; None where there is none."""
    if src.class_name is None or not src.config:
        return lambda name: None
    from . import components

    try:
        model = components.empty(src.library, src.class_name, src.config)
    except UnsupportedFileError:  # a class of a later diffusers or transformers
        return lambda name: None
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
    known = frozenset(shapes)

    def shape(name: str) -> tuple[int, ...] | None:
        found = components.model_name(name, known)
        return shapes[found] if found is not None else None

    return shape
