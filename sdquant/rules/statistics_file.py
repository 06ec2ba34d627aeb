"""Calibration statistics as a safetensors file.

Names are "<component>.<operand>.<what>", see `static_range`, or those of `weight_samples`; the metadata
"sdquant_quant_stats" contains, as JSON, the rules and the number of images of the calibration.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Mapping
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadFileError, SettingsError
from ..formats import safetensors, safetensors_writer

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import TensorInfo

METADATA_KEY = "sdquant_quant_stats"
FORMAT = 1
SAMPLE = ".weight.sample"  # the end of the names of `weight_samples`, which are no statistics
LARGE = ".sum_of_moments"  # the end of the names of what is read one at a time, by `read_tensor`
_MAKE = "Create it with `sdquant calibrate`"


def write_statistics(file: Path, statistics: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write statistics; `about`: JSON values for the metadata."""
    metadata = json.dumps({"format": FORMAT, **about}, sort_keys=True)
    safetensors_writer.write(file, statistics, {METADATA_KEY: metadata})


def read_statistics(file: str | Path) -> Mapping[str, Tensor]:
    """Return the statistics in a file but for the large ones (see `layer_statistics`) and samples; cached.

    Raises:
        SettingsError: there is no such file. BadFileError: it is damaged, or not a file of statistics.
    """
    return _read(*_known(file))


def names_in(file: str | Path) -> Mapping[str, TensorInfo]:
    """Return the names of all statistics in a file, and their shapes. Raises as `read_statistics`."""
    return _header(*_known(file))[0].tensors


def read_tensor(file: str | Path, name: str) -> Tensor:
    """Return one of the statistics in a file, with memory of its own. Raises as `read_statistics`."""
    header = _header(*_known(file))[0]
    with closing(safetensors.SafetensorsFile(Path(file), header)) as opened:
        return opened.get(name).clone()


def read_about(file: str | Path) -> Mapping[str, Any]:
    """Return the metadata of a file of statistics. Raises as `read_statistics`."""
    return _header(*_known(file))[1]


def of_component(statistics: Mapping[str, Tensor], component: str) -> dict[str, Tensor]:
    """Return the statistics of one component, without its name. "" is the only UNet or transformer in them."""
    names = {name.partition(".")[0] for name in statistics}
    component = component or _main(names)
    if not component:
        return dict(statistics)
    prefix = f"{component}."
    return {name.removeprefix(prefix): value for name, value in statistics.items() if name.startswith(prefix)}


def component_in(file: str | Path, component: str) -> str:
    """Return the name of a component in a file. "" is the only UNet or transformer there, and "" if there is none.
    Raises as `read_statistics`."""
    return component or _main({name.partition(".")[0] for name in names_in(file)})


def _main(components: Container[str]) -> str:
    return next((name for name in ("unet", "transformer", "prior", "model") if name in components), "")


def _known(file: str | Path) -> tuple[str, int, int]:
    if not os.path.isfile(file):
        why = "it is a folder" if os.path.isdir(file) else "there is no such file"
        raise SettingsError(f"Cannot read quant_stats={str(file)!r}", why, _MAKE)
    status = os.stat(file)
    return os.path.abspath(file), status.st_mtime_ns, status.st_size


@lru_cache(maxsize=4)
def _read(file: str, changed: int, size: int) -> Mapping[str, Tensor]:
    header = _header(file, changed, size)[0]
    # Closed at once: Windows does not replace a file that is mapped.
    with closing(safetensors.SafetensorsFile(Path(file), header)) as opened:
        return {name: opened.get(name).clone() for name in opened.tensors if not name.endswith((LARGE, SAMPLE))}


@lru_cache(maxsize=16)
def _header(file: str, changed: int, size: int) -> tuple[safetensors.SafetensorsHeader, Mapping[str, Any]]:
    header = safetensors.read_header(Path(file))
    return header, _about(file, header.metadata)


def _about(file: str, metadata: Mapping[str, str]) -> Mapping[str, Any]:
    what = f"Cannot read calibration statistics from {file}"
    try:
        about = json.loads(metadata[METADATA_KEY])
        version = about["format"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BadFileError(what, "its metadata does not say that it holds any", _MAKE) from error
    if version != FORMAT:
        raise BadFileError(what, f"it has format {version!s:.40}, but this version reads format {FORMAT}", _MAKE)
    checked: Mapping[str, Any] = about
    return checked
