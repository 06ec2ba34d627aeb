"""Check the contents of a file, not only its header: `sdquant.verify(path)`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..core import (
    LONE,
    PrequantizedWeight,
    ShapeUnknown,
    Unfit,
    leaf,
    packed_reader,
    read_weight,
    require_sound,
)
from ..errors import BadFileError, UnsupportedFileError
from ..formats import closing_files
from ..models import Detected, detect, stray_warnings
from ..utils.arguments import answered
from ..utils.progress import count_bar
from ..utils.tensors import is_finite

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from ..formats import Checkpoint, Given, TensorFile
    from ..models import fitting


@answered
def verify(
    path: str | Path,
    *,
    progress: bool = False,
    allow_pickle: bool = False,
    on_tensor: Callable[[int, int], None] | None = None,
    config: Given | None = None,
) -> Detected:
    """Run `detect`, then read every weight and check packed sizes, scales, and that all values are finite.

    Args:
        on_tensor: called with the tensors read and the total; what it raises is passed on.
        config: see `load_model`.

    Returns:
        The result of `detect`; its warnings also list what could not be checked.

    Raises:
        BadFileError: the first fault, naming the tensor and the file.
    """
    detected = detect(path, allow_pickle=allow_pickle, config=config)
    total = sum(len(src.tensors) for src in detected.sources.values())
    notes: dict[str, list[str]] = {}
    with count_bar("Verifying", total, "tensor", progress) as bar:
        count = _Count(bar, total, on_tensor)
        for name, src in detected.sources.items():
            part = detected.parts.get(name, detected)
            notes[name] = _Contents(src, part.family).check(count)
    parts = {name: replace(part, warnings=[*part.warnings, *notes[name]]) for name, part in detected.parts.items()}
    lines = [line if name == LONE else f"{name}: {line}" for name, some in notes.items() for line in some]
    return replace(detected, warnings=[*detected.warnings, *lines], parts=parts)


class _Count:
    """Counts tensors, for the bar and the caller."""

    def __init__(self, bar: Any, total: int, on_tensor: Callable[[int, int], None] | None) -> None:
        self._bar, self._total, self._on_tensor, self._done = bar, total, on_tensor, 0

    def update(self, count: int = 1) -> None:
        """Count some more."""
        self._bar.update(count)
        self._done += count
        if self._on_tensor is not None:
            self._on_tensor(self._done, self._total)


class _Contents:
    """The weights of one component, opened."""

    def __init__(self, src: Checkpoint, family: str | None = None) -> None:
        self.src, self.family = src, family
        self.shapes: dict[str, tuple[int, ...]] = {}  # of what was read
        self.guessed: set[str] = set()  # weights whose shape nothing records, see `models.lone_files`
        self.files: Mapping[Path, TensorFile] = {}

    @cached_property
    def model(self) -> tuple[Checkpoint, fitting.Shell] | None:
        """Return the source under the model's names, and the model; None if its class is unknown or needs a newer
        diffusers or transformers. Computed on first use, since it imports diffusers."""
        from ..models import fitting

        try:
            model = fitting.shell(self.src)
        except UnsupportedFileError:
            return None
        return None if model is None else (fitting.named(self.src, model), model)

    @cached_property
    def names(self) -> Mapping[str, str]:
        """Return the model's names of the file's tensors and quantized weights, by the names in the file."""
        here = self.model[0] if self.model is not None else None
        before = {key: name for name, key in self.src.keys.items()}  # its own names of what the file calls otherwise
        there = {} if here is None else {here.keys.get(name, name): name for name in here.names}
        return {before.get(key, key): name for key, name in there.items()}

    def check(self, bar: _Count) -> list[str]:
        """Read everything, and return a sentence for each thing that could not be checked."""
        unknown: Counter[str] = Counter()
        with closing_files(self.src.open()) as self.files:
            for key in self.src.plain:
                self._plain(key, self._get(key))
                bar.update()
            for entry in self.src.prequantized.values():
                unknown.update(self._weight(entry))
                bar.update(len(entry.keys) + len(entry.extra))
            doubts = self._complete()
        return [
            *doubts,
            *(
                f"{count} weights could be checked only in part without a config.json: {why}"
                for why, count in unknown.items()
            ),
        ]

    def _get(self, key: str) -> Tensor:
        return self.src.read(self.files, key)

    def _plain(self, key: str, tensor: Tensor) -> None:
        from ..models import misfit

        self.shapes[key] = tuple(tensor.shape)
        parameter = self._parameter(key)
        if parameter is not None or key not in self.names:
            self._finite(key, tensor)
        elif bool(tensor.isnan().any()):  # a buffer may be infinite on purpose, as Gemma 4's clipping limits are
            raise self._bad(key, packed_reader.NOT_FINITE)
        why = misfit(tuple(tensor.shape), tensor.is_floating_point(), parameter) if parameter is not None else None
        if why is not None:
            raise self._bad(key, why)

    def _parameter(self, key: str) -> nn.Parameter | None:
        """Return the model's parameter for a tensor of the file, or None if there is none or the model is unknown."""
        name = self.names.get(key)
        return self.model[1].parameter(name) if self.model is not None and name is not None else None

    def _complete(self) -> list[str]:
        """Return what is odd in a lone file, and the tensors that the model does not use, in sentences.

        Raises:
            BadFileError: a tensor that the model merges from several has another shape, or a folder, or a file that has
                nearly all, lacks one of the model's tensors. A single file may be one shard of several.
        """
        from ..models import fitting, lone_files

        if self.model is None:
            return self._alone()
        fitting.refuse_misfits(*self.model)
        src, model = self.model
        absent = fitting.absent(src, model)
        whole = lone_files.is_few(len(absent), len(model.known)) and not lone_files.is_shard(src.path.name)
        if src.path.is_dir() or whole:
            fitting.refuse_missing(src, model)
        return stray_warnings(src.path, src.strays)

    def _alone(self) -> list[str]:
        """Return what is odd in a lone file. Raise BadFileError for what cannot be right, whatever config it is for."""
        from ..models import lone_files

        src = self.src
        if src.path.is_dir() or src.config:
            return []
        file = lone_files.LoneFile(
            shapes=lone_files.unfolded(self.shapes) if src.container == "gguf" else self.shapes,
            quantized=src.prequantized, guessed=self.guessed, family=self.family,
            integers=[key for key, info in src.plain.items() if "float" not in info.dtype], filename=src.path.name,
        )  # fmt: skip
        fault = lone_files.fault(file)
        if fault is not None:
            raise self._bad(fault.name, fault.why)
        return lone_files.doubts(file)

    def _weight(self, entry: PrequantizedWeight) -> list[str]:
        """Read and dequantize one weight; return the reason if that is impossible although the file is sound."""
        import torch

        try:
            parameter = self._parameter(entry.name)
            shape, spec, stored = None, self.src.specs.get(entry.name), entry
            if parameter is not None and self.model is not None:
                shape = tuple(parameter.shape)
                stored = self.model[1].described(self.names[entry.name], entry) if spec is None else entry
            packed = read_weight(stored, spec, shape, self._get)
            require_sound(entry, packed)
            self.shapes[entry.name] = packed.spec.shape
            for part, tensor in packed.parts.items():
                self._finite(entry.keys.get(part, entry.name), tensor)
            weight = packed.spec.scheme.codec.decode(packed, torch.float32)
        except BadFileError as error:
            why = f"{error.inner}: {error.why}"
            raise BadFileError(f"{self._file(entry.name)} failed verification", why, error.fix) from error
        except Unfit as reason:
            for key in entry.keys.values():
                tensor = self._get(key)
                self._finite(key, tensor)
                self.shapes[key] = tuple(tensor.shape)
            if isinstance(reason, ShapeUnknown):
                self._guess(entry.name, reason.count)
            return [str(reason)]
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
            raise self._bad(entry.name, f"its tensors do not fit together: {error}") from error
        self._finite(entry.name, weight)
        return []

    def _guess(self, name: str, count: int) -> None:
        """Take a weight of so many values to have as many rows as its bias."""
        rows = self.shapes.get(leaf(name, "bias"), ())
        if len(rows) == 1 and rows[0] and count % rows[0]:
            raise self._bad(name, f"it has {count} values, and its bias {rows[0]}, which does not divide them")
        if len(rows) == 1 and rows[0]:
            self.shapes[name] = (rows[0], count // rows[0])
            self.guessed.add(name)

    def _finite(self, name: str, tensor: Tensor) -> None:
        if not is_finite(tensor):
            raise self._bad(name, packed_reader.NOT_FINITE)

    def _file(self, name: str) -> Path:
        entry = self.src.prequantized.get(name)
        return self.src.home.get(next(iter(entry.keys.values())) if entry is not None else name, self.src.path)

    def _bad(self, name: str, why: str) -> BadFileError:
        return BadFileError(
            f"Tensor {name!r} of {self._file(name)} failed verification", why, "Quantize or download the model again"
        )
