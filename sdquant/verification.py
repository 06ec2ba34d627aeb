"""Look into a file's contents, not only its header: `sdquant.verify(path)`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import backends
from .backends.base import Found, Unfit
from .detection import Detected, detect
from .errors import BadFileError, UnsupportedFileError
from .finite import finite
from .formats import families
from .planning.arguments import answered
from .reading import NOT_FINITE, read_weight, require_sound

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .formats.base import TensorFile
    from .formats.source import Source


@answered
def verify(path: str | Path, *, progress: bool = False, allow_pickle: bool = False) -> Detected:
    """`detect`, and then read every weight: packed sizes, scales, and values that are not finite.

    Returns:
        What `detect` does; its warnings also say what could not be checked.

    Raises:
        BadFileError: the first fault, with the names of tensor and file.
    """
    from tqdm import tqdm

    seen = detect(path, allow_pickle=allow_pickle)
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
    def wanted(self) -> Mapping[str, nn.Parameter]:
        """See `_parameters`. Not before it is asked for: it imports diffusers."""
        return _parameters(self.src)

    @cached_property
    def known(self) -> frozenset[str]:
        """The names of `wanted`."""
        return frozenset(self.wanted)

    def check(self, bar: Any) -> list[str]:
        """Read everything; what could not be checked, in sentences."""
        unknown: Counter[str] = Counter()
        self.files = self.src.open()
        try:
            for key in self.src.plain:
                self._plain(key, self._get(key))
                bar.update()
            for found in self.src.found.values():
                unknown.update(self._weight(found))
                bar.update(len(found.keys) + len(found.extra))
            self._complete()
        finally:
            for file in self.files.values():
                file.close()
        return [
            f"{count} weights could be checked only in part, without a config.json: {why}"
            for why, count in unknown.items()
        ]

    def _get(self, key: str) -> Tensor:
        return self.files[self.src.home[key]].get(key)

    def _plain(self, key: str, tensor: Tensor) -> None:
        from .install import misfit

        self._finite(key, tensor)
        wanted = self._parameter(key)
        why = misfit(tuple(tensor.shape), tensor.is_floating_point(), wanted) if wanted is not None else None
        if why is not None:
            raise self._bad(key, why)

    def _parameter(self, name: str) -> nn.Parameter | None:
        """The model's parameter of that name; None if it has none, or no model is known."""
        from . import components

        found = components.model_name(name, self.known) if self.known else None
        return self.wanted[found] if found is not None else None

    def _complete(self) -> None:
        """Raise BadFileError if the model has parameters that are not in its folder. A lone file may be some of it."""
        if not self.src.path.is_dir():
            return
        got = {id(self._parameter(name)) for name in self.src.names} if self.wanted else set()
        missing = sorted(name for name, parameter in self.wanted.items() if id(parameter) not in got)
        if missing:
            raise BadFileError(
                f"{self.src.path} was verified",
                f"{len(missing)} of the model's tensors are not in it, the first is {missing[0]!r}",
                "Check that the weights and the config belong together",
            )

    def _weight(self, found: Found) -> list[str]:
        """Read and decode one quantized weight; why that was not possible, if it is nobody's fault."""
        import torch

        try:
            wanted = self._parameter(found.name)
            shape = tuple(wanted.shape) if wanted is not None else None
            packed = read_weight(found, self.src.specs.get(found.name), shape, self._get)
            require_sound(found, packed)
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

    def _finite(self, name: str, tensor: Tensor) -> None:
        if not finite(tensor):
            raise self._bad(name, NOT_FINITE)

    def _file(self, name: str) -> Path:
        found = self.src.found.get(name)
        return self.src.home[next(iter(found.keys.values())) if found is not None else name]

    def _bad(self, name: str, why: str) -> BadFileError:
        return BadFileError(
            f"Tensor {name!r} of {self._file(name)} was verified", why, "Quantize or download the model again"
        )


def _parameters(src: Source) -> Mapping[str, nn.Parameter]:
    """The parameters, by name, of the model that the config describes; {} where there is none that is known."""
    row = families.recognise(src.names)
    if src.class_name is None or not src.config or (row is not None and row.foreign):
        return {}
    from . import components

    try:
        model = components.empty(src.library, src.class_name, src.config)
    except UnsupportedFileError:  # a class of a later diffusers or transformers
        return {}
    return dict(model.named_parameters(remove_duplicate=False))
