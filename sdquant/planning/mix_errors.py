"""How much noise each scheme makes in the output of a model, weight by weight: measured by encoding some rows.

The model of `rules.layer_statistics`: noise dW in a weight makes sum_o s_o dW_o H dW_o^T in the output, relative to it.
With a file of statistics, s and H are measured; codes are then chosen by GPTQ, and the noise that counts is halfway, in
decibels, between that of plain ones and what GPTQ leaves of it for inputs that are exactly so. Without s, as of
`sdquant calibrate --gradients 0`, a layer whose output is all noise makes as much of it as layers of its role do on
average (`prior`); without H, inputs count alike.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import GPTQ, Unfit, registry
from ..errors import SdquantError, SettingsError
from ..rules import shrink_moments
from ..utils.atomic_write import whole_file
from ..utils.progress import count_bar

if TYPE_CHECKING:
    from torch import Tensor

    from ..formats import Checkpoint
    from ..rules import LayerStatistics

log = logging.getLogger(__name__)

ROWS = 128  # of a weight that are encoded, evenly spaced
_FORMAT = 5
# What GPTQ takes back counts to this power: layers before change the inputs, and not all that is foretold comes true.
# Of 0, 0.5 and 1 mixes of 0.28 of bf16 came to 38.2, 38.3 and 38.1 dB on digits-flux and 40.1, 40.6 and 40.1 on
# digits-sd, those of 0.2 to 28.8, 28.2 and 27.4, and 29.1, 29.2 and 29.3; foretold were 29, 32 and 34 of the first.
# How much comes true grows with the inputs for each column: a third of the decibels where there are fewer (digits-flux,
# 0.2), nearly all where there are seven (digits-sd). A power that follows them, as 0.4 + 0.6 r / (r + 4), halves the
# median miss of digits-sd, and ranks its mixes worse: 0.9928 instead of 0.9941.
_BELIEF = 0.5
# Noise in the output, in dB below it, of a layer that is all noise, by role: means over the digits models
# (bench/results/mixes.json). The first pattern that matches a module path counts.
_PRIORS: tuple[tuple[str, float], ...] = (
    (r"^(conv_in|conv_out|x_embedder|proj_out|img_in|final_layer\.linear|patch_embed\.proj)$", -4.0),
    (r"(^|\.)(time|time_text|timestep|guidance|class|add|label)_?\w*embed", -24.0),
    (r"(norm\w*\.linear|time_emb_proj|modulation|adaLN\w*|mod)(\.\d+)?$", -24.0),
    (r"(^|\.)(to_q|to_k|q|k|q_proj|k_proj|query|key)$", -27.0),
    (r"mid_block", -30.0),
    (r"(conv_shortcut|upsamplers|downsamplers)", -15.0),
)
_PRIOR = -18.0

# Noise of a weight in each scheme, by the weight's name.
Errors = Mapping[str, Mapping[str, float]]


def prior(path: str) -> float:
    """Return the noise in the output, relative to it, of a layer that is all noise."""
    level = next((value for pattern, value in _PRIORS if re.search(pattern, path)), _PRIOR)
    return float(10 ** (level / 10))


def typical_errors(schemes: Mapping[str, Sequence[str]]) -> Errors:
    """Return the noise of each weight by its layer's role and the precision of its schemes: no weight is read.

    Args:
        schemes: by name of a weight.
    """
    from .estimate.scheme_snr import snr

    ratios = {word: snr(word) for row in schemes.values() for word in row}
    return {
        name: {
            word: prior(name.removesuffix(".weight")) * 10 ** (-ratio / 10)
            for word in row
            if (ratio := ratios[word]) is not None
        }
        for name, row in schemes.items()
    }


def measure_errors(
    names: Sequence[str],
    read: Callable[[str], Tensor],
    schemes: Mapping[str, Sequence[str]],
    statistics: Mapping[str, LayerStatistics] | None,
    tick: Callable[[int], object],
    errors: dict[str, dict[str, float]] | None = None,
) -> dict[str, dict[str, float]]:
    """Encode some rows of each weight in each scheme, and return the noise that they make in the output.

    Args:
        names: of the weights. read: returns the float weight of a name. schemes: by name of a weight.
        statistics: of the component, by path; None without.
        tick: called after each weight with 1.
        errors: of weights that were measured before; the others are added to it.
    """
    errors = {} if errors is None else errors
    for name in names:
        if name not in errors:
            errors[name] = _noises(name.removesuffix(".weight"), read(name), schemes[name], statistics)
        tick(1)
    return errors


def _noises(
    path: str, weight: Tensor, schemes: Sequence[str], statistics: Mapping[str, LayerStatistics] | None
) -> dict[str, float]:
    import torch

    count = min(len(weight), ROWS)
    index = torch.arange(count, device=weight.device) * len(weight) // count
    rows = weight[index].contiguous()
    layer = None if statistics is None else statistics.get(path)
    moments = None if layer is None else _moments(layer, weight)
    sensitivity = None if layer is None or moments is None else layer.sensitivity
    if sensitivity is not None and len(sensitivity) != len(weight):
        raise _of_another_size(path, weight)
    floats = rows.float().flatten(1)
    if moments is None:
        scale = prior(path) / max(float(floats.square().sum()), 1e-30)
    elif sensitivity is None:
        scale = prior(path) / max(float(_through(floats, moments).sum()), 1e-30)
    noises = {}
    gptq = None if moments is None else _GptqShare(moments, floats.shape[1])
    for scheme in schemes:
        difference = _difference(rows, scheme)
        if difference is None or not bool(difference[0].isfinite().all()):  # too large for its scales
            continue
        noise, rotation = difference
        if moments is None or gptq is None:
            noises[scheme] = scale * float(noise.square().sum())
            continue
        each = _through(noise, moments)
        if GPTQ in registry.parse(scheme).scheme.options:
            each = each * gptq.of(noise, rotation, each)
        if sensitivity is None:
            noises[scheme] = scale * float(each.sum())
        else:
            noises[scheme] = float((sensitivity.to(each.device)[index] * each).sum()) * len(weight) / count
    return {scheme: noise for scheme, noise in noises.items() if math.isfinite(noise)}  # squares may overflow


class _GptqShare:
    """What GPTQ leaves of the noise of plain codes of one layer.

    Args:
        moments: of its inputs. columns: of its weight.
    """

    def __init__(self, moments: Tensor, columns: int) -> None:
        self._moments, self._columns = moments, columns
        self._unexplained: dict[int, Tensor] = {}

    def of(self, noise: Tensor, rotation: int, plain: Tensor) -> float:
        """Return the share that counts of noise `plain` [rows], which errors [rows, columns] of plain codes make."""
        total = float(plain.sum())
        if self._moments.shape[1] == 1 or not total > 0:  # each input by itself: there is nothing to take back
            return 1.0
        if rotation not in self._unexplained:
            from ..backends import unexplained

            self._unexplained[rotation] = unexplained(self._moments, self._columns, rotation)
        if rotation:
            from ..core import hadamard

            noise = hadamard.rotate_by_matrix(noise, rotation)
        left = float((noise.square() @ self._unexplained[rotation]).sum())
        return float(min(1.0, left / total) ** _BELIEF)


def _moments(layer: LayerStatistics, weight: Tensor) -> Tensor | None:
    """Return the second moments of a layer's inputs as GPTQ takes them; None if calibration saw no input."""
    moments, inputs = layer.second_moments, weight[0].numel()
    if moments is None:
        return None
    blocks, size, _ = moments.shape
    if blocks != -(-inputs // size) or (blocks == 1 and inputs != size):
        raise _of_another_size(layer.path, weight)
    return shrink_moments(moments, layer.rows, inputs).to(weight.device)


def _of_another_size(path: str, weight: Tensor) -> SettingsError:
    return SettingsError(
        f"Cannot choose a scheme for {path!r}",
        f"quant_stats is about a layer of another size, but this one is {list(weight.shape)}",
        "Calibrate this model: sdquant calibrate MODEL --prompt ... -o FILE",
    )


def _difference(rows: Tensor, scheme: str) -> tuple[Tensor, int] | None:
    """Return decoded minus encoded rows, float32 [rows, columns], and the rotation of their codes; None if the scheme
    does not fit."""
    import torch

    spec = registry.parse(scheme)
    codec = spec.scheme.codec
    try:
        packed = codec.encode(rows, spec)
    except (Unfit, SdquantError, ImportError, RuntimeError, ValueError) as error:
        log.info("%s cannot be measured: %s", scheme, error)
        return None
    difference: Tensor = codec.decode(packed, torch.float32) - rows.float()
    return difference.flatten(1), packed.spec.rotation


def _through(noise: Tensor, moments: Tensor) -> Tensor:
    """Return dW_o H dW_o^T of each row: [rows]. moments: see `QuantSpec.second_moments`."""
    from torch.nn import functional as F

    blocks, size, _ = moments.shape
    noise = F.pad(noise, (0, blocks * size - noise.shape[1])).reshape(len(noise), blocks, size).transpose(0, 1)
    return ((noise @ moments) * noise).sum(dim=(0, 2))


def remembered(
    key: Mapping[str, Any],
    schemes: Mapping[str, Sequence[str]],
    progress: bool,
    run: Callable[[Callable[[int], object], dict[str, dict[str, float]]], object],
) -> Errors:
    """Return the errors of all weights that `run` adds to a dict, or that were kept by another process.

    What is measured when `run` is interrupted is kept too, and need not be measured again.

    Args:
        key: what they depend on, JSON values. schemes: by name of each weight.
        run: is called with what to call after each weight, and with the errors that are known.
    """
    errors, place = _kept(key, schemes), _place(key)
    if len(errors) == len(schemes):
        return errors
    known = len(errors)
    try:
        with count_bar("Measuring schemes", len(schemes), "weight", progress) as bar:
            run(bar.update, errors)
    finally:
        if len(errors) > known:
            _keep(place, errors)
    return errors


def remembered_errors(key: Mapping[str, Any], schemes: Mapping[str, Sequence[str]]) -> Errors | None:
    """Return what `remembered` has for this key; None if it does not have it of all weights."""
    errors = _kept(key, schemes)
    return errors if len(errors) == len(schemes) else None


def _keep(place: Path, errors: Errors) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(place) as out:
            out.write(json.dumps(errors).encode())
    except (SdquantError, OSError) as error:
        log.info("the errors of schemes were not kept: %s", error)


def _kept(key: Mapping[str, Any], schemes: Mapping[str, Sequence[str]]) -> dict[str, dict[str, float]]:
    """Return the errors in a file, those that are some: anything may have happened to it since it was written."""
    try:
        rows = json.loads(_place(key).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(rows, dict):
        return {}
    return {name: rows[name] for name, words in schemes.items() if _is_row(rows.get(name), words)}


def _is_row(row: object, words: Sequence[str]) -> bool:
    """Return whether this is the noise of a weight by scheme."""
    return isinstance(row, dict) and all(
        word in words and isinstance(noise, float) and 0 <= noise < math.inf for word, noise in row.items()
    )


def _place(key: Mapping[str, Any]) -> Path:
    text = json.dumps({"format": _FORMAT, **key}, sort_keys=True, default=str)
    return _folder() / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "sdquant" / "errors"


def file_identity(file: str) -> list[object]:
    """Return what tells whether a file is the same as before."""
    status = os.stat(file)
    return [os.path.abspath(file), status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def identity(src: Checkpoint) -> Iterator[list[object]]:
    """Yield what tells whether a component's files are the same as before."""
    for file in src.files:
        yield file_identity(str(file.resolve()))
