"""Results of a calibration that is under way, in a file: written after an image, read by the same calibration alone.

Sums of two calibrations that differ in anything that is counted are statistics of neither. So the file says what it is
of: the task, the pipeline, the share of the images, and the code and the libraries that collect.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..compat import hardware
from ..errors import BadFileError, SettingsError
from ..rules import QuantStat, statistics_file
from ..utils.version import __version__

if TYPE_CHECKING:
    from torch import Tensor

    from ..utils.distributed import Processes

_LIBRARIES = ("torch", "diffusers", "transformers")
_VALUES = 16  # of a tensor, evenly spaced, that tell a model from another of the same sizes
_AGAIN = "Delete it to start again, or choose another output file"


@dataclass(frozen=True)
class PartialStatistics:
    """A file of partial results.

    Attributes:
        file: its path. task: as JSON values. origin: what else has to be the same, JSON values by what it is in words.
    """

    file: Path
    task: Mapping[str, Any]
    origin: Mapping[str, Any]

    @staticmethod
    def of(file: Path, pipe: Any, task: Mapping[str, Any], processes: Processes | None) -> PartialStatistics:
        """Return the file of a calibration. It need not be there."""
        share = [0, 1] if processes is None else [processes.rank, processes.count]
        versions = hardware.versions()
        origin = {
            "the code of sdquant": _code(),
            **{f"the version of {name}": versions.get(name) for name in _LIBRARIES},
            "the weights": _digest(_weights(pipe)),
            "the scheduler or the tokenizers": _digest(_rest(pipe)),
            "the number of processes": share,
        }
        task_values, origin = json.loads(json.dumps([task, origin]))
        return PartialStatistics(file, task_values, origin)

    def write(self, done: int, statistics: Mapping[str, Tensor]) -> None:
        """Write what was found in the first `done` images."""
        about = {"task": self.task, "origin": self.origin, "done": done}
        statistics_file.write_statistics(self.file, statistics, about)

    def read(self, count: int) -> tuple[int, Mapping[str, Tensor]]:
        """Return the number of images that are done, and their statistics.

        Args:
            count: of images in all.

        Raises:
            SettingsError: the file is damaged, or of another calibration; what differs is named.
        """
        try:
            about = statistics_file.read_about(self.file)
            done, task, origin = int(about["done"]), dict(about["task"]), dict(about.get("origin", {}))
            names = statistics_file.names_in(self.file)
            statistics = {name: statistics_file.read_tensor(self.file, name) for name in names}
        except (BadFileError, KeyError, TypeError, ValueError) as error:
            raise SettingsError(f"Cannot resume from {self.file}", str(error), _AGAIN) from error
        if not origin:
            raise SettingsError(
                f"Cannot resume from {self.file}",
                "an earlier version of sdquant wrote it, which did not note what it is of and may have collected other "
                "numbers",
                _AGAIN,
            )
        differs = [key for key, value in self.task.items() if task.get(key) != value]
        differs += [what for what, value in self.origin.items() if origin.get(what) != value]
        if differs or not 0 <= done <= count:
            raise SettingsError(
                f"Cannot resume from {self.file}",
                f"it belongs to another calibration: {', '.join(differs) or 'the number of images'} differ",
                _AGAIN,
            )
        return done, statistics


def _digest(lines: Iterator[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def _code() -> str:
    """Return a digest of what collects: nobody has to remember to count a version up."""
    from . import input_magnitudes, input_moments, output_gradients, quality_statistics

    modules = (quality_statistics, input_moments, output_gradients, input_magnitudes, inspect.getmodule(QuantStat))
    try:
        return _digest(inspect.getsource(module) for module in modules if module is not None)
    except OSError:  # installed without sources
        return __version__


def _weights(pipe: Any) -> Iterator[str]:
    """Yield name, shape, dtype and some values of all tensors of a pipeline; those on the meta device have none."""
    import torch

    from ..models import weight_parts

    for component, model in sorted(weight_parts(pipe).items()):
        for name, tensor in model.state_dict().items():
            values: list[Any] = []
            if tensor.numel() and tensor.device.type != "meta":
                places = torch.arange(_VALUES, device="cpu") * tensor.numel() // _VALUES
                index = torch.unravel_index(places.to(tensor.device), tensor.shape or (1,))
                values = (tensor.detach() if tensor.ndim else tensor.detach()[None])[index].double().tolist()
            yield f"{component}.{name} {tuple(tensor.shape)} {tensor.dtype} {values}"


def _rest(pipe: Any) -> Iterator[str]:
    """Yield what schedulers and tokenizers of a pipeline say of themselves."""
    for name, part in sorted(getattr(pipe, "components", {}).items()):
        config = getattr(part, "config", None)
        if isinstance(config, Mapping) and not hasattr(part, "parameters"):
            values = {key: value for key, value in config.items() if not key.startswith("_")}
            yield f"{name} {type(part).__name__} {json.dumps(values, sort_keys=True, default=str)}"
        elif hasattr(part, "vocab_size"):
            yield f"{name} {type(part).__name__} {part.vocab_size}"
